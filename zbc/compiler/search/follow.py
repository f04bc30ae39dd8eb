"""A list scheduler that follows a given order: it takes the order as its priority and fills the gaps.

Ranks run in time. A free rank takes the first of its ops, in the given order, whose input has arrived, if its memory
would stay within the limit not only now but through all ops that it overtakes. So the rest of the given order stays
possible at every moment, and the scheduler always ends if the given order does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from zbc.compiler.cost.cost import Costs
from zbc.compiler.search.table import Rows, SearchRow
from zbc.ir import Op, Program

EPS = 1e-9
ROOM = 1e-6  # slack of memory comparisons, in activation units
NEVER = float("inf")
FAMILIES = ("forward", "input", "weight")


@dataclass(frozen=True, slots=True)
class Manner:
    """How far to look and how long to wait. A W runs only if no F or B can."""

    window: int  # examined ops of the given order
    wait: float = 0.0  # for the input of an F or B in flight, as a share of the shortest F


def fits(program: Program, costs: Costs, limits: Sequence[float]) -> bool:
    """Whether every rank keeps to its limit."""
    held = (max(accumulate(map(costs.held, ops)), default=0.0) for ops in program.ranks)
    return all(most <= limit + ROOM for most, limit in zip(held, limits, strict=True))


def follow(program: Program, costs: Costs, limits: Sequence[float], manner: Manner) -> Program:
    """The order in which the ranks would run the ops of `program` in this manner. `program` has to fit and to end."""
    run = _Run(program, costs, limits, manner)
    run.all()
    ranks = tuple(tuple(map(run.ops.__getitem__, numbers)) for numbers in run.done)
    return Program(program.placement, program.microbatches, ranks, program.history)


class _Run:
    """Ops are numbered as in table.py, a row for each family, pipe and stage, families in the order of FAMILIES."""

    def __init__(self, program: Program, costs: Costs, limits: Sequence[float], manner: Manner) -> None:
        self.rows = _rows(program, costs)
        size, rows = self.rows.size, self.rows.rows
        self.weights = sum(row.units for row in rows if row.kind.row.family != "weight")  # first number of a W
        self.base = {
            (row.kind.row.family, row.pipe): self.rows.bases(row.kind, row.pipe) for row in rows if not row.stage
        }
        self.rank = self.rows.column([row.rank for row in rows])
        self.missing = self.rows.column(list(map(len, self.rows.needs)))
        self.feeds = self.rows.fed()
        self.arrived = [0.0] * size  # the latest arrival so far of an op's inputs
        self.ready = [NEVER if count else 0.0 for count in self.missing]
        self.ops = dict[int, Op]()
        self.length, self.change = [0.0] * size, [0.0] * size
        self.todo = [self._numbered(ops, costs) for ops in program.ranks]
        self.done: list[list[int]] = [[] for _ in program.ranks]
        self.held = [0.0] * len(program.ranks)
        self.limits = [limit + ROOM for limit in limits]
        self.free = [0.0] * len(program.ranks)
        self.window, self.wait = manner.window, manner.wait * min(costs.column("f"))
        self.heap = [(0.0, rank) for rank in range(len(program.ranks))]

    def _numbered(self, ops: Sequence[Op], costs: Costs) -> list[int]:
        """The ops of a rank from the last to the first."""
        numbers = []
        for op in reversed(ops):
            number = self.base[op.kind.row.family, op.pipe][op.stage] + op.mb
            numbers.append(number)
            self.ops[number] = op
            self.length[number], self.change[number] = costs.duration(op), costs.held(op)
        return numbers

    def all(self) -> None:
        heap, todo, free = self.heap, self.todo, self.free
        while heap:
            now, rank = heappop(heap)
            if now >= free[rank] - EPS and todo[rank]:
                place, later = self._choose(rank, now)
                if place:
                    self._start(rank, todo[rank].pop(-place), now)
                elif later < NEVER:
                    heappush(heap, (later, rank))

    def _choose(self, rank: int, now: float) -> tuple[int, float]:
        """The place from the end of `todo` of the op to start, from 1 on; 0 and the time of the next one if none is."""
        todo, ready, changes, weights = self.todo[rank], self.ready, self.change, self.weights
        room = self.limits[rank] - self.held[rank]
        sofar = most = 0.0
        weight, later, soon, waits = 0, NEVER, now + EPS, now + self.wait
        for place in range(1, min(self.window, len(todo)) + 1):
            number = todo[-place]
            change, arrival = changes[number], ready[number]
            if arrival < NEVER and (place == 1 or change <= 0 or change + most <= room):
                if arrival > soon:
                    later = min(later, arrival)
                    if arrival <= waits and number < weights:
                        return 0, later
                elif number < weights:
                    return place, NEVER
                else:
                    weight = weight or place
            sofar += change
            if sofar > most:
                most = sofar
        return weight, later

    def _start(self, rank: int, number: int, now: float) -> None:
        self.done[rank].append(number)
        self.held[rank] += self.change[number]
        end = self.free[rank] = now + self.length[number]
        heappush(self.heap, (end, rank))
        head, reader, lag, after = self.feeds
        edge = head[number]
        while edge >= 0:
            other = reader[edge]
            self.missing[other] -= 1
            self.arrived[other] = max(self.arrived[other], end + lag[edge])
            if not self.missing[other]:
                self.ready[other] = self.arrived[other]
                if self.rank[other] != rank:
                    heappush(self.heap, (self.ready[other], self.rank[other]))
            edge = after[edge]


def _rows(program: Program, costs: Costs) -> Rows:
    """A row for each family, pipe and stage, with as many units as microbatches. A BW counts as a B."""
    placement, found = program.placement, {kind.row.family: kind for kind in sorted(program.kinds, reverse=True)}
    rows = [
        SearchRow(kind, s, pipe, placement.rank_of(s, pipe), program.microbatches, 0.0, 0.0)
        for kind in (found[family] for family in FAMILIES if family in found)
        for pipe in range(len(placement.pipes))
        for s in range(placement.stages)
    ]
    return Rows(placement, rows, lambda a, b, pipe: costs.lag(pipe, a, b))
