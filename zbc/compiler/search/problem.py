"""A scheduling request as numbers that the search reads, and the conversion of orders back to programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from statistics import fmean
from typing import Any

from zbc.compiler.cost.cost import Costs
from zbc.compiler.search.listing import Seats
from zbc.compiler.search.table import Lag, Rows, SearchRow
from zbc.ir import Kind, Op, Placement, Program, nth
from zbc.ops import round_trip

UNLIMITED = 1e15
KINDS = round_trip(split=True)
Exact = tuple[tuple[float, ...], tuple[float, ...]]  # ms and change of the units held, slice by slice


@dataclass(frozen=True)
class Problem:
    """m units through the stages of one pipe, or dealt to several in turn; times in ms, memory in activation units.

    With several pipes the stages of each are numbered after those of the pipe before: a list by stage has them all.
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
        p, k, pipes = placement.ranks, costs.slices, len(placement.pipes)
        whole, of_one = costs, costs.unit(fmean)
        where = [(pipe, s) for pipe in range(pipes) for s in range(placement.stages)]
        exact = tuple([_exact(costs, kind, *at, pipes) for at in where] for kind in KINDS) if costs.parts > 1 else ()
        links = [(0.0, *of.values()) for of in costs.links]
        lags = tuple(_floats(lag, pipe, pipes) for pipe, of in enumerate(links) for lag in of) if costs.unequal else ()
        held = whole if whole.unequal else of_one  # the largest microbatch's
        f, b, w = ([float(of_one.duration(Op(kind, s, 0, pipe))) for pipe, s in where] for kind in KINDS)
        rank, depth = [r for homes in placement.pipes for r in homes], placement.stages
        in_turn = sorted(range(len(rank)), key=lambda at: (at % depth, at))  # the stages of a rank in path order
        each = limit if isinstance(limit, Sequence) else [UNLIMITED if limit is None else limit] * p
        return cls(
            placement=placement,
            m=m * k,
            rank=rank,
            stages=[tuple(at for at in in_turn if rank[at] == r) for r in range(p)],
            f=f,  # compiled kernels distinguish floats from ints
            b=b,
            w=w,
            lag=[float(lag) for pipe in range(pipes) for lag in (0.0, *of_one.lags(pipe).values())],
            keep_b=[*map(float, held.units("kept"))] * pipes,
            keep_w=[*map(float, held.units("left"))] * pipes,
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
        return -(-self.placement.stages // self.p)

    @property
    def pipes(self) -> int:
        return len(self.placement.pipes)

    def units(self, at: int) -> int:
        """Number of units of a stage."""
        return len(range(at // self.placement.stages, self.m, self.pipes))

    @property
    def size(self) -> int:
        """Number of ops."""
        return len(KINDS) * self.placement.stages * self.m

    def rows(self) -> Rows:
        """The ops, numbered."""
        lags, depth = self.lags or self.lag, self.placement.stages
        growth = [w - b for b, w in zip(self.keep_b, self.keep_w, strict=True)]
        alike = (self.f, self.keep_b), (self.b, growth), (self.w, [-x for x in self.keep_w])
        each: Sequence[Sequence[tuple[Any, Any]]] = self.exact or [[*zip(*one, strict=True)] for one in alike]
        rows = [
            SearchRow(kind, at % depth, at // depth, self.rank[at], self.units(at), ms, change)
            for kind, mine in zip(KINDS, each, strict=True)
            for at, (ms, change) in enumerate(mine)
        ]
        return Rows(self.placement, rows, lambda a, b, pipe: lags[pipe * depth + max(a, b)], self.slices)

    def seats(self, rows: Rows) -> Seats:
        """The stages of all ranks for the list scheduler, which knows one pipe."""
        stages = [s for mine in self.stages for s in mine]
        forward, inputs, weight = ([rows.op(kind, s, 0) for s in stages] for kind in KINDS)
        ends = [0, *accumulate(map(len, self.stages))]
        return Seats(ends, stages, [self.m] * len(stages), forward, inputs, weight)

    def bases(self, rows: Rows, kind: Kind) -> list[int]:
        """By stage the number of the first op of a kind."""
        return [first for pipe in range(self.pipes) for first in rows.bases(kind, pipe)]

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

    @cached_property
    def ops(self) -> list[Op]:
        """The ops by their numbers."""
        pipes, k, rows = self.pipes, self.slices, self.rows().rows
        return [nth(row.kind, row.stage, row.pipe + pipes * n, k, row.pipe) for row in rows for n in range(row.units)]

    @cached_property
    def _number(self) -> dict[Op, int]:
        return {op: number for number, op in enumerate(self.ops)}

    def program(self, order: Sequence[int], name: str) -> Program:
        """The program of a rank-major order of op numbers."""
        ranks = tuple(tuple(map(self.ops.__getitem__, order[low:high])) for low, high in pairwise(self.rows().first))
        return Program(self.placement, self.m // self.slices, ranks, history=(name,), slices=self.slices)

    def numbers(self, program: Program) -> list[int]:
        """A program as a rank-major order; a BW counts as B and W."""
        whole, found = round_trip(split=False)[-1], list[int]()
        for op in chain.from_iterable(program.ranks):
            halves = [op._replace(kind=kind) for kind in KINDS[1:]] if op.kind is whole else [op]
            found += map(self._number.__getitem__, halves)
        return found


def _exact(costs: Costs, kind: Kind, pipe: int, stage: int, pipes: int) -> Exact:
    ops = [nth(kind, stage, n, costs.slices, pipe) for n in range(pipe, costs.parts, pipes)]
    return tuple(map(costs.duration, ops)), tuple(map(costs.held, ops))


def _floats(lag: Lag, pipe: int, pipes: int) -> Lag:
    return tuple(map(float, lag[pipe::pipes])) if isinstance(lag, tuple) else float(lag)
