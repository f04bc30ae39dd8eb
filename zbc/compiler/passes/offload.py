"""Offloads activations to the host between forward and backward, if a rank would exceed its limit.

    OFFLOAD   after F, as early as the copy can begin
    RELEASE   right before the op that needs the room
    RELOAD    early enough that the backward does not wait

The order of compute and transfers stays as it is. A rank's memory follows from the order of its list alone, so a limit
is kept under any timing; times only decide who waits. No more is moved than a limit demands: op by op in time, while
the limit is exceeded, the activation whose backward is last goes, with its copies booked on the rank's stream. The list
is timed, and chosen again with the resulting times, a few times over. After arXiv 2503.01328, which moves whole chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.passes.offload_booking import all_at_once, one_by_one
from zbc.compiler.passes.offload_list import assemble
from zbc.compiler.passes.offload_view import EPS, Spans, View
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.ir import Program
from zbc.ops import Lane
from zbc.text import at_least, short

ROUNDS, BRIEF = 6, 2  # rounds of timing and choosing again
# The factor on a reload's booked time, and the way of booking; the last one is for small programs.
WAYS = ((1.0, one_by_one), (1.0, all_at_once), (1.6, one_by_one), (1.6, all_at_once))
LARGE, HUGE = 10_000, 100_000  # ops from which fewer lists are tried, and from which only one


class TooTight(ZbcError):
    """E303; `least` is the smallest limit that works for this order, as a multiple of 1F1B's peak."""

    def __init__(self, text: str, least: float) -> None:
        super().__init__("E303", text, hint=f"the smallest that works for this order is {enough(least)}")
        self.least = least


def enough(least: float) -> str:
    """A `memory_limit` that is no less than `least`."""
    return f'memory_limit = "{at_least(least, 6)}x"'


class _Trial(NamedTuple):
    """A list with copies, ms of a step, the units moved, and the times of every rank's items."""

    step: float
    moved: float
    program: Program
    spans: list[Spans]

    def beats(self, other: _Trial) -> bool:
        """Whether its step is shorter, or as long with less moved."""
        less = self.step < other.step + EPS and self.moved < other.moved - EPS
        return self.step < other.step - EPS or less


@dataclass(frozen=True, slots=True)
class Offload:
    """`limits` are the activation units each rank may hold, as `counted` has them (None: as the context's costs);
    `stages` may move their activations."""

    limits: tuple[float, ...]
    stages: frozenset[int]
    objective: str = "makespan"
    counted: Costs | None = None
    quick: bool = False  # a quick estimate: one way of booking, a few rounds
    duplex: bool = False  # ranks copy out and back at once

    name: ClassVar[str] = "offload"

    def run(self, program: Program, context: Context) -> Program:
        """Raises E303 if a limit is below the memory the ranks need with everything movable offloaded."""
        if not self.limits:
            return program
        costs = self.counted or context.costs
        views = [View.of(program, r, costs, self.stages) for r in range(len(program.ranks))]
        self._refuse(views)
        if all(max(view.base, default=0.0) <= limit + EPS for view, limit in zip(views, self.limits, strict=True)):
            return program
        return self._best(context, views).program

    def _refuse(self, views: Sequence[View]) -> None:
        floors = [view.floor for view in views]
        rank = max(range(len(views)), key=lambda r: floors[r] - self.limits[r])
        if floors[rank] > self.limits[rank] + EPS:
            text = (
                f"does not fit: rank {rank} needs {short(floors[rank])} activation units with all away that can, the "
                f"limit is {short(self.limits[rank])}"
            )
            raise TooTight(text, max(floors) / len(views))

    def _best(self, context: Context, views: Sequence[View]) -> _Trial:
        """The best list found that keeps to the limits."""
        tried, limits, shared = list[_Trial](), self.limits, context.costs.shared
        best, plain = None, self._timed(context, views, tried)
        program = replace(context.program, duplex=self.duplex)
        ranges = [range(a, min(a + shared, len(views))) for a in range(0, len(views), shared)]
        ways, rounds = (1, BRIEF) if self.quick else (len(WAYS), ROUNDS)
        if program.size >= LARGE:
            ways, rounds = (1, 1) if self.quick or program.size >= HUGE else (len(WAYS) - 1, BRIEF)
        for lead, book in WAYS[:ways]:
            last, seen = plain, float("inf")
            for _ in range(rounds):
                for view, spans in zip(views, last.spans, strict=True):
                    view.set(spans)
                booked = [
                    row
                    for r in ranges
                    for row in book(views[r.start : r.stop], limits[r.start : r.stop], lead, duplex=self.duplex)
                ]
                ranks = [
                    assemble(program.ranks[view.rank], view, bookings, limit)
                    for view, bookings, limit in zip(views, booked, limits, strict=True)
                ]
                last = self._timed(Context(program.with_ranks(ranks, by=Offload.name), context.costs), views, tried)
                best = last if best is None or last.beats(best) else best
                if last.step <= plain.step + EPS or last.step >= seen - EPS:
                    break
                seen = last.step
            if best is not None and best.step <= plain.step + EPS:
                break
        assert best is not None
        return best

    def _timed(self, context: Context, views: Sequence[View], tried: list[_Trial]) -> _Trial:
        """A list with its times; those `tried` before, which it joins, are not simulated again."""
        program = context.program
        for trial in tried:
            if trial.program == program:
                return trial
        moved = sum(context.costs.held(op) for ops in program.ranks for op in ops if op[0].row.lane is Lane.BACK)
        step = context.step_ms(self.objective)
        tried.append(_Trial(step, moved, program, [view.spans(context.timeline) for view in views]))
        return tried[-1]
