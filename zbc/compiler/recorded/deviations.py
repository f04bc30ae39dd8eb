"""Finds ops that took longer than predicted: kinds of ops on a rank, links, whole ranks, and single outliers.

A rank or a link is slow if it is slow compared with the others, since a prediction may be off for all of them alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.recorded.times import Times, median_ms
from zbc.compiler.recorded.view import RecordedStep
from zbc.ir import Kind, Op, Program

SLOW = 1.15  # ratio to the others from which a rank counts as slow
SLOW_LINK, LEAST_LINK = 2.0, 0.005  # ratio to the others, and share of a step, from which a link counts as slow
OUT_OF_LINE, LEAST_OUTLIER = 2.0, 0.01  # ratio to the usual time, and excess as share of a step, of an outlier
_MS = 1e6


class Deviation(NamedTuple):
    """One kind of op of a stage on a rank, `ops` of them a step; ms."""

    kind: Kind
    stage: int
    rank: int
    ops: int
    predicted: float
    measured: float

    @property
    def excess(self) -> float:
        """Their ms in a step beyond the prediction."""
        return self.ops * (self.measured - self.predicted)

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted if self.predicted > 0 else float("inf")


class LinkTime(NamedTuple):
    """Transfers from one rank to another; ms. Only transfers that the receiver `awaited` (number per step) count."""

    sender: int
    receiver: int
    awaited: int
    predicted: float
    measured: float


class Outlier(NamedTuple):
    """One op, or one transfer (`sender`), that took far longer than others of its kind; ms, on the clock of rank 0."""

    step: int
    rank: int
    op: Op
    usual: float
    measured: float
    start: float
    sender: int | None = None

    @property
    def end(self) -> float:
        return self.start + self.measured


class Stall(NamedTuple):
    """Most ranks of a run stood still at the same time, for about `ms`: caused by the machine, not the plan."""

    step: int
    ranks: tuple[int, ...]
    ms: float


class SlowRank(NamedTuple):
    """A rank whose ops take `ratio` times the predicted time, compared with `others` times for the other ranks."""

    rank: int
    ratio: float
    others: float


class SlowLink(NamedTuple):
    """A link whose transfers take `ms`, compared with `others` for the other links."""

    sender: int
    receiver: int
    ms: float
    others: float


def deviations(times: Times, costs: Costs, steps: int, program: Program) -> list[Deviation]:
    """Every kind of op of every stage on every rank, sorted by excess over the prediction, largest first."""
    found = list[Deviation]()
    for (kind, stage, rank), samples in times.work.items():
        holders = program.placement.holders(stage) if stage >= 0 else ()
        place = rank % program.placement.ranks
        pipe = holders.index(place) if place in holders else 0
        meant = statistics.median(costs.duration(Op(kind, stage, mb, pipe)) for mb in range(costs.unequal or 1))
        found.append(Deviation(kind, stage, rank, round(len(samples) / steps), meant, median_ms(samples)))
    return sorted(found, key=lambda one: (-abs(one.excess), one.rank, one.stage, one.kind))


def links(times: Times, costs: Costs, program: Program, steps: int) -> list[LinkTime]:
    """Every pair of ranks with transfers, by ranks."""
    edges = _edges(costs, program)
    part = [program.topology.of(rank).pp for rank in range(program.topology.world)]
    return [
        LinkTime(a, b, round(len(samples) / steps), edges.get((part[a], part[b]), 0.0), median_ms(samples))
        for (a, b), samples in sorted(times.links.items())
        if samples
    ]


def _edges(costs: Costs, program: Program) -> Mapping[tuple[int, int], float]:
    """Predicted ms of a transfer between two ranks of a pipeline."""
    found = {}
    for pipe, homes in enumerate(program.placement.pipes):
        for (a, b), each in costs.links[pipe].items():
            ms = statistics.median(each) if isinstance(each, tuple) else each
            found[homes[a], homes[b]] = found[homes[b], homes[a]] = ms
    return found


def slow_ranks(found: Sequence[Deviation]) -> list[SlowRank]:
    """The ranks whose ops are slow compared with the others', the slowest first.

    Ranks with the same stages, in other replicas of the pipeline or in the other pipe, are the basis of comparison if
    they exist: stages that take longer than predicted do so on all of them.
    """
    spent, meant, holds = dict[int, float](), dict[int, float](), dict[int, set[int]]()
    for one in found:
        holds.setdefault(one.rank, set()).add(one.stage)
        spent[one.rank] = spent.get(one.rank, 0.0) + one.ops * one.measured
        meant[one.rank] = meant.get(one.rank, 0.0) + one.ops * one.predicted
    ratios = {rank: spent[rank] / meant[rank] for rank in spent if meant[rank] > 0}
    slow = []
    for rank, ratio in ratios.items():
        rest = {number: other for number, other in ratios.items() if number != rank}
        twins = [other for number, other in rest.items() if holds[number] == holds[rank]]
        others = statistics.median(twins or [*rest.values()] or [ratio])
        if ratio > SLOW * others:
            slow.append(SlowRank(rank, ratio, others))
    return sorted(slow, key=lambda one: -one.ratio / one.others)


def slow_links(found: Sequence[LinkTime], step_ms: float) -> list[SlowLink]:
    """The links whose transfers are slow compared with the others', the slowest first."""
    slow = []
    for one in found:
        rest = [other.measured for other in found if {other.sender, other.receiver} != {one.sender, one.receiver}]
        others = statistics.median(rest) if rest else one.predicted
        if one.measured > SLOW_LINK * others and one.measured - others > LEAST_LINK * step_ms:
            slow.append(SlowLink(one.sender, one.receiver, one.measured, others))
    return sorted(slow, key=lambda one: -one.ms)


def outliers(steps: Sequence[RecordedStep], times: Times, step_ms: float) -> tuple[list[Outlier], list[Stall]]:
    """Single outlying ops and transfers, the longest first, and stalls of most ranks at once."""
    found, stalls, frozen = list[Outlier](), list[Stall](), list[tuple[float, float]]()
    for group in _together(list(_slow_ops(steps, times, step_ms))):
        ranks = {one.rank for one in group}
        if len(ranks) == 1 or 2 * len(ranks) <= len(steps[0].ranks):
            found += group
            continue
        lost = [max(one.measured - one.usual for one in group if one.rank == rank) for rank in ranks]
        stalls.append(Stall(group[0].step, tuple(sorted(ranks)), statistics.median(lost)))
        frozen.append((group[0].start, max(one.end for one in group)))
    late = _late_messages(steps, times, step_ms)
    found += [one for one in late if not any(one.start < end and begin < one.end for begin, end in frozen)]
    return sorted(found, key=lambda one: one.usual - one.measured), sorted(stalls, key=lambda one: -one.ms)


def _together(found: Sequence[Outlier]) -> Iterator[list[Outlier]]:
    """Yields groups of outliers that overlap in time, one after the other."""
    group, end = list[Outlier](), 0.0
    for one in sorted(found, key=lambda one: one.start):
        if group and one.start >= end:
            yield group
            group = []
        end = max(end, one.end) if group else one.end
        group.append(one)
    if group:
        yield group


def _out_of_line(ms: float, usual: float, step_ms: float) -> bool:
    return ms - usual > (OUT_OF_LINE - 1) * usual and ms - usual > LEAST_OUTLIER * step_ms


def _slow_ops(steps: Sequence[RecordedStep], times: Times, step_ms: float) -> Iterator[Outlier]:
    usual = {key: median_ms(samples) for key, samples in times.work.items()}
    for step in steps:
        for rank, one in enumerate(step.ranks):
            for index, op in step.compute(rank):
                ms = (one.end[index] - one.work[index]) / _MS
                normal = usual[op.kind, op.stage, rank]
                if _out_of_line(ms, normal, step_ms):
                    yield Outlier(step.number, rank, op, normal, ms, one.work[index] / _MS)


def _late_messages(steps: Sequence[RecordedStep], times: Times, step_ms: float) -> Iterator[Outlier]:
    usual = {pair: median_ms(samples) for pair, samples in times.links.items() if samples}
    for step in steps:
        for message in step.messages():
            if not message.awaited:
                continue
            ms, normal = message.took / _MS, usual[message.sender, message.receiver]
            if _out_of_line(ms, normal, step_ms):
                start = max(message.sent, message.posted) / _MS
                yield Outlier(step.number, message.receiver, message.taker, normal, ms, start, message.sender)
