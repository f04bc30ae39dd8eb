"""A scheduling request as numbers that the search reads, and the conversion of orders back to programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean

from zbc.compiler.cost.cost import Costs
from zbc.compiler.search.listing import Seats
from zbc.compiler.search.table import Lag, Rows, SearchRow
from zbc.ir import Kind, Placement, Program, nth
from zbc.ops import round_trip

UNLIMITED = 1e15
KINDS = round_trip(split=True)
Exact = tuple[tuple[float, ...], tuple[float, ...]]  # ms and change of the units held, slice by slice


@dataclass(frozen=True, slots=True)
class Problem:
    """m units through the stages of one pipe; times in ms, memory in activation units.

    A unit is a microbatch, or one of its `slices`: then f, b, w and the kept units are means over them, and `exact`
    has, for F, B and W of each stage, ms and change of the units held of each slice in the order in which the stage
    runs them. With `unequal` microbatches it has these of each microbatch, the kept units are those of the largest, and
    `lags` has their transfers. `lag[s]` is the transfer between stages s-1 and s, `limit[r]` the limit of rank r,
    `stages[r]` its stages in path order. Ops are numbered as in table.py; rows are sorted by kind, then stage.
    """

    placement: Placement
    m: int
    rank: list[int]  # by stage
    stages: list[tuple[int, ...]]
    f: list[float]
    b: list[float]
    w: list[float]
    lag: list[float]
    keep_b: list[float]
    keep_w: list[float]
    limit: list[float]
    slices: int = 1
    exact: tuple[list[Exact], ...] = ()
    unequal: bool = False
    lags: tuple[Lag, ...] = ()

    @classmethod
    def make(cls, placement: Placement, costs: Costs, m: int, limit: float | Sequence[float] | None) -> Problem:
        """m microbatches; `limit` in activation units, one for all ranks or one each; None for none."""
        p, k, parts = placement.ranks, costs.slices, costs.parts
        exact = tuple([_exact(costs, kind, s) for s in range(placement.stages)] for kind in KINDS) if parts > 1 else ()
        lags = (0.0, *map(_floats, costs.links[0].values())) if costs.unequal else ()
        whole, m, costs = costs, m * k, costs.unit(fmean)
        held = whole if whole.unequal else costs  # the largest microbatch's
        each = limit if isinstance(limit, Sequence) else [UNLIMITED if limit is None else limit] * p
        return cls(
            placement=placement,
            m=m,
            rank=list(placement.pipes[0]),
            stages=[placement.stages_of(r) for r in range(p)],
            f=list(map(float, costs.column("f"))),  # compiled kernels distinguish them from ints
            b=list(map(float, costs.column("b"))),
            w=list(map(float, costs.column("w"))),
            lag=[0.0, *map(float, costs.lags(0).values())],
            keep_b=list(map(float, held.units("kept"))),
            keep_w=list(map(float, held.units("left"))),
            limit=list(map(float, each)),
            slices=k,
            exact=exact,
            unequal=whole.unequal > 0,
            lags=lags,
        )

    @property
    def p(self) -> int:
        return self.placement.ranks

    @property
    def n_stages(self) -> int:
        return len(self.rank)

    @property
    def v(self) -> int:
        """Legs of the path from the first stage to the last: the stages per rank if all have equally many."""
        return -(-self.n_stages // self.p)

    @property
    def size(self) -> int:
        """Number of ops."""
        return len(KINDS) * self.n_stages * self.m

    def rows(self) -> Rows:
        """The ops, numbered."""
        if self.exact:
            lags = self.lags or self.lag
            exact = [
                SearchRow(kind, s, 0, self.rank[s], self.m, ms, change)
                for kind, mine in zip(KINDS, self.exact, strict=True)
                for s, (ms, change) in enumerate(mine)
            ]
            return Rows(self.placement, exact, lambda a, b, pipe: lags[max(a, b)], self.slices)
        growth = [w - b for b, w in zip(self.keep_b, self.keep_w, strict=True)]
        columns = ((self.f, self.keep_b), (self.b, growth), (self.w, [-x for x in self.keep_w]))
        rows = [
            SearchRow(kind, s, 0, rank, self.m, ms[s], change[s])
            for kind, (ms, change) in zip(KINDS, columns, strict=True)
            for s, rank in enumerate(self.rank)
        ]
        return Rows(self.placement, rows, lambda a, b, pipe: self.lag[max(a, b)])

    def seats(self, rows: Rows) -> Seats:
        """The stages of all ranks for the list scheduler."""
        stages = [s for mine in self.stages for s in mine]
        kinds = {kind.row.family: kind for kind in KINDS}
        base = {family: [rows.op(kind, s, 0) for s in stages] for family, kind in kinds.items()}
        return Seats(
            [0, *accumulate(map(len, self.stages))],
            stages,
            [self.m] * len(stages),
            base["forward"],
            base["input"],
            base["weight"],
        )

    def room(self) -> list[float]:
        """Units each rank may hold with an F: its limit less the most that a B leaves beyond the units it frees."""
        if self.exact:
            growth = [max(0.0, *change) for _, change in self.exact[1]]
        else:
            growth = [max(0.0, w - b) for b, w in zip(self.keep_b, self.keep_w, strict=True)]
        return [
            limit - max((growth[s] for s in mine), default=0.0)
            for limit, mine in zip(self.limit, self.stages, strict=True)
        ]

    def earliest(self) -> tuple[list[float], list[float]]:
        """Earliest start of the first F and of the first B of each stage."""
        f_start = [0.0]
        for before, now in pairwise(range(self.n_stages)):
            f_start.append(f_start[before] + self.f[before] + self.lag[now])
        b_start = [f_start[-1] + self.slices * self.f[-1]] * self.n_stages
        for now, after in reversed(list(pairwise(range(self.n_stages)))):
            b_start[now] = b_start[after] + self.b[after] + self.lag[after]
        return f_start, b_start

    def first_b(self) -> list[float]:
        """Earliest start of any B, per rank."""
        _, b_start = self.earliest()
        return [min((b_start[s] for s in stages), default=0.0) for stages in self.stages]

    def reserves(self) -> list[float]:
        """Rank by rank, for each of its stages, the number of microbatches that an unhindered warm-up would start."""
        f_start, b_start = self.earliest()
        result = []
        for stages, limit in zip(self.stages, self.limit, strict=True):
            first = min((b_start[s] for s in stages), default=0.0)
            period = sum(self.f[s] for s in stages) or 1.0
            for s in stages:
                count = (first - f_start[s]) / period // 1.0 + 1.0
                room = limit / (self.keep_b[s] or 1.0) / len(stages)
                result.append(min(max(1.0, count), float(self.m), max(1.0, room)))
        return result

    def program(self, order: Sequence[int], name: str) -> Program:
        """The program of a rank-major order of op numbers."""
        rows = self.rows()
        ops = [nth(row.kind, row.stage, unit, self.slices) for row in rows.rows for unit in range(row.units)]
        ranks = tuple(tuple(map(ops.__getitem__, order[low:high])) for low, high in pairwise(rows.first))
        return Program(self.placement, self.m // self.slices, ranks, history=(name,), slices=self.slices)


def _exact(costs: Costs, kind: Kind, stage: int) -> Exact:
    ops = [nth(kind, stage, n, costs.slices) for n in range(costs.parts)]
    return tuple(map(costs.duration, ops)), tuple(map(costs.held, ops))


def _floats(lag: Lag) -> Lag:
    return tuple(map(float, lag)) if isinstance(lag, tuple) else float(lag)
