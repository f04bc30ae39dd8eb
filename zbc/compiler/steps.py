"""Steps in a row, with the optimizer between them: what a step costs once the ranks follow one another as they will.

With the barrier, a step begins when every rank has ended the one before, all have agreed on it (which takes no time of
its own unless that was measured) and made their optimizer steps. Without it, each rank goes on: its tentative steps,
its part in agreeing on the step (a message there, a message back), and the steps it makes final are ops among the
others and take their time. Steps stand as they were assumed to; a step that is clipped or skipped costs its forwards
before REDO once more.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.cost import Costs
from zbc.compiler.dag import build
from zbc.compiler.passes.post_validate import post_validate
from zbc.compiler.simulate import SAME, Timeline, lags, lengths, replay
from zbc.ir import AHEAD, BARRIER, Kind, Program

SETTLES = 8  # steps after which their length no longer changes


def consecutive(program: Program, costs: Costs) -> Iterator[Timeline]:
    """One step after the other, on one axis of time, without end; of complete programs.

    Without a barrier the timelines hold the ops that close a step, too.
    """
    ahead = any(op.kind in AHEAD for op in program.ranks[0])
    dag = build(program, ahead=ahead)
    ranks = range(len(program.ranks))
    tentative = [costs.total("tentative", program.placement.stages_of(r)) for r in ranks] if ahead else []
    free = [0.0 for _ in ranks]
    length, lag = lengths(dag, costs), lags(dag, costs)
    while True:
        timeline = replay(dag, costs, length, lag, free)
        yield timeline
        if ahead:  # a sum that ends behind the ops holds up the tentative steps
            sums = [timeline.summed(r) for r in ranks]
            free = [max(timeline.closes(r), sums[r] + tentative[r], free[r]) for r in ranks]
        else:
            free = [_all_stepped(timeline, program, costs)] * len(free)


def _all_stepped(timeline: Timeline, program: Program, costs: Costs) -> float:
    """When all ranks have stepped, behind the barrier."""
    ranks = range(timeline.ranks)
    step = max(optimizer_ms(program, costs, r) for r in ranks)
    return max(timeline.closes(r) for r in ranks) + costs.of("agree") + step


def optimizer_ms(program: Program, costs: Costs, rank: int) -> float:
    """ms of the optimizer steps of a rank."""
    return costs.total("step", program.placement.stages_of(rank))


def settled(program: Program, costs: Costs) -> float:
    """What a step of a complete program costs, in ms, once steps follow one another as they will."""
    period, ends = 0.0, [0.0] * len(program.ranks)
    for _, timeline in zip(range(SETTLES), consecutive(program, costs), strict=False):
        fresh = [max(timeline.closes(r), ends[r]) for r in range(timeline.ranks)]
        periods = [b - a for a, b in zip(ends, fresh, strict=True)]
        before, period, ends = period, max(periods), fresh
        if period - min(periods) <= SAME * period and abs(period - before) <= SAME * period:
            break
    return period


def either_way(program: Program, timeline: Timeline, costs: Costs) -> tuple[float, float | None]:
    """What a settled step of a complete program costs with the barrier and without it; None where it needs one.

    `timeline` is that of its compute ops, which are the same either way.
    """
    ranks = range(timeline.ranks)
    with_barrier = timeline.makespan + costs.of("agree") + max(optimizer_ms(program, costs, r) for r in ranks)
    if not any(op.kind in AHEAD for op in program.ranks[0]):
        closing = {*BARRIER, Kind.GATHER}
        open_end = [[op for op in ops if op.kind not in closing] for ops in program.ranks]
        program = post_validate(program.with_ranks(open_end, by="without-barrier"), costs)
    return with_barrier, settled(program, costs)
