"""How many boundary tensors a rank holds that are on their way: posted for, handed over on the rank itself, being sent.

A buffer is posted by its RECV and taken by the op that waits for it. Between two stages of one rank a result waits for
the op that consumes it. What is sent stays with its sender until the receiver has posted a buffer for it and the
transfer is over: when that is depends on how late the receiver gets there, so it is read off the timeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from zbc.compiler.cost import Costs
from zbc.compiler.simulate import Timeline
from zbc.ir import COMPUTE, Kind, Message, Op, Program, message_of


def in_transit(program: Program, costs: Costs, timeline: Timeline) -> list[list[int]]:
    """Per rank and op the number of tensors on their way while it runs, its own result included."""
    times = [_times(program, timeline, rank) for rank in range(len(program.ranks))]
    posted = {
        message_of(op): at
        for ops, clock in zip(program.ranks, times, strict=True)
        for op, at in zip(ops, clock, strict=True)
        if op.kind.is_recv
    }
    return [list(_rank(program, rank, times[rank], posted, costs)) for rank in range(len(program.ranks))]


def _times(program: Program, timeline: Timeline, rank: int) -> list[float]:
    """When each op of a rank begins, in ms; all but compute ops take no time."""
    dag, now, result = timeline.dag, 0.0, []
    index = dag.first[rank]
    for op in program.ranks[rank]:
        if op.kind in COMPUTE:
            result.append(timeline.start[index])
            now = timeline.end[index]
            index += 1
        else:
            result.append(now)
    return result


def _rank(program: Program, rank: int, times: list[float], posted: dict[Message, float], costs: Costs) -> Iterator[int]:
    count, sending = 0, list[float]()  # when each send is over
    known: dict[tuple[Kind, int, int], tuple[bool | None, bool | None]] = {}
    for op, now in zip(program.ranks[rank], times, strict=True):
        while sending and sending[0] <= now + 1e-9:
            heappop(sending)
        if op.kind in COMPUTE:
            key = op.kind, op.stage, op.pipe
            if key not in known:
                known[key] = _neighbour(program, op, before=True), _neighbour(program, op, before=False)
            given, result = known[key]
            count -= given is not None
            yield count + len(sending) + (result is not None)  # the result is there before the op ends
            count += result is False
            continue
        if op.kind.is_recv:
            count += 1
        elif op.kind.is_send:
            message = message_of(op)
            first = min(op.stage, message.stage)
            heappush(sending, max(now, posted.get(message, now)) + costs.transfer(first, op.pipe))
        yield count + len(sending)


def _neighbour(program: Program, op: Op, *, before: bool) -> bool | None:
    """Whether the stage that F or a backward takes its tensor from (`before`) or gives its result to is on another
    rank; None if there is none."""
    if op.kind is Kind.W:
        return None
    other = op.stage + (-1 if (op.kind is Kind.F) == before else 1)
    if not 0 <= other < program.placement.stages:
        return None
    return program.placement.neighbours(op.stage, other, op.pipe)
