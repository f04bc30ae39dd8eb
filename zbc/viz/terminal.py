"""A timeline as text: one row per rank, readable without colour.

     0 |F0F1F2F3......D0  F4D1  F5D2  F6D3  F7D4  D5  D6  D7  |
     1 |..F0F1F2....D0  F3D1  F4D2  F5D3  F6D4  F7D5  D6  D7  |

A block begins with the letter of its op, then its microbatch if it fits, then blanks to its end; dots are idle. Lower
case is every second stage of a rank, to tell the legs of a V and the chunks of a loop apart; on a terminal the third
and the fourth are underlined. Of a step whose ops are shorter than a cell three windows are drawn, `~` between them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Literal

from rich.text import Text

from zbc.compiler.cost.cost import Costs
from zbc.ir import Kind, Op, Program
from zbc.text import short, wrap
from zbc.viz.cells import CellGrid, by_slot, by_time, ticks
from zbc.viz.look import chunks_of, entries, letter, look
from zbc.viz.look import label as label_of
from zbc.viz.strip import Drawn, Strip, Window, longest, signs
from zbc.viz.words import verdict

_IDLE_STYLE = "dim"
_LEVELS = " ▁▂▃▄▅▆▇█"
_SPARK = 10  # cells of a memory line
_SPARK_FROM = 100  # least columns of a picture with memory lines
_BREAK = "~"  # between the windows of a long step


@dataclass(frozen=True, slots=True)
class View:
    """Options: `ranks` (all if None), the `zoom` window in ms, the width in columns; `unicode` allows blocks."""

    width: int = 100
    by: Literal["time", "slot"] = "time"
    ranks: tuple[int, ...] | None = None
    zoom: Window | None = None
    unicode: bool = True
    bubbles: bool = False  # show the papers' rates, too


def draw(drawn: Sequence[Drawn], view: View = View()) -> Text:
    """One plan, or several below one another, on one time axis. With titles, axis and legend; lines are at most
    `view.width` wide, and the last one has no newline."""
    several = len(drawn) > 1
    window = view.zoom or (0.0, longest([plan.strip for plan in drawn]))
    tails = [_tails(plan.strip, plan.costs, view, window) for plan in drawn]
    width = max((len(tail) for plan_tails in tails for tail in plan_tails), default=0)
    legend = [Text(note) for note in _legend(drawn, view)]
    lines: list[Text] = []
    for plan, plan_tails in zip(drawn, tails, strict=True):
        panel, grids = _panel(plan, view, window, [tail.ljust(width) for tail in plan_tails], exactly=several)
        words = wrap(verdict(plan.strip.steps[0], bubbles=view.bubbles).split("; "), view.width, between="; ")
        notes = [Text(note) for note in [*words, *_steps(plan.strip, view), *_unseen(grids, view)]]
        text = plan.heading(several=several)  # cut to the width of the picture: plan names are paths
        text = text if len(text) <= view.width else f"...{text[len(text) - view.width + 3 :]}"
        lines += [Text(text), *panel]
        lines += [*notes, Text()] if several else [Text(), *legend, *notes]
    slots = ["by slot: columns in order of starts", "widths are not times"] if view.by == "slot" else []
    return Text("\n").join([*lines, *(legend if several else []), *map(Text, wrap(slots, view.width))])


def _panel(
    one: Drawn, view: View, window: Window, tails: Sequence[str], *, exactly: bool
) -> tuple[list[Text], list[CellGrid]]:
    """The rows of one plan with its axis, and the cells they show."""
    program, strip = one.program, one.strip
    ranks = _ranks(strip, view)
    label = len(str(strip.ranks - 1)) + 1
    if view.by == "slot":
        grid = by_slot(strip, window)
        return _panels(program, grid, ranks, label, view.width), [grid]
    room = max(1, view.width - label - 3 - max(map(len, tails), default=0))
    parts = [] if exactly or view.zoom else _windows(strip, window, room)
    if parts:
        grids = [by_time(strip, part, (room - 2) // 3, exactly=True) for part in parts]
    else:
        grids = [by_time(strip, window, room, exactly=exactly)]
    lines = []
    for rank, tail in zip(ranks, tails, strict=True):
        row = Text(_BREAK).join(_row(program, grid, rank, 0, grid.columns) for grid in grids)
        lines.append(Text.assemble(f"{rank:>{label}} |", row, f"|{tail}".rstrip() if tail.strip() else "|"))
        if strip.copying:
            row = Text(_BREAK).join(_copies(strip, rank, grid) for grid in grids)
            lines.append(Text.assemble(f"{'':>{label}} |", row, "|"))
        if one.braided:
            row = Text(_BREAK).join(Text(_shared(one, rank, grid)) for grid in grids)
            lines.append(Text.assemble(f"{'':>{label}} |", row, "|"))
    axes = [_ticks(grid, grid.columns if parts else room + 1).ljust(grid.columns + 1)[1:] for grid in grids]
    return [*lines, Text(f"{'ms':>{label}}  {_BREAK.join(axes)}".rstrip())], grids


def _windows(strip: Strip, window: Window, room: int) -> list[Window]:
    """Beginning, middle and end of a step, with a cell for each short op; none if the whole step has room for that."""
    ops = (piece for rank in range(strip.ranks) for piece in strip.pieces(rank) if piece.op.kind.computes)
    lengths = sorted(piece.end - piece.start for piece in ops)
    begin, end = window
    cell = max(lengths[len(lengths) // 4], sum(lengths) / len(lengths) / 2) if lengths else math.inf
    span = (room - 2) // 3 * cell
    if span <= 0 or end - begin <= 1.01 * cell * room:
        return []
    middle = (begin + end - span) / 2
    starts = [piece.start for piece in strip.pieces(0) if begin + span <= piece.start <= middle]
    middle = max(starts, default=middle)  # an op begins with a cell
    return [(start, start + span) for start in (begin, middle, end - span)]


def _ranks(strip: Strip, view: View) -> tuple[int, ...]:
    return view.ranks if view.ranks is not None else tuple(range(strip.ranks))


def _steps(strip: Strip, view: View) -> list[str]:
    """The time of several consecutive steps, and of the last one."""
    if len(strip.steps) == 1:
        return []
    ends = [max(timeline.closes(rank) for rank in range(strip.ranks)) for timeline in strip.steps]
    after = f"the last ends {short(ends[-1] - ends[-2])} ms after the one before"
    return wrap([f"{len(ends)} steps, {short(strip.length)} ms", after], view.width, between="; ")


# ---- rows ----------------------------------------------------------------------------------------------------


def _row(program: Program, grid: CellGrid, rank: int, first: int, stop: int, cell: int = 1) -> Text:
    """Columns first..stop of a rank, `cell` characters each."""
    row, at = Text(), first
    chunks = chunks_of(program.placement, rank)
    blocks = grid.rows[rank]
    for block in islice(blocks, max(0, bisect_right(blocks, first, key=lambda block: block.first) - 1), None):
        if block.first >= stop:
            break
        begin, end = max(block.first, first), min(block.first + block.cells, stop)
        if begin >= end:
            continue
        row.append("." * (cell * (begin - at)), _IDLE_STYLE)
        chunk, room = chunks.get((block.op.pipe, block.op.stage), 0), cell * (end - begin)
        text = label_of(block.op, odd=chunk % 2 == 1)
        text = text if len(text) <= room else letter(block.op, odd=chunk % 2 == 1)
        row.append(text.ljust(room), _style(block.op) + " underline" * (chunk > 1))
        at = end
    return row.append("." * (cell * (stop - at)), _IDLE_STYLE)


def _copies(strip: Strip, rank: int, grid: CellGrid) -> Text:
    """The offloads and reloads of a rank, below its row."""
    cells = [Text(" ")] * grid.columns
    for piece in strip.copies(rank):
        for cell in _covered(grid, piece.start, piece.end, least=1):
            cells[cell] = Text(letter(piece.op), _style(piece.op))
    return Text.assemble(*cells)


def _shared(one: Drawn, rank: int, grid: CellGrid) -> str:
    """Sums of tensor-parallel ranks, below the ops that hide them; `!` in cells with a sum that the rank waits for."""
    cells = [" "] * grid.columns
    for piece in one.strip.shared(rank, one.costs):
        for cell in _covered(grid, piece.start, piece.end):
            cells[cell] = "-" if piece.hidden and cells[cell] != "!" else "!"
    return "".join(cells)


def _covered(grid: CellGrid, start: float, end: float, least: int = 0) -> range:
    begin, step = grid.edges[0], (grid.edges[-1] - grid.edges[0]) / grid.columns
    first, stop = round((start - begin) / step), round((end - begin) / step)
    return range(max(0, first), min(grid.columns, max(stop, first + least)))


def _style(op: Op) -> str:
    """The colours of an op; even and odd microbatches have different shades to separate neighbours."""
    appearance = look(op.kind)
    return f"{appearance.ink} on color({appearance.shades[op.mb % 2]})"


def _panels(program: Program, grid: CellGrid, ranks: Sequence[int], label: int, width: int) -> list[Text]:
    """The slots in panels one below the other, as many as the width requires."""
    cell = 1 + len(str(program.microbatches - 1)) + (1 + len(str(program.slices - 1)) if program.slices > 1 else 0)
    per_panel = max(1, (width - label - 3) // cell)
    lines: list[Text] = []
    for first in range(0, grid.columns, per_panel):
        stop = min(grid.columns, first + per_panel)
        if first:
            lines.append(Text())
        for rank in ranks:
            lines.append(Text.assemble(f"{rank:>{label}} |", _row(program, grid, rank, first, stop, cell), "|"))
    return lines


# ---- around the rows -----------------------------------------------------------------------------------------


def _ticks(grid: CellGrid, room: int) -> str:
    """A bar and the ms at round times; the bar is under the cell that begins there."""
    begin, end = grid.edges[0], grid.edges[-1]
    step = (end - begin) / grid.columns
    line = ""
    for time, text in ticks(begin, end, 10 * step):
        column = 1 + round((time - begin) / step)
        if column + 1 + len(text) <= room + 1 and (not line or column > len(line)):
            line = f"{line.ljust(column)}|{text}"
    return line


def _has_memory(view: View) -> bool:
    return view.unicode and view.width >= _SPARK_FROM


def _tails(strip: Strip, costs: Costs, view: View, window: Window) -> list[str]:
    """Per rank, the activation units held over the window, and their peak over the whole strip."""
    ranks = _ranks(strip, view)
    if not _has_memory(view) or view.by == "slot":
        return [""] * len(ranks)
    curves = [list(strip.memory(rank, costs)) for rank in range(strip.ranks)]
    peaks = [max((units for _, units in points), default=0.0) for points in curves]
    highest = max(peaks) or 1.0
    digits = max(len(short(peak, 3)) for peak in peaks)
    lines = []
    for rank in ranks:
        levels = _most_per_part(curves[rank], window, _SPARK)
        spark = "".join(_LEVELS[math.ceil(round(8 * level / highest, 6))] for level in levels)
        lines.append(f" {spark} {short(peaks[rank], 3):>{digits}}")
    return lines


def _most_per_part(points: Sequence[tuple[float, float]], window: Window, parts: int) -> list[float]:
    """The most units held in each of `parts` equal parts of the window."""
    most = [0.0] * parts
    step = (window[1] - window[0]) / parts
    ends = [time for time, _ in points[1:]] + [math.inf]
    for (time, units), end in zip(points, ends, strict=True):
        first = max(0, math.floor((time - window[0]) / step + 1e-9))
        last = parts - 1 if end == math.inf else min(parts - 1, math.ceil((end - window[0]) / step - 1e-9) - 1)
        for part in range(first, last + 1):
            most[part] = max(most[part], units)
    return most


def _legend(drawn: Sequence[Drawn], view: View) -> list[str]:
    """The legend of letters, case and memory lines, as far as they occur in these pictures."""
    legend = signs(drawn)
    words = [text for _, text in entries(legend.kinds, two=legend.two)]
    words += [f"second letters: the {legend.other}"] if legend.two else []
    words.append(". idle")
    if legend.chunks > 1:
        words.append("lower case: the rank's second stage" if legend.chunks == 2 else "lower case: every second stage")
        words += ["underlined: the third and fourth"] if legend.chunks > 2 and view.unicode else []
    if view.by == "time" and any(plan.braided for plan in drawn):
        words += ["- sums and swaps inside of ops", "! those that their rank waits for"]
    if view.by == "time" and _has_memory(view):
        words.append("right: activation units held, and their peak")
    return wrap(words, view.width)


def _unseen(grids: Sequence[CellGrid], view: View) -> list[str]:
    """Notes on the times between windows, and on ops too short for a cell, of all that are there."""
    gaps = [f"{short(a.edges[-1])}-{short(b.edges[0])}" for a, b in pairwise(grids)]
    words = [f"left out at {_BREAK}: {' and '.join(gaps)} ms"] if gaps else []
    few, all_ = Counter[Kind](), Counter[Kind]()
    for kind, (missing, total) in chain.from_iterable(grid.hidden.items() for grid in grids):
        few[kind] += missing
        all_[kind] += total
    counts = [f"{few[kind]} of {all_[kind]} {look(kind).letter}" for kind in sorted(all_) if few[kind]]
    if counts:
        cell = short((grids[0].edges[-1] - grids[0].edges[0]) / grids[0].columns, 3)
        words += [f"too short for a cell of {cell} ms: {counts[0]}", *counts[1:]]
    return wrap([*words, "see --zoom A-B and COLUMNS=N"], view.width, between=", ") if words else []
