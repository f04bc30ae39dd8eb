"""Steps in a row, with the optimizer between them: what a step costs once the ranks follow one another as they will.

With the barrier, a step begins when every rank has ended the one before, all have agreed on it (which takes no time of
its own unless that was measured) and made their optimizer steps. Without it, each rank goes on: its tentative steps,
its part in agreeing on the step (a message there, a message back), and the steps it makes final are ops among the
others and take their time. Steps stand as they were assumed to; a step that is clipped or skipped costs its forwards
before REDO once more.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.cost.cost import Costs
from zbc.compiler.graph import build
from zbc.compiler.passes.post_validate import PostValidate
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import SAME, Timeline, lengths, replay, run
from zbc.ir import Kind, Program, repeated

SETTLES = 8  # steps after which their length no longer changes


def in_a_row(program: Program, costs: Costs, steps: int) -> Timeline:
    """So many steps without a flush, the first from nothing and the last to its end, as one timeline."""
    return run(build(repeated(program, steps)), costs)


def period_of(program: Program, costs: Costs) -> float:
    """What a step without a flush costs, in ms, once steps follow one another as they will."""
    found = 0.0
    for steps in (4, SETTLES, 2 * SETTLES):  # the last one ends with a flush, so it does not count
        timeline = in_a_row(program, costs, steps)
        graph, ends = timeline.graph, list[list[float]]()
        for rank in range(timeline.ranks):
            last = program.placement.stages_of(rank)[0]
            stepped = max(op for op in program.ranks[rank] if op.kind is Kind.STEP and op.stage == last)
            mine = [i for i in graph.mine(rank) if graph.ops[i] == stepped]
            ends.append([timeline.end[i] for i in mine[:-1]])
        periods = [b - a for one in ends for a, b in zip(one[-3:], one[-2:], strict=False)]
        found = max(periods)
        if found - min(periods) <= SAME * found:
            break
    return found


def consecutive(program: Program, costs: Costs) -> Iterator[Timeline]:
    """One step after the other, on one axis of time, without end; of complete programs.

    Without a barrier the timelines hold the ops that close a step, too.
    """
    graph, ahead = build(program), program.ahead
    length = lengths(graph, costs, closing=ahead)
    free = [0.0] * len(program.ranks)
    while True:
        timeline = replay(graph, costs, length, free, closing=ahead)
        yield timeline
        if ahead:
            free = [max(timeline.closes(r), free[r]) for r in range(timeline.ranks)]
        else:
            free = [_all_stepped(timeline, program, costs)] * len(free)


def _behind_barrier(kind: Kind) -> bool:
    """Whether it is the barrier, or something after it."""
    return kind.row.closes == "barrier" or kind is Kind.GATHER


def _all_stepped(timeline: Timeline, program: Program, costs: Costs) -> float:
    """When all ranks have stepped, after the barrier."""
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


def either_way(complete: Context) -> tuple[float, float]:
    """What a settled step of a complete program costs with the barrier and without it."""
    program, costs, timeline = complete.program, complete.costs, complete.timeline
    ranks = range(timeline.ranks)
    with_barrier = timeline.makespan + costs.of("agree") + max(optimizer_ms(program, costs, r) for r in ranks)
    if program.flushless:
        return with_barrier, period_of(program, costs)
    if program.resident:
        return with_barrier, with_barrier  # there is no other way to close it
    if not program.ahead:
        open_end = [[op for op in ops if not _behind_barrier(op.kind)] for ops in program.ranks]
        open_program = program.with_ranks(open_end, by="without-barrier")
        # All that the pass asks of the graph are the compute ops and their messages, unless weights are collected.
        context = Context(open_program, costs) if program.sharded else complete
        program = PostValidate().run(open_program, context)
    return with_barrier, settled(program, costs)
