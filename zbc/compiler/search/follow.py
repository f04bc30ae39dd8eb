"""A list scheduler that follows a given order: it takes the order as its priority and fills the gaps.

Ranks run in time. A rank that is free takes the first of its ops, in the given order, whose input is there, as long as
what it would hold stays within its limit not only now but all along the ops that it overtakes. So the rest of the given
order stays possible at every moment, and the scheduler always ends if the given order does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from zbc.compiler.cost import Costs
from zbc.ir import Kind, Op, Program

EPS = 1e-9
ROOM = 1e-6  # slack of memory comparisons, in activation units
NEVER = float("inf")
PLACE = {Kind.F: 0, Kind.B: 1, Kind.BW: 1, Kind.W: 2}


@dataclass(frozen=True, slots=True)
class Manner:
    """How far to look and how long to wait. A W runs only where no F or B can."""

    window: int  # ops of the given order that are looked at
    wait: float = 0.0  # for an F or B that is on its way, as a share of the shortest F


def fits(program: Program, costs: Costs, limits: Sequence[float]) -> bool:
    """Whether every rank keeps to its limit."""
    for ops, limit in zip(program.ranks, limits, strict=True):
        held = 0.0
        for op in ops:
            held += costs.held(op)
            if held > limit + ROOM:
                return False
    return True


def follow(program: Program, costs: Costs, limits: Sequence[float], manner: Manner) -> Program:
    """The order in which the ranks would run the ops of `program` in this manner. It has to fit and to end."""
    run = _Run(program, costs, limits, manner)
    run.all()
    ranks = tuple(tuple(map(run.ops.__getitem__, numbers)) for numbers in run.done)
    return Program(program.placement, program.microbatches, ranks, program.history)


class _Run:
    """Ops are numbered kind by kind, then stage by stage, pipe by pipe: what an op feeds is a step away."""

    def __init__(self, program: Program, costs: Costs, limits: Sequence[float], manner: Manner) -> None:
        placement = program.placement
        self.stages, self.step = placement.stages, len(placement.pipes) * program.microbatches
        self.per_kind = self.stages * self.step
        size = 3 * self.per_kind
        self.ops = dict[int, Op]()
        self.ready = [NEVER] * size  # when the input of an op is on its rank
        self.length, self.change = [0.0] * size, [0.0] * size
        self.lag = [0.0] * self.per_kind  # behind the stage of an F, in its pipe
        self.rank = [0] * self.per_kind
        self.todo = [self._numbered(r, ops, costs, program.microbatches) for r, ops in enumerate(program.ranks)]
        self.done: list[list[int]] = [[] for _ in program.ranks]
        self.held = [0.0] * len(program.ranks)
        self.limits = [limit + ROOM for limit in limits]
        self.free = [0.0] * len(program.ranks)
        self.window, self.wait = manner.window, manner.wait * min(costs.column("f"))
        self.heap = [(0.0, rank) for rank in range(len(program.ranks))]

    def _numbered(self, rank: int, ops: Sequence[Op], costs: Costs, count: int) -> list[int]:
        """The ops of a rank from the last to the first."""
        numbers = []
        for op in reversed(ops):
            kind, stage, mb, pipe, _ = op
            row = stage * self.step + pipe * count + mb
            number = PLACE[kind] * self.per_kind + row
            numbers.append(number)
            self.ops[number], self.rank[row] = op, rank
            self.length[number], self.change[number] = costs.duration(op), costs.held(op)
            if kind is Kind.F:
                self.ready[number] = NEVER if stage else 0.0
                self.lag[row] = costs.link(pipe, stage, stage + 1) if stage < self.stages - 1 else 0.0
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
        """Place from the end of `todo` of the op to start, from 1 on, and if there is none, when one may be ready."""
        todo, ready, changes, weights = self.todo[rank], self.ready, self.change, 2 * self.per_kind
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
        kind, row = divmod(number, self.per_kind)
        if kind == 2:
            return
        if kind == 1:
            self.ready[2 * self.per_kind + row] = end
        there = row + self.step if kind == 0 else row - self.step
        if kind == 0 and there >= self.per_kind:
            self.ready[self.per_kind + row] = end
        elif there >= 0:
            arrival = end + self.lag[min(row, there)]
            self.ready[kind * self.per_kind + there] = arrival
            heappush(self.heap, (arrival, self.rank[there]))
