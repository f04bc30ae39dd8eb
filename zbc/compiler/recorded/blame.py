"""The time of each rank in a recorded step by cause; the causes add up to the step, to the nanosecond.

    compute      F, B, W and BW themselves
    warm up      until the first op computes: the first tensor's path through the pipeline
    message      between the first and the last op, waiting for a tensor; `senders` has the rank waited for
    copies       waiting for activations during their offload or reload
    drain        after the last op, until the slowest rank has come to the end of its ops
    sums         waiting for gradient reductions, weight gathers, and the collective that ends the step
    optimizer    gradient norm and optimizer steps; without a barrier also agreeing on the previous step
    host         all else: starting transfers, reading data, the runtime itself; activity between two steps

The prediction has the same causes except `host`, which it counts into the ops if it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice, pairwise

from zbc.compiler.cost.cost import Costs
from zbc.compiler.recorded.view import Arrival, RecordedStep
from zbc.compiler.sim.copies import copied
from zbc.compiler.sim.simulate import Timeline
from zbc.compiler.steps import SETTLES, consecutive, optimizer_ms
from zbc.ir import Op, Program, groups
from zbc.trace.recording import Cause, Recorded


@dataclass
class Shares:
    """The time of one rank in one step, by cause, all in one unit."""

    compute: float = 0
    warm_up: float = 0
    message: float = 0
    copies: float = 0
    drain: float = 0
    sums: float = 0
    optimizer: float = 0
    host: float = 0
    senders: dict[int, float] = field(default_factory=dict)  # of `message`, from which rank

    @property
    def total(self) -> float:
        return float(sum(getattr(self, name) for name in CAUSES))

    def scaled(self, factor: float) -> Shares:
        values = {name: factor * getattr(self, name) for name in CAUSES}
        return Shares(**values, senders={rank: factor * value for rank, value in self.senders.items()})


CAUSES = tuple(entry.name for entry in fields(Shares) if entry.name != "senders")


def shares(step: RecordedStep) -> list[Shares]:
    """Shares per rank of the run, in ns."""
    arrived = max((at for one in step.ranks if (at := _arrival(one)) is not None), default=None)
    senders = _senders(step)
    return [_rank(step, rank, arrived, senders) for rank in range(len(step.ranks))]


def _arrival(one: Recorded) -> int | None:
    """The time a rank came to the collective over all ranks that ends a step with a barrier."""
    waits = one.waited(Cause.ALL)
    ends = [one.end[index] - waits.get(index, 0) for index, op in enumerate(one.ops) if op.kind.is_barrier]
    return max(ends, default=None)


def _rank(step: RecordedStep, rank: int, arrived: int | None, senders: Mapping[tuple[int, Op], int]) -> Shares:
    one, found = step.ranks[rank], Shares()
    begin, end = step.window(rank)
    found.host += one.begins - begin
    found.drain += end - one.ends
    waits: dict[int, dict[Cause, int]] = {}
    for wait in one.waits:
        mine = waits.setdefault(wait.op, {})
        mine[wait.cause] = mine.get(wait.cause, 0) + wait.ns
    first, inside = True, groups(one.ops)  # the first op of a group waits for the input of both
    for index, op in enumerate(one.ops):
        took, waited = one.end[index] - one.start[index], waits.get(index, {})
        copies = min(waited.get(Cause.COPY, 0), one.work[index] - one.start[index])
        found.copies += copies
        if op.kind.computes:
            message = min(waited.get(Cause.MESSAGE, 0), one.work[index] - one.start[index] - copies)
            if first:
                found.warm_up += message
            elif message:
                found.message += message
                together = one.ops[inside[index] + 1 : inside[index] + 3] if index in inside else (op,)
                peer = next(senders[rank, each] for each in (op, *together) if (rank, each) in senders)
                found.senders[peer] = found.senders.get(peer, 0) + message
            found.compute += one.end[index] - one.work[index]
            found.host += one.work[index] - one.start[index] - message - copies
            first = False
        elif op.kind.is_barrier:
            _close(found, one, index, waited, arrived)
        elif op.kind.row.closes:
            sums = min(took, waited.get(Cause.SUM, 0))
            found.sums += sums
            found.optimizer += took - sums
        else:
            found.host += took - copies
    _behind(found, one, waits.get(len(one.ops), {}))
    return found


def _close(found: Shares, one: Recorded, index: int, waited: Mapping[Cause, int], arrived: int | None) -> None:
    """A barrier: gradient reductions, then the norm, then the collective over all ranks, which starts with the last."""
    start, end = one.start[index], one.end[index]
    everyone = min(waited.get(Cause.ALL, 0), end - start)
    sums = min(waited.get(Cause.SUM, 0), end - start - everyone)
    late = min(everyone, max(0, (arrived or end) - (end - everyone)))
    found.drain += late
    found.sums += sums + everyone - late
    found.optimizer += end - start - everyone - sums


def _behind(found: Shares, one: Recorded, waited: Mapping[Cause, int]) -> None:
    """Adds the time of a step after its last op."""
    close = one.ends - (one.end[-1] if one.end else one.begins)
    gather = min(close, waited.get(Cause.GATHER, 0))
    delivery = min(close - gather, waited.get(Cause.DELIVERY, 0))
    found.sums += gather
    found.drain += delivery
    found.host += close - gather - delivery


def _senders(step: RecordedStep) -> dict[tuple[int, Op], int]:
    """The rank of the run that a rank's compute op waits for; of several, the one that sent last."""
    last: dict[tuple[int, Op], Arrival] = {}
    for message in step.messages():
        found = last.setdefault((message.receiver, message.taker), message)
        if message.sent > found.sent:
            last[message.receiver, message.taker] = message
    return {taker: message.sender for taker, message in last.items()}


def predicted(program: Program, timeline: Timeline, costs: Costs) -> list[Shares]:
    """The predicted shares of a step with its optimizer in steady state, per rank of a pipeline, in ms."""
    ranks = range(timeline.ranks)
    if program.ahead:
        *_, before, last = islice(consecutive(program, costs), SETTLES)
        return [_settled(before.closes(rank), last, rank) for rank in ranks]
    steps = [optimizer_ms(program, costs, rank) for rank in ranks]
    copies, found = copied(timeline), list[Shares]()
    for rank in ranks:
        idle = timeline.idle(rank)
        sums = idle.sums + costs.of("agree")
        waited = copies[rank].waited
        one = Shares(timeline.busy(rank), idle.warm_up, idle.message - waited, waited, idle.drain, sums, steps[rank])
        one.drain += max(steps) - steps[rank]
        one.senders = dict(_waits(timeline, rank))
        found.append(one)
    return found


def _settled(begin: float, timeline: Timeline, rank: int) -> Shares:
    """Shares of a step without a barrier, which begins for a rank at the end of its previous one."""
    ops, free = timeline.graph.ops, begin
    found = Shares()
    computes = False
    for i in timeline.ops(rank):
        idle, took = max(0.0, timeline.start[i] - free), timeline.end[i] - timeline.start[i]
        first = ops[i].kind.computes and not computes
        computes = computes or first
        if computes and not first:
            found.message += idle
        else:
            found.warm_up += idle
        if ops[i].kind.computes:
            found.compute += took
        else:
            found.optimizer += took
        free = timeline.end[i]
    found.sums = max(0.0, timeline.closes(rank) - timeline.last_end(rank))
    found.senders = dict(_waits(timeline, rank))
    return found


def _waits(timeline: Timeline, rank: int) -> Iterator[tuple[int, float]]:
    """The ranks that a rank waits for between its ops, with ms."""
    graph, found = timeline.graph, dict[int, float]()
    mine = timeline.ops(rank)
    first = next((k for k, i in enumerate(mine) if graph.ops[i].kind.computes), len(mine))
    for before, i in pairwise(mine[first:]):
        idle, source = timeline.start[i] - timeline.end[before], timeline.waited_for(i)
        if idle > 1e-9 and source >= 0 and graph.ops[i].kind.computes:
            sender = graph.rank(source)
            found[sender] = found.get(sender, 0.0) + idle
    yield from found.items()
