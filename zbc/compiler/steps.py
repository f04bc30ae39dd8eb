"""Consecutive steps, with the optimizer between them, and ms of a step in steady state.

With the barrier, a step begins when every rank has ended the previous one, all have agreed on it (which takes no time
of its own unless that was measured) and made their optimizer steps. Without it, each rank goes on: its tentative steps,
its part in agreeing on the step (a message there, a message back), and the final steps are ops among the others and
take their time. Steps are assumed to be valid; a step that is clipped or skipped costs its forwards before REDO once
more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbc.compiler.cost.cost import Costs
from zbc.compiler.graph import build
from zbc.compiler.passes.post_validate import PostValidate
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import SAME, Timeline, lengths, replay, run
from zbc.ir import NEXT, Program, repeated
from zbc.ops import MAKER, Lane

SETTLES = 8  # steps until steady state, usually
_TRIED = (8, 16, 32)  # numbers of steps without a flush to try, until they repeat
_MEAN = 12  # steps to average if they do not
LARGE = 100_000  # ops of a step with the barrier, beyond which the time without it is not told: a fifth of planning
_ROUND = 1e-9  # relative rounding error of sums of many numbers


def in_a_row(program: Program, costs: Costs, steps: int) -> Timeline:
    """`steps` consecutive steps without a flush, from the start to the end of the last, as one timeline."""
    return run(build(repeated(program, steps)), costs)


def period_of(program: Program, costs: Costs) -> float:
    """ms of a step without a flush in steady state: the mean over a period after which steps repeat, or over the last
    steps if they do not repeat soon."""
    ends = list[list[float]]()
    for steps in _TRIED:
        ends = bodies(program, in_a_row(program, costs, steps))
        for count in range(1, (len(ends) - 2) // 2):
            apart = _apart(ends, count)
            if apart is not None:
                return apart / count
    return _mean(ends)


def bodies(program: Program, timeline: Timeline) -> list[list[float]]:
    """Ends of the timed ops of all ranks, step by step; without the last two steps, in which no ops of a next step are
    interleaved."""
    graph, found = timeline.graph, list[list[float]]()
    for rank, ops in enumerate(program.ranks):
        mine = [op for op in ops if op.kind.row.lane is Lane.COMPUTE]
        ends = [timeline.end[i] for i in graph.mine(rank) if graph.ops[i].kind.row.lane is Lane.COMPUTE]
        first = sum(op.mb >= NEXT for op in mine)  # ops of a rank before its first body
        steps = [ends[i : i + len(mine)] for i in range(first, len(ends) - 2 * len(mine), len(mine))]
        found = [a + b for a, b in zip(found, steps, strict=True)] if found else steps
    return found


def _apart(bodies: Sequence[Sequence[float]], count: int) -> float | None:
    """ms between steps that are `count` apart, if all ops of the last two are later by the same time: then it goes on
    like that, since no op waits for one of more than a step before."""
    late = [b - a for k in (1, 2) for a, b in zip(bodies[-k - count], bodies[-k], strict=True)]
    return late[0] if max(late) - min(late) <= _ROUND * bodies[-1][0] else None


def consecutive(program: Program, costs: Costs) -> Iterator[Timeline]:
    """Yields one step after the other, on one axis of time, without end; for complete programs. Without a barrier the
    timelines include the ops that close a step."""
    graph, ahead = build(program), program.ahead
    length = lengths(graph, costs, closing=ahead)
    free = [0.0] * len(program.ranks)
    while True:
        timeline = replay(graph, costs, length, free, closing=ahead)
        yield timeline
        if ahead:
            free = [max(timeline.closes(r), free[r]) for r in range(timeline.ranks)]
        else:
            free = [max(map(timeline.closes, range(timeline.ranks))) + _barrier_ms(program, costs)] * len(free)


def _barrier_ms(program: Program, costs: Costs) -> float:
    """ms of agreeing on a step, and of the steps of all ranks after that."""
    return costs.of("agree") + max(optimizer_ms(program, costs, r) for r in range(len(program.ranks)))


def optimizer_ms(program: Program, costs: Costs, rank: int) -> float:
    """ms of the optimizer steps of a rank."""
    return costs.total("step", program.owners(rank))


def settled(complete: Context) -> float:
    """ms of a step of a complete program in steady state, with its optimizer: with the barrier if it has one."""
    program, costs = complete.program, complete.costs
    if program.flushless:
        return period_of(program, costs)
    if not program.ahead:
        return with_barrier(complete)
    period, ends = 0.0, [[0.0] * len(program.ranks)]
    for _, timeline in zip(range(2 * _MEAN), consecutive(program, costs), strict=False):
        ends.append([max(timeline.closes(r), before) for r, before in enumerate(ends[-1])])
        periods = [b - a for a, b in zip(ends[-2], ends[-1], strict=True)]
        before, period = period, max(periods)
        if period - min(periods) <= SAME * period and abs(period - before) <= SAME * period:
            return period
    return _mean(ends)


def _mean(ends: Sequence[Sequence[float]]) -> float:
    """The mean of the last steps, which repeat after 2, 3 or 4, or change slowly, of the slowest rank."""
    return max(b - a for a, b in zip(ends[-1 - _MEAN], ends[-1], strict=True)) / _MEAN


def with_barrier(complete: Context) -> float:
    """ms of a step of a complete program in steady state, with the barrier."""
    return complete.timeline.makespan + _barrier_ms(complete.program, complete.costs)


def without_barrier(complete: Context) -> float | None:
    """The same without the barrier; None if not asked and `LARGE`."""
    program, costs = complete.program, complete.costs
    if program.resident:
        return with_barrier(complete)  # gathered weights need it
    if not program.flushless and not program.ahead:
        if program.size > LARGE:
            return None
        behind = {MAKER["weights"], *(kind for kind in program.kinds if kind.row.closes == "barrier")}
        open_end = [[op for op in ops if op.kind not in behind] for ops in program.ranks]
        open_program = program.with_ranks(open_end, by="without-barrier")
        # The pass reads only the graph's compute ops and their messages, unless weights are gathered.
        context = Context(open_program, costs) if program.sharded else complete
        complete = Context(PostValidate().run(open_program, context), costs)
    return settled(complete)
