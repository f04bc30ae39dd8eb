"""A recorded step as the compiler sees it: for each op its waits, the ops that fed it, and the arrivals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zbc import ir
from zbc.ir import Op, Program
from zbc.topology import At
from zbc.trace.recording import Cause, Recorded, Trace

_MOST_STEPS = 32
LEAST_WAIT_NS = 20_000  # upper limit of a wait for something that has arrived


class Arrival(NamedTuple):
    """A tensor that a compute op took from another rank; ns on the clock of rank 0. `sent` is the end of the op that
    made it, `posted` the time of its buffer, `there` the time its receiver went on with it. If the receiver came late
    for it, `there` says nothing about the transfer: it is `awaited` if the receiver waited for most of it."""

    source: Op
    sender: int
    taker: Op
    receiver: int
    sent: int
    posted: int
    there: int
    awaited: bool

    @property
    def took(self) -> int:
        """ns of the transfer itself, once both ends were ready."""
        return max(0, self.there - max(self.sent, self.posted))


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step of every rank of the run; `ranks` are the run's ranks, over all replicas of the pipeline."""

    number: int  # from 1
    program: Program
    ranks: tuple[Recorded, ...]

    @property
    def barrier(self) -> bool:
        """Whether all ranks end a step before any begins the next."""
        return any(op.kind.is_barrier for op in self.program.ranks[0])

    @cached_property
    def begins(self) -> int:
        return min(rank.begins for rank in self.ranks)

    @cached_property
    def ends(self) -> int:
        return max(rank.ends for rank in self.ranks)

    def window(self, rank: int) -> tuple[int, int]:
        """Begin and end of the step for a rank; with a barrier the same for all."""
        return (self.begins, self.ends) if self.barrier else (self.ranks[rank].begins, self.ranks[rank].ends)

    @property
    def wall_ns(self) -> int:
        """ns of the step."""
        return max(b - a for a, b in map(self.window, range(len(self.ranks))))

    def compute(self, rank: int) -> list[tuple[int, Op]]:
        """The compute ops of a rank with their places."""
        return [(index, op) for index, op in enumerate(self.ranks[rank].ops) if op.kind.computes]

    @cached_property
    def own(self) -> list[tuple[int, int]]:
        """Per rank, the begin of its first compute op; the end of its last one and of collectives it waited for."""
        spans = []
        for rank, record in enumerate(self.ranks):
            places = [index for index, _ in self.compute(rank)]
            begin, end = (record.work[places[0]], record.end[places[-1]]) if places else (record.begins, record.begins)
            sums = (record.work[index] for index in record.waited(Cause.SUM) if index < len(record.ops))
            spans.append((begin, max([end, *sums])))
        return spans

    @property
    def busy_ns(self) -> list[int]:
        """The ns in which each rank computed."""
        records = enumerate(self.ranks)
        return [sum(one.end[index] - one.work[index] for index, _ in self.compute(rank)) for rank, one in records]

    @property
    def makespan_ns(self) -> int:
        """From the first compute op of all ranks to the end of the last."""
        return max(end for _, end in self.own) - min(begin for begin, _ in self.own)

    @property
    def span_ns(self) -> int:
        """The longest own time of a rank."""
        return max(end - begin for begin, end in self.own)

    def bubble(self, ns: int) -> float:
        """The share of `ns`, a makespan or a span, in which even the busiest rank is idle."""
        return (ns - max(self.busy_ns)) / ns if ns > 0 else 0.0

    def messages(self) -> Iterator[Arrival]:
        """Every tensor between two ranks."""
        placement, of = self.program.placement, self.program.topology.of
        copy = [(place.dp, place.at) for place in map(of, range(len(self.ranks)))]
        made: dict[tuple[tuple[int, At], ir.Message], tuple[Op, int, int]] = {}  # to maker, rank, its op's index
        for rank in range(len(self.ranks)):
            for index, op in self.compute(rank):
                for sink in placement.beside(op.stage, op.kind.gives):
                    made[copy[rank], ir.Message(op.stage, sink, *op.key[1:])] = op, rank, index
        for rank, trace in enumerate(self.ranks):
            posted = {placement.message(op): trace.end[index] for index, op in enumerate(trace.ops) if op.kind.is_recv}
            waited = trace.waited(Cause.MESSAGE)
            for index, op in self.compute(rank):
                for source in placement.beside(op.stage, op.kind.takes):
                    if not placement.crosses(source, op.stage, op.pipe):
                        continue
                    message = ir.Message(source, *op.key)
                    maker, sender, place = made[copy[rank], message]
                    ns = waited.get(index, 0)
                    there = trace.start[index] + ns
                    sent = self.ranks[sender].end[place]
                    awaited = ns > LEAST_WAIT_NS and 2 * ns > there - max(sent, posted[message])
                    yield Arrival(maker, sender, op, rank, sent, posted[message], there, awaited)


def step_of(trace: Trace, number: int) -> RecordedStep:
    """A recorded step. KeyError if it was not recorded."""
    ranks = tuple(rank.recorded(number) for rank in trace.ranks)
    return RecordedStep(number, trace.plan.program, ranks)


def typical(trace: Trace) -> list[RecordedStep]:
    """The recorded steps that count, the last ones of many; without the first step of a run, which includes setup."""
    later = trace.steps[1:] if trace.steps[0] == 1 and len(trace.steps) > 1 else trace.steps
    return [step_of(trace, number) for number in later[-_MOST_STEPS:]]
