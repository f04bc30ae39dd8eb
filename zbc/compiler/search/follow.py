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
    return Program(program.placement, program.microbatches, tuple(map(tuple, run.done)), program.history)


class _Run:
    def __init__(self, program: Program, costs: Costs, limits: Sequence[float], manner: Manner) -> None:
        self.placement, self.costs, self.limits, self.manner = program.placement, costs, limits, manner
        self.last = program.placement.stages - 1
        self.todo = [list(reversed(ops)) for ops in program.ranks]  # the next op is the last of the list
        self.done: list[list[Op]] = [[] for _ in program.ranks]
        self.held = [0.0] * len(program.ranks)
        self.free = [0.0] * len(program.ranks)
        self.forward: dict[tuple[int, int, int], float] = {}  # (stage, microbatch, pipe) -> end
        self.backward: dict[tuple[int, int, int], float] = {}
        self.wait = manner.wait * min(costs.f)
        self.heap = [(0.0, rank) for rank in range(len(program.ranks))]

    def all(self) -> None:
        while self.heap:
            now, rank = heappop(self.heap)
            if now >= self.free[rank] - EPS and self.todo[rank]:
                self._decide(rank, now)

    def _decide(self, rank: int, now: float) -> None:
        chosen, later = self._choose(rank, now)
        if chosen is not None:
            self._start(rank, chosen, now)
        elif later is not None:
            heappush(self.heap, (later, rank))

    def _choose(self, rank: int, now: float) -> tuple[int | None, float | None]:
        """Places from the end of `todo` of the op to start, and if there is none, when one may be ready."""
        todo, held, limit = self.todo[rank], self.held[rank], self.limits[rank] + ROOM
        sofar = most = 0.0
        weight: int | None = None
        later: float | None = None
        for place in range(min(self.manner.window, len(todo))):
            op = todo[-1 - place]
            change = self.costs.held(op)
            ready = self._ready(op)
            if ready is not None and (place == 0 or change <= 0 or held + change + most <= limit):
                if ready > now + EPS:
                    later = ready if later is None else min(later, ready)
                    if ready <= now + self.wait and op.kind is not Kind.W:
                        return None, later
                elif op.kind is Kind.W:
                    weight = place if weight is None else weight
                else:
                    return place, None
            sofar += change
            most = max(most, sofar)
        return weight, later

    def _ready(self, op: Op) -> float | None:
        """When the input of an op is on its rank; None if what makes it has not started."""
        kind, s, mb, pipe, _ = op
        if kind is Kind.F:
            return self._arrival(self.forward, s - 1, mb, pipe, s - 1) if s else 0.0
        if kind is Kind.W:
            return self.backward.get((s, mb, pipe))
        if s == self.last:
            return self.forward.get((s, mb, pipe))
        return self._arrival(self.backward, s + 1, mb, pipe, s) if (s, mb, pipe) in self.forward else None

    def _arrival(self, made: dict[tuple[int, int, int], float], s: int, mb: int, pipe: int, link: int) -> float | None:
        end = made.get((s, mb, pipe))
        return None if end is None else end + self.costs.transfer(link, pipe)

    def _start(self, rank: int, place: int, now: float) -> None:
        op = self.todo[rank].pop(-1 - place)
        kind, s, mb, pipe, _ = op
        self.done[rank].append(op)
        self.held[rank] += self.costs.held(op)
        end = self.free[rank] = now + self.costs.duration(op)
        heappush(self.heap, (end, rank))
        if kind is Kind.W:
            return
        forward = kind is Kind.F
        (self.forward if forward else self.backward)[s, mb, pipe] = end
        there = s + 1 if forward else s - 1
        if 0 <= there <= self.last:
            ready = end + self.costs.transfer(min(s, there), pipe)
            heappush(self.heap, (ready, self.placement.rank_of(there, pipe)))
