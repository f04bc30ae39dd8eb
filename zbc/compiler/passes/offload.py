"""Activations that wait for their backward go to the host meanwhile, where a rank would hold more than its limit.

    OFFLOAD   behind F, as early as the copy can begin
    RELEASE   right before the op that needs the room
    RELOAD    where the copy back has to begin for the backward not to wait

The order of compute and transfers stays as it is. What a rank holds follows from the order of its list alone, so a
limit is kept under any timing; times decide only who waits. Only what a limit asks for is moved: op by op in time, where
more is held than the limit, the activation whose backward is last goes, with its copies booked on the rank's stream. The
list is timed, and chosen again with the times found, a few times over. After arXiv 2503.01328, which moves whole chunks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from zbc.compiler.passes.offload_list import assemble
from zbc.compiler.passes.offload_view import EPS, View
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.ir import COPY, Kind, Program
from zbc.text import at_least, short

ROUNDS = 6  # of timing and choosing again
LEADS = (1.0, 1.6)  # how much longer than it takes a copy back is booked for
LARGE = 100_000  # ops beyond which fewer lists are tried
LOWER = 8  # smaller limits that are tried too, so that more room is not slower


class Booking(NamedTuple):
    """When an activation goes and comes back, as items: it is away for [gone, back)."""

    out: int
    gone: int
    back: int


@dataclass(frozen=True, slots=True)
class Offload:
    """`limits` are the activation units each rank may hold, `stages` those whose activations may move."""

    limits: tuple[float, ...]
    stages: frozenset[int]
    objective: str = "makespan"

    name: ClassVar[str] = "offload"

    def run(self, program: Program, context: Context) -> Program:
        """Raises E303 where a limit is below what the ranks need with everything away that can be."""
        views = [View.of(program, r, context.costs, self.stages) for r in range(len(program.ranks))]
        self._refuse(views)
        if all(max(view.base, default=0.0) <= limit + EPS for view, limit in zip(views, self.limits, strict=True)):
            return program
        plain = context.step_ms(self.objective)
        best: tuple[float, float, Program] | None = None
        for limits in self._limits(views, program.size):
            found = _best(program, context, views, limits, self.objective, plain)
            if best is None or found[0] < best[0] - EPS or (found[0] < best[0] + EPS and found[1] < best[1] - EPS):
                best = found
            if best[0] <= plain + EPS:
                break
        assert best is not None
        return best[2]

    def _limits(self, views: Sequence[View], size: int) -> list[tuple[float, ...]]:
        """Its own limits and smaller ones, which keep to them as well: eighths of what ranks hold without copies."""
        found = [self.limits]
        for eighths in range(LOWER - 1, 0, -1) if size < LARGE // 10 else ():
            lower = tuple(
                min(limit, max(view.floor, max(view.base) * eighths / LOWER))
                for view, limit in zip(views, self.limits, strict=True)
            )
            if lower != found[-1]:
                found.append(lower)
        return found

    def _refuse(self, views: Sequence[View]) -> None:
        floors = [view.floor for view in views]
        rank = max(range(len(views)), key=lambda r: floors[r] - self.limits[r])
        if floors[rank] > self.limits[rank] + EPS:
            text = (
                f"does not fit: rank {rank} needs {short(floors[rank])} activation units with all away that can be, the "
                f"limit is {short(self.limits[rank])}"
            )
            enough = at_least(max(floors) / len(views), 6)
            raise ZbcError("E303", text, hint=f'the smallest that works for this order is memory_limit = "{enough}x"')


def _best(
    program: Program, context: Context, views: Sequence[View], limits: Sequence[float], objective: str, plain: float
) -> tuple[float, float, Program]:
    """ms of a step, units moved, and the program, of the best list found that keeps to the limits."""
    best: tuple[float, float, Program] | None = None
    rounds = ROUNDS if program.size < LARGE else 2
    for lead in LEADS if program.size < LARGE else LEADS[:1]:
        timeline, seen = context.timeline, float("inf")
        for _ in range(rounds):
            for view in views:
                view.set(timeline)
            ranks = [
                assemble(program.ranks[view.rank], view, _book(view, limit, lead), limit)
                for view, limit in zip(views, limits, strict=True)
            ]
            found = Context(program.with_ranks(ranks, by=Offload.name), context.costs)
            step = found.step_ms(objective)
            moved = sum(context.costs.held(op) for ops in ranks for op in ops if op.kind is Kind.RELOAD)
            if best is None or step < best[0] - EPS or (step < best[0] + EPS and moved < best[1] - EPS):
                best = step, moved, found.program
            if step <= plain + EPS or step >= seen - EPS:
                break
            seen, timeline = step, found.timeline
        if best is not None and best[0] <= plain + EPS:
            break
    assert best is not None
    return best


def _book(view: View, limit: float, lead: float) -> dict[int, Booking]:
    """What to move, by its place among the lives: item by item, where more is held than the limit.

    A copy goes out as early and comes back as late as the rank's stream, which does one thing at a time, has room.
    """
    lives, busy, chosen = view.lives, list[tuple[float, float]](), dict[int, Booking]()
    ready = sorted((bisect_left(view.start, view.end[life.a] + EPS), x) for x, life in enumerate(lives))
    waiting, at, away = list[tuple[int, int]](), 0, 0.0
    returns = [0.0] * (len(view.items) + 1)
    for j, base in enumerate(view.base):
        away -= returns[j]
        while at < len(ready) and ready[at][0] <= j:
            x = ready[at][1]
            heapq.heappush(waiting, (-lives[x].z, x))
            at += 1
        again = []
        while base - away > limit + EPS and waiting:
            entry = heapq.heappop(waiting)
            x, life = entry[1], lives[entry[1]]
            if life.z <= j:
                break
            out = _earliest(view.end[life.a], life.out, busy)
            if view.start[j] < out + life.out - EPS:
                again.append(entry)  # not there in time; later it may be
                continue
            gone = (out, out + life.out)
            insort(busy, gone)
            back = _latest(view.start[life.z], lead * life.back, busy)
            until = bisect_right(view.issued, back + EPS) - 1
            if until <= j:
                busy.remove(gone)
                continue
            insort(busy, (back, back + lead * life.back))
            first = max(bisect_left(view.start, out + life.out - EPS), life.a + 1)
            chosen[x] = Booking(max(life.a + 1, bisect_left(view.issued, out - EPS)), first, until)
            away += life.units
            returns[until] += life.units
        for entry in again:
            heapq.heappush(waiting, entry)
    return chosen


def _earliest(begin: float, length: float, busy: Sequence[tuple[float, float]]) -> float:
    """The first time from `begin` on with room for so long; `busy` is sorted and without overlaps."""
    j = max(0, bisect_left(busy, (begin, float("-inf"))) - 1)
    while j < len(busy) and busy[j][0] < begin + length - EPS:
        begin = max(begin, busy[j][1])
        j += 1
    return begin


def _latest(end: float, length: float, busy: Sequence[tuple[float, float]]) -> float:
    """The last time at which something so long can begin and be over by `end`."""
    j = bisect_left(busy, (end, float("-inf"))) - 1
    while j >= 0 and busy[j][1] > end - length + EPS:
        end = min(end, busy[j][0])
        j -= 1
    return end - length


def copies(program: Program) -> bool:
    """Whether a program moves anything."""
    return any(op.kind in COPY for ops in program.ranks for op in ops)
