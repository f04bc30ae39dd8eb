"""How many boundary tensors are on their way at a rank while an op runs: posted for, handed over on it, being sent.

A buffer is posted by its RECV and taken by the op that waits for it. Between two stages of one rank a result waits for
the op that consumes it. What is sent stays with its sender until the receiver has posted a buffer for it and the
transfer is over: when that is depends on how late the receiver gets there, so it is read off the timeline. One that
leaves while an op runs counts for the share of the op's time that it is still there. A result that its own backward
needs as well is an activation, and not on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from zbc.compiler.cost import Costs
from zbc.compiler.simulate import Timeline
from zbc.ir import COMPUTE, Kind, Message, Op, Program


def in_transit(program: Program, costs: Costs, timeline: Timeline) -> list[list[float]]:
    """Per rank and op the number of tensors on their way while it runs, its own result included."""
    times = [_times(program, timeline, rank, costs) for rank in range(len(program.ranks))]
    posted = {
        program.placement.message(op): begin
        for ops, clock in zip(program.ranks, times, strict=True)
        for op, (begin, _) in zip(ops, clock, strict=True)
        if op.kind.is_recv
    }
    return [list(_rank(program, rank, times[rank], posted, costs)) for rank in range(len(program.ranks))]


def _times(program: Program, timeline: Timeline, rank: int, costs: Costs) -> list[tuple[float, float]]:
    """When each op of a rank begins and ends, in ms.

    VALIDATE ends with the last op of all. Of ops that compute nothing for a microbatch only those of an optimizer
    without a barrier take time here: what is sent before them leaves meanwhile.
    """
    now, result = 0.0, []
    for i, op in zip(timeline.graph.mine(rank), program.ranks[rank], strict=True):
        if op.kind in COMPUTE:
            begin, now = timeline.start[i], timeline.end[i]
        elif op.kind is Kind.VALIDATE:
            begin, now = now, max(now, timeline.makespan)
        elif op.kind in (Kind.COMMIT, Kind.TENTATIVE):
            begin, now = now, now + costs.duration(op)
        else:
            begin = now
        result.append((begin, now))
    return result


def _rank(
    program: Program, rank: int, times: Sequence[tuple[float, float]], posted: dict[Message | None, float], costs: Costs
) -> Iterator[float]:
    count, sending = 0, list[float]()  # when each send is over
    known: dict[tuple[Kind, int, int], tuple[bool | None, bool | None]] = {}
    for op, (begin, end) in zip(program.ranks[rank], times, strict=True):
        leaving = sum(_leave(sending, begin, end)) if sending and sending[0] <= end else 0.0
        if op.kind in COMPUTE:
            key = op.kind, op.stage, op.pipe
            if key not in known:
                known[key] = _given(program, op, costs), _result(program, op, costs)
            given, result = known[key]
            count -= given is not None
            # The result is there before the op ends.
            yield count + (result is not None) + len(sending) + leaving
            count += result is False
            continue
        if op.kind.is_recv:
            count += 1
        elif op.kind.is_send and not (op.kind is Kind.SEND_F and _keeps_result(costs, op.stage)):
            message = program.placement.message(op)
            ms = 0.0 if message is None else costs.link(op.pipe, message.source, message.sink)
            heappush(sending, max(begin, posted.get(message, begin)) + ms)
        yield count + len(sending) + leaving


def _leave(sending: list[float], begin: float, end: float) -> Iterator[float]:
    """Remove what is over by the end of an op; for what share of the op each was still there."""
    while sending and sending[0] <= end:
        over = heappop(sending)
        if over > begin:
            yield (over - begin) / (end - begin)


def _given(program: Program, op: Op, costs: Costs) -> bool | None:
    """Whether what an op takes comes from another rank; None if there is nothing, or it is counted as kept."""
    found = _neighbour(program, op, before=True)
    return None if found is False and op.kind is Kind.F and _keeps_result(costs, op.stage - 1) else found


def _result(program: Program, op: Op, costs: Costs) -> bool | None:
    """Whether what an op gives goes to another rank; None if there is nothing, or it is counted as kept."""
    return None if op.kind is Kind.F and _keeps_result(costs, op.stage) else _neighbour(program, op, before=False)


def _keeps_result(costs: Costs, stage: int) -> bool:
    return costs.bytes is not None and costs.bytes[stage].sent > 0


def _neighbour(program: Program, op: Op, *, before: bool) -> bool | None:
    """Whether the stage that F or a backward takes its tensor from (`before`) or gives its result to is on another
    rank; None if there is none."""
    if op.kind is Kind.W:
        return None
    other = op.stage + (-1 if (op.kind is Kind.F) == before else 1)
    if not 0 <= other < program.placement.stages:
        return None
    return program.placement.crosses(op.stage, other, op.pipe)
