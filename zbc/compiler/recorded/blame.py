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

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import islice

from zbc.compiler.cost.cost import Costs
from zbc.compiler.recorded.view import Arrival, RecordedStep
from zbc.compiler.sim.beside import copied
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
    # When each rank came to the collective over all ranks that ends a step with a barrier.
    comes = [
        one.end[i] - one.waited(Cause.ALL).get(i, 0)
        for one in step.ranks
        for i, op in enumerate(one.ops)
        if op.kind.is_barrier
    ]
    arrived, senders = max(comes, default=None), _senders(step)
    return [_rank(step, rank, arrived, senders) for rank in range(len(step.ranks))]


def _rank(step: RecordedStep, rank: int, arrived: int | None, senders: Mapping[tuple[int, Op], int]) -> Shares:
    record, totals = step.ranks[rank], Shares()
    begin, end = step.window(rank)
    totals.host += record.begins - begin
    totals.drain += end - record.ends
    waits = defaultdict[int, Counter[Cause]](Counter)
    for wait in record.waits:
        waits[wait.op][wait.cause] += wait.ns
    first, inside = True, groups(record.ops)  # the first op of a group waits for the input of both
    for index, op in enumerate(record.ops):
        took, waited = record.end[index] - record.start[index], waits[index]
        copies = min(waited[Cause.COPY], record.work[index] - record.start[index])
        totals.copies += copies
        if op.kind.computes:
            message = min(waited[Cause.MESSAGE], record.work[index] - record.start[index] - copies)
            if first:
                totals.warm_up += message
            elif message:
                totals.message += message
                together = record.ops[inside[index] + 1 : inside[index] + 3] if index in inside else (op,)
                peer = next(senders[rank, member] for member in (op, *together) if (rank, member) in senders)
                totals.senders[peer] = totals.senders.get(peer, 0) + message
            totals.compute += record.end[index] - record.work[index]
            totals.host += record.work[index] - record.start[index] - message - copies
            first = False
        elif op.kind.is_barrier:
            _close(totals, record, index, waited, arrived)
        elif op.kind.row.closes:
            sums = min(took, waited[Cause.SUM])
            totals.sums += sums
            totals.optimizer += took - sums
        else:
            totals.host += took - copies
    # After the last op.
    close, waited = record.ends - (record.end[-1] if record.end else record.begins), waits[len(record.ops)]
    gather = min(close, waited[Cause.GATHER])
    delivery = min(close - gather, waited[Cause.DELIVERY])
    totals.sums += gather
    totals.drain += delivery
    totals.host += close - gather - delivery
    return totals


def _close(found: Shares, one: Recorded, index: int, waited: Counter[Cause], arrived: int | None) -> None:
    """A barrier: gradient reductions, then the norm, then the collective over all ranks, which starts with the last."""
    start, end = one.start[index], one.end[index]
    everyone = min(waited[Cause.ALL], end - start)
    sums = min(waited[Cause.SUM], end - start - everyone)
    late = min(everyone, max(0, (arrived or end) - (end - everyone)))
    found.drain += late
    found.sums += sums + everyone - late
    found.optimizer += end - start - everyone - sums


def _senders(step: RecordedStep) -> dict[tuple[int, Op], int]:
    """The rank of the run that a rank's compute op waits for; of several, the one that sent last."""
    last: dict[tuple[int, Op], Arrival] = {}
    for message in step.messages():
        latest = last.setdefault((message.receiver, message.taker), message)
        if message.sent > latest.sent:
            last[message.receiver, message.taker] = message
    return {taker: message.sender for taker, message in last.items()}


def predicted(program: Program, timeline: Timeline, costs: Costs) -> list[Shares]:
    """The predicted shares of a step with its optimizer in steady state, per rank of a pipeline, in ms. Without a
    barrier it begins for a rank at the end of its previous one."""
    ranks, ahead, rows = range(timeline.ranks), program.ahead, list[Shares]()
    steps = [0.0 if ahead else optimizer_ms(program, costs, rank) for rank in ranks]
    begins = [min(map(timeline.opens, ranks))] * len(ranks)
    if ahead:
        *_, before, timeline = islice(consecutive(program, costs), SETTLES)
        begins = [before.closes(rank) for rank in ranks]
    graph, copies = timeline.graph, copied(timeline)
    for rank, free in enumerate(begins):
        totals, begin, computes = Shares(copies=copies[rank].waited, optimizer=steps[rank]), free, False
        for i in timeline.ops(rank):
            idle, took, own = max(0.0, timeline.start[i] - free), timeline.end[i] - timeline.start[i], graph.ops[i].kind
            if not computes:
                totals.warm_up += idle
            else:
                totals.message += idle
                if idle > 1e-9 and own.computes and (source := timeline.waited_for(i)) >= 0:
                    sender = graph.rank(source)
                    totals.senders[sender] = totals.senders.get(sender, 0.0) + idle
            computes = computes or own.computes
            if own.computes:
                totals.compute += took
            else:
                totals.optimizer += took
            free = timeline.end[i]
        closes = timeline.closes(rank)
        totals.message -= totals.copies
        totals.sums = max(0.0, closes - free) if ahead else closes - free + costs.of("agree")
        totals.drain = 0.0 if ahead else begin + timeline.makespan - closes + max(steps) - steps[rank]
        rows.append(totals)
    return rows
