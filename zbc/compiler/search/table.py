"""Every op of a search as a number, and the kernels' input: flat columns, filled from the rows of ops.py.

Ops of one kind, stage and pipe are a *row* of ops: number `base + unit`, units in the order in which the stage runs
them: forwards by microbatch and slice, backwards with the slices of a microbatch in reverse. The dependencies of a
row's op are known without any order: the writer of a value that it reads is the op of another row for the same unit. A
kind that ops.py has a row for therefore needs no kernel of its own.

A *place* is an index into a rank-major order: rank r has the places `first[r]` up to `first[r + 1]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from zbc.ir import Kind, Placement, turned
from zbc.ops import At, Ref

Numbers = Any  # a flat list, or an array of the same length when compiled
# (head, other, lag, after): op x is linked to `other[e]`, `lag[e]` ms away, for e = head[x], after[e], .. until -1.
Links = tuple[Numbers, Numbers, Numbers, Numbers]
Lag = float | tuple[float, ...]
_ACROSS = {At.SOURCES: At.SINKS, At.SINKS: At.SOURCES}  # the two ends of an edge


class SearchRow(NamedTuple):
    """The ops of one kind, stage and pipe: `ms` each, and `change` of the rank's activation units. If slices of a
    microbatch differ, one value for each slice, in the order of the row; of unequal microbatches one for each unit."""

    kind: Kind
    stage: int
    pipe: int
    rank: int
    units: int
    ms: float | tuple[float, ...]
    change: float | tuple[float, ...]


class Table(NamedTuple):
    """The columns read by timing and list scheduling."""

    first: Numbers  # by rank, and after the last rank the number of ops
    rank: Numbers  # by op, as all following columns
    length: Numbers  # ms
    change: Numbers
    count: Numbers  # number of ops that it waits for
    waits: Links  # ops whose results it needs; lag: ms from their end to the arrival
    feeds: Links  # the reverse links: ops that wait for its result


class Fences(NamedTuple):
    """Further columns for annealing: the ops of its own rank that an op may not pass."""

    lowest: Numbers  # by place: the first place of its rank
    highest: Numbers  # and the last
    beside: Links  # the previous and the next unit of its row, and its dependencies within its own unit


class _Link(NamedTuple):
    """A link from the ops of a row to those of another, for the unit that is `shift` further on."""

    row: int
    shift: int = 0
    lag: Lag = 0.0
    turned: bool = False  # one row is of forwards, the other of backwards


class Rows:
    """Rows numbered one after another, and their dependencies. `lag(a, b, pipe)` are the ms from stage a to stage b, of
    any unit or of each."""

    def __init__(
        self, placement: Placement, rows: Sequence[SearchRow], lag: Callable[[int, int, int], Lag], slices: int = 1
    ) -> None:
        self.placement, self.rows, self._lag, self.slices = placement, rows, lag, slices
        self.base = [0, *accumulate(row.units for row in rows)]
        self.number = {(row.kind, row.stage, row.pipe): k for k, row in enumerate(rows)}
        self.size = self.base.pop()
        self._makers = _makers({row.kind for row in rows})
        self._own = [list(dict.fromkeys(self._of_unit(row))) for row in rows]
        self._waits = [list(dict.fromkeys(self._awaited(k))) for k in range(len(rows))]

    def op(self, kind: Kind, stage: int, unit: int, pipe: int = 0) -> int:
        """The number of an op."""
        return self.base[self.number[kind, stage, pipe]] + unit

    def bases(self, kind: Kind, pipe: int = 0) -> list[int]:
        """Stage by stage the number of the first op of a kind."""
        return [self.op(kind, s, 0, pipe) for s in range(self.placement.stages)]

    @property
    def first(self) -> list[int]:
        """By rank the first place of an order, and after the last rank the number of ops."""
        counts = [0] * self.placement.ranks
        for row in self.rows:
            counts[row.rank] += row.units
        return [0, *accumulate(counts)]

    def table(self) -> Table:
        waits = self._links(self._waits)
        return Table(
            self.first,
            self.column([row.rank for row in self.rows]),
            self.column([row.ms for row in self.rows]),
            self.change(),
            self.column(list(map(len, self._waits))),
            waits,
            self._links(_reversed(self._waits)),
        )

    def change(self) -> list[float]:
        """Units that each op adds to its rank, in activation units."""
        return self.column([row.change for row in self.rows])

    def fences(self) -> Fences:
        first = self.first
        sizes = [(low, high - 1, high - low) for low, high in pairwise(first)]
        behind = [[_Link(k, -1), *own] for k, own in enumerate(self._own)]
        beside = [[*one, *other] for one, other in zip(behind, _reversed(behind), strict=True)]
        return Fences(
            [place for low, _, size in sizes for place in [low] * size],
            [place for _, high, size in sizes for place in [high] * size],
            self._links(beside),
        )

    @property
    def needs(self) -> list[list[_Link]]:
        """By row the dependencies of its ops: on edges from other stages, if any, else within their unit."""
        return [waits or own for waits, own in zip(self._waits, self._own, strict=True)]

    def fed(self) -> Links:
        """For each op the ops that need it."""
        return self._links(_reversed(self.needs))

    def column(self, values: Sequence[Any]) -> list[Any]:
        """Expands values by row to values by op; tuples have a value for each slice in turn."""
        return [x for row, value in zip(self.rows, values, strict=True) for x in _spread(value, row.units)]

    def _of_unit(self, row: SearchRow) -> Iterator[_Link]:
        """Yields the rows of the same stage whose values a row reads, unit by unit."""
        for ref in row.kind.row.reads:
            maker = self._makers.get(ref) if ref.at is At.OWN else None
            if maker is not None:
                across = self.slices > 1 and maker.is_forward != row.kind.is_forward
                yield _Link(self.number[maker, row.stage, row.pipe], turned=across)

    def _awaited(self, k: int) -> Iterator[_Link]:
        """Yields rows at the other end of the edges that a row reads from, except rows implied by its rank's order. At
        the loss the path of a microbatch turns: there the backward waits for its own stage's forward."""
        row = self.rows[k]
        for ref in row.kind.row.reads:
            if ref.at not in _ACROSS:
                continue
            stages = self.placement.sources(row.stage) if ref.at is At.SOURCES else self.placement.sinks(row.stage)
            maker = self._makers[ref]
            for other in stages:
                yield _Link(self.number[maker, other, row.pipe], 0, self._lag(other, row.stage, row.pipe))
            if not stages:
                yield from self._own[k]

    def _links(self, links: Sequence[Sequence[_Link]]) -> Links:
        """The links of all rows, op by op."""
        head, others, lags, after = list[int](), list[int](), list[float](), list[int]()
        for row, mine in zip(self.rows, links, strict=True):
            last = [-1] * row.units
            for link in mine:
                low, high = max(0, -link.shift), row.units - max(0, link.shift)  # units with such a link
                edges = range(len(others), len(others) + high - low)
                there = self.base[link.row] + link.shift
                if link.turned:
                    others += [there + turned(unit, self.slices) for unit in range(low, high)]
                else:
                    others += range(there + low, there + high)
                lags += _spread(link.lag, len(edges))
                after += last[low:high]
                last[low:high] = edges
            head += last
        return head, others or [-1], lags or [0.0], after or [-1]  # numba cannot infer the type of an empty list


def _spread(value: Any, units: int) -> list[Any]:
    return list(value) * (units // len(value)) if value and isinstance(value, tuple) else [value] * units


def _makers(kinds: set[Kind]) -> dict[Ref, Kind]:
    """The kind that makes each value an op may read, by the reader's reference."""
    made = [(ref, kind) for kind in sorted(kinds) for ref in kind.row.writes]
    return {Ref(ref.what, _ACROSS.get(ref.at, ref.at)): kind for ref, kind in made}


def _reversed(links: Sequence[Sequence[_Link]]) -> list[list[_Link]]:
    found: list[list[_Link]] = [[] for _ in links]
    for k, mine in enumerate(links):
        for link in mine:
            found[link.row].append(_Link(k, -link.shift, link.lag, link.turned))
    return found
