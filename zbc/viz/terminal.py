"""A timeline as text: one row per rank, readable without colour.

     0 |F0F1F2F3......D0  F4D1  F5D2  F6D3  F7D4  D5  D6  D7  |
     1 |..F0F1F2....D0  F3D1  F4D2  F5D3  F6D4  F7D5  D6  D7  |

A block begins with the letter of its op, then its microbatch where that fits, then blanks to its end; dots are idle.
Lower case is every second stage of a rank, so that the legs of a V and the chunks of a loop can be told apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.text import Text

from zbc.compiler.cost import Costs
from zbc.compiler.memory import curve
from zbc.compiler.simulate import Timeline
from zbc.ir import Kind, Op, Program
from zbc.text import percent, short, wrap
from zbc.viz.cells import Block, Grid, Window, by_slot, by_time

LETTERS = {Kind.F: "F", Kind.B: "B", Kind.W: "W", Kind.BW: "D"}
_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward for the input",
    Kind.W: "backward for the weights",
    Kind.BW: "both backwards in one",
}
# Two shades per kind, by microbatch, keep neighbours of one kind apart.
_STYLES = {
    Kind.F: ("white on color(25)", "white on color(31)"),
    Kind.B: ("black on color(79)", "black on color(115)"),
    Kind.W: ("black on color(221)", "black on color(229)"),
    Kind.BW: ("black on color(108)", "black on color(151)"),
}
_IDLE_STYLE = "dim"
_LEVELS = " ▁▂▃▄▅▆▇█"
_SPARK = 10  # cells of a memory line
_SPARK_FROM = 100  # columns of a picture that has room for memory lines


@dataclass(frozen=True, slots=True)
class View:
    """What to show: `ranks` (all if None), the `zoom` window in ms, the width in columns; `unicode` allows blocks."""

    width: int = 100
    by: Literal["time", "slot"] = "time"
    ranks: tuple[int, ...] | None = None
    zoom: Window | None = None
    unicode: bool = True


def draw(program: Program, timeline: Timeline, costs: Costs, view: View = View()) -> Text:
    """The picture with title, axis and legend; lines are at most `view.width` wide and end without a newline."""
    ranks = view.ranks if view.ranks is not None else tuple(range(timeline.ranks))
    window = view.zoom or (0.0, timeline.makespan or 1.0)
    label = len(str(timeline.ranks - 1)) + 1
    lines = [Text(title(program))]
    if view.by == "slot":
        grid = by_slot(timeline, window)
        lines += _panels(program, grid, ranks, label, view.width)
    else:
        tails = _memory_lines(timeline, costs, ranks, window) if _has_memory(view) else [""] * len(ranks)
        room = max(1, view.width - label - 3 - max(map(len, tails)))
        grid = by_time(timeline, window, room)
        rows = [_row(program, grid, rank, 0, grid.columns) for rank in ranks]
        for rank, row, tail in zip(ranks, rows, tails, strict=True):
            lines.append(Text.assemble(f"{rank:>{label}} |", row, f"|{tail}"))
        lines.append(Text(f"{'ms':>{label}} {_ticks(grid, room + 1)}".rstrip()))
    notes = [*_legend(program, view), *_notes(program, timeline, grid, window, view)]
    return Text("\n").join([*lines, Text(), *(Text(note) for note in notes)])


def title(program: Program) -> str:
    """`zb-v: 4 ranks, 8 stages, 8 microbatches`."""
    placement = program.placement
    counts = [(placement.ranks, "rank"), (placement.stages, "stage"), (program.microbatches, "microbatch")]
    name = program.history[0] if program.history else "program"
    return f"{name}: " + ", ".join(_count(number, noun) for number, noun in counts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('h') else 's'}"


def verdict(timeline: Timeline) -> str:
    """Both costs of a step, each with its bubble rate."""
    return (
        f"makespan {short(timeline.makespan)} ms, of which bubble {percent(timeline.bubble_rate_makespan)}; "
        f"span {short(timeline.span)} ms, of which bubble {percent(timeline.bubble_rate_span)}"
    )


# ---- rows ----------------------------------------------------------------------------------------------------


def _row(program: Program, grid: Grid, rank: int, first: int, stop: int, cell: int = 1) -> Text:
    """Columns first..stop of a rank, `cell` characters each."""
    row, at = Text(), first
    stages = program.placement.stages_of(rank)
    for block in grid.rows[rank]:
        begin, end = max(block.first, first), min(block.first + block.cells, stop)
        if begin >= end:
            continue
        row.append("." * (cell * (begin - at)), _IDLE_STYLE)
        odd = stages.index(block.op.stage) % 2 == 1
        row.append(_label(block, odd, cell * (end - begin)), _STYLES[block.op.kind][block.op.mb % 2])
        at = end
    return row.append("." * (cell * (stop - at)), _IDLE_STYLE)


def _label(block: Block, odd: bool, room: int) -> str:
    letter = _letter(block.op, odd)
    text = f"{letter}{block.op.mb}"
    return (text if len(text) <= room else letter).ljust(room)


def _letter(op: Op, odd: bool) -> str:
    letter = LETTERS[op.kind]
    return letter.lower() if odd else letter


def _panels(program: Program, grid: Grid, ranks: Sequence[int], label: int, width: int) -> list[Text]:
    """The slots in as many panels, one below the other, as the width demands."""
    cell = 1 + len(str(program.microbatches - 1))
    per_panel = max(1, (width - label - 3) // cell)
    lines: list[Text] = []
    for first in range(0, grid.columns, per_panel):
        stop = min(grid.columns, first + per_panel)
        if first:
            lines.append(Text())
        for rank in ranks:
            lines.append(Text.assemble(f"{rank:>{label}} |", _row(program, grid, rank, first, stop, cell), "|"))
    return lines


# ---- what stands around the rows -----------------------------------------------------------------------------


def _ticks(grid: Grid, room: int) -> str:
    """A bar and the ms at round times; the bar stands under the cell that begins there."""
    begin, end = grid.edges[0], grid.edges[-1]
    step = (end - begin) / grid.columns
    every = _round_up(10 * step)
    decimals = max(0, -math.floor(math.log10(every) + 1e-9))
    line = ""
    number = math.ceil(begin / every - 1e-9)
    while number * every <= end + 1e-9 * every:
        column = 1 + round((number * every - begin) / step)
        text = f"|{number * every:.{decimals}f}"
        if column + len(text) <= room + 1 and (not line or column > len(line)):
            line = line.ljust(column) + text
        number += 1
    return line


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value * (1 - 1e-9))


def _has_memory(view: View) -> bool:
    return view.unicode and view.width >= _SPARK_FROM


def _memory_lines(timeline: Timeline, costs: Costs, ranks: Sequence[int], window: Window) -> list[str]:
    """Per rank, the activation units held over the window, and their peak over the whole step."""
    curves = [list(curve(timeline, rank, costs)) for rank in range(timeline.ranks)]
    peaks = [max((units for _, units in found), default=0.0) for found in curves]
    highest = max(peaks) or 1.0
    digits = max(len(short(peak, 3)) for peak in peaks)
    begin = min(timeline.first_start(r) for r in range(timeline.ranks))
    lines = []
    for rank in ranks:
        levels = _most_per_part([(time - begin, units) for time, units in curves[rank]], window, _SPARK)
        spark = "".join(_LEVELS[math.ceil(round(8 * level / highest, 6))] for level in levels)
        lines.append(f" {spark} {short(peaks[rank], 3):>{digits}}")
    return lines


def _most_per_part(points: Sequence[tuple[float, float]], window: Window, parts: int) -> list[float]:
    """The most that was held in each of `parts` equal parts of the window."""
    most = [0.0] * parts
    step = (window[1] - window[0]) / parts
    ends = [time for time, _ in points[1:]] + [math.inf]
    for (time, units), end in zip(points, ends, strict=True):
        first = max(0, math.floor((time - window[0]) / step + 1e-9))
        last = parts - 1 if end == math.inf else min(parts - 1, math.ceil((end - window[0]) / step - 1e-9) - 1)
        for part in range(first, last + 1):
            most[part] = max(most[part], units)
    return most


def _legend(program: Program, view: View) -> list[str]:
    """What letters, case and the memory lines mean, as far as this picture has them."""
    present = {op.kind for ops in program.ranks for op in ops}
    words = [f"{letter} {_NAMES[kind]}" for kind, letter in LETTERS.items() if kind in present] + [". idle"]
    chunks = max(len(program.placement.stages_of(rank)) for rank in range(program.placement.ranks))
    if chunks > 1:
        words.append("lower case: the rank's second stage" if chunks == 2 else "lower case: every second stage")
    if view.by == "time" and _has_memory(view):
        words.append("right: activation units held, and their peak")
    return wrap(words, view.width)


def _notes(program: Program, timeline: Timeline, grid: Grid, window: Window, view: View) -> list[str]:
    notes = wrap(verdict(timeline).split("; "), view.width, between="; ")
    if grid.hidden:
        cell = short((window[1] - window[0]) / grid.columns, 3)
        counts = [f"{few} of {all_} {LETTERS[kind]}" for kind, (few, all_) in grid.hidden.items()]
        words = [f"too short for a cell of {cell} ms: {counts[0]}", *counts[1:], "see --zoom A-B and --width N"]
        notes += wrap(words, view.width, between=", ")
    if view.by == "slot":
        notes += wrap(["by slot: columns in order of starts", "widths are not times"], view.width)
    return notes
