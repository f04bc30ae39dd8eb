"""Maps the ops of a timeline to the cells of a picture.

By time, all cells are equally long and each shows the op that covers most of it; a cell that is idle for more than half
of its time is idle. By slot, columns follow the order in which ops start: the ops that start in one column run at the
same time, at most one per rank, and an op covers all columns until its end. With ops of equal length and free transfers
both are the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zbc.ir import Kind, Op
from zbc.viz.strip import DrawnOp, Strip, Window

_ALMOST = 1e-9  # of a cell: tolerance for rounding


class Block(NamedTuple):
    """`op` fills `cells` columns from `first` on."""

    first: int
    cells: int
    op: Op
    id: int = -1  # of the piece


@dataclass(frozen=True, slots=True)
class CellGrid:
    """Blocks per rank over `columns` cells; `edges[c]` is the ms at the left edge of column c, one more than columns.
    `hidden`: kind -> (ops inside the window that are too short for a cell, all ops of the kind there)."""

    columns: int
    rows: tuple[tuple[Block, ...], ...]
    edges: tuple[float, ...]
    hidden: dict[Kind, tuple[int, int]]


def inside(strip: Strip, rank: int, window: Window) -> list[DrawnOp]:
    """The ops of a rank inside the window."""
    return [piece for piece in strip.row(rank) if piece.end > window[0] and piece.start < window[1]]


def by_time(strip: Strip, window: Window, room: int, *, exactly: bool = False, only: int | None = None) -> CellGrid:
    """At most `room` cells of equal length over the window. If all starts and ends are multiples of a common beat, a
    cell is a whole part of it, so that equal ops look equal; with `exactly` there are always `room` cells, so that
    several grids line up. `only` leaves all ranks but one empty."""
    pieces = [inside(strip, rank, window) if only in (None, rank) else [] for rank in range(strip.ranks)]
    columns = room if exactly else _columns(pieces, window, room)
    step = (window[1] - window[0]) / columns
    rows = tuple(_row(row, window, columns, step) for row in pieces)
    edges = tuple(window[0] + c * step for c in range(columns + 1))
    return CellGrid(columns, rows, edges, _hidden(pieces, rows, window))


def _hidden(
    pieces: list[list[DrawnOp]], rows: Sequence[Sequence[Block]], window: Window
) -> dict[Kind, tuple[int, int]]:
    shown = {block.id for row in rows for block in row}
    ops = [x for row in pieces for x in row if x.id >= 0 and x.op.kind.computes]
    whole = [x for x in ops if window[0] <= x.start < x.end <= window[1] + _ALMOST]
    total = Counter(piece.op.kind for piece in whole)
    missing = Counter(piece.op.kind for piece in whole if piece.id not in shown)
    return {kind: (missing[kind], total[kind]) for kind in sorted(total)}


def _columns(pieces: list[list[DrawnOp]], window: Window, room: int) -> int:
    """The number of cells: a multiple of the beats in the window if there is a beat, else all the room."""
    lengths = {round(piece.end - piece.start, 9) for row in pieces for piece in row} - {0.0}
    if not lengths or len(lengths) > 64:
        return room
    times = {round(time - window[0], 9) for row in pieces for piece in row for time in (piece.start, piece.end)}
    for divisor in (1, 2, 3, 4):
        beat = min(lengths) / divisor
        beats = round((window[1] - window[0]) / beat)
        if beats > room:
            break
        if all(abs(n - round(n)) < 1e-6 for n in (time / beat for time in (*times, window[1] - window[0]))):
            return beats * (room // beats)
    return room


def _row(pieces: list[DrawnOp], window: Window, columns: int, step: float) -> tuple[Block, ...]:
    most, busy = [0.0] * columns, [0.0] * columns
    owner: list[DrawnOp | None] = [None] * columns
    for piece in pieces:
        start, end = (max(0.0, piece.start - window[0]) / step, min(window[1], piece.end) / step - window[0] / step)
        for c in range(int(start), min(columns, int(end) + 1)):
            covered = min(end, c + 1) - max(start, c)
            busy[c] += max(0.0, covered)
            if covered > most[c] + _ALMOST:
                most[c], owner[c] = covered, piece
    blocks: list[Block] = []
    for c, shown in enumerate(owner):
        if shown is None or busy[c] < 0.5 - _ALMOST:
            continue
        if blocks and blocks[-1][2:] == (shown.op, shown.id) and sum(blocks[-1][:2]) == c:
            blocks[-1] = blocks[-1]._replace(cells=blocks[-1].cells + 1)
        else:
            blocks.append(Block(c, 1, shown.op, shown.id))
    return tuple(blocks)


def by_slot(strip: Strip, window: Window) -> CellGrid:
    """One column per start of ops inside the window; collectives have no column."""
    rows = [[piece for piece in inside(strip, rank, window) if piece.id >= 0] for rank in range(strip.ranks)]
    length = max(strip.length, 1e-12)
    order = sorted((round(x.start / length, 9), round(x.end / length, 9), x) for row in rows for x in row)
    column: dict[int, int] = {}
    edges: list[float] = []
    closes = 0.0  # when the first op of the last column ends
    for start, end, piece in order:
        if not edges or start >= closes:  # every op that depends on one of the column starts after `closes`, too
            edges.append(piece.start)
            closes = end
        closes = min(closes, end)
        column[piece.id] = len(edges) - 1
    blocks = [_spread(row, column, edges, _ALMOST * length) for row in rows]
    return CellGrid(len(edges), tuple(blocks), (*edges, window[1]), {})


def _spread(row: list[DrawnOp], column: dict[int, int], edges: list[float], almost: float) -> tuple[Block, ...]:
    """Each op covers its own column and those that begin before its end."""
    blocks = []
    for k, piece in enumerate(row):
        first = column[piece.id]
        stop = column[row[k + 1].id] if k + 1 < len(row) else len(edges)
        cells = 1
        while first + cells < stop and edges[first + cells] < piece.end - almost:
            cells += 1
        blocks.append(Block(first, cells, piece.op, piece.id))
    return tuple(blocks)


def ticks(begin: float, end: float, least: float) -> list[tuple[float, str]]:
    """The multiples of a round number of ms from `begin` to `end`, at least `least` ms apart, with their texts."""
    power = 10.0 ** math.floor(math.log10(least))
    every = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    decimals = max(0, -math.floor(math.log10(every) + 1e-9))
    first, last = math.ceil(begin / every - 1e-9), math.floor(end / every + 1e-9)
    return [(number * every, f"{number * every:.{decimals}f}") for number in range(first, last + 1)]
