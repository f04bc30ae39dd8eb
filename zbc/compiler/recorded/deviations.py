"""Finds ops that took longer than predicted: kinds of ops on a rank, links, whole ranks, and single outliers;
and slices of a microbatch, predicted and measured.

A rank or a link is slow if it is slow compared with the others, since a prediction may be off for all of them alike.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.recorded.times import Times, median_ms
from zbc.compiler.recorded.view import RecordedStep
from zbc.compiler.report.report import Facts, told
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


def deviations(times: Times, costs: Costs, steps: int, program: Program) -> list[Deviation]:
    """Every kind of op of every stage on every rank, sorted by excess over the prediction, largest first."""
    rows = list[Deviation]()
    for (kind, stage, rank), samples in times.work.items():
        holders = program.placement.holders(stage) if stage >= 0 else ()
        place = rank % program.placement.ranks
        pipe = holders.index(place) if place in holders else 0
        meant = statistics.median(costs.duration(Op(kind, stage, mb, pipe)) for mb in range(costs.unequal or 1))
        rows.append(Deviation(kind, stage, rank, round(len(samples) / steps), meant, median_ms(samples)))
    return sorted(rows, key=lambda row: (-abs(row.excess), row.rank, row.stage, row.kind))


def links(times: Times, costs: Costs, program: Program, steps: int) -> list[Facts]:
    """Every pair of ranks with transfers, by ranks; ms of those that the receiver `awaited`, so many a step."""
    edges = _edges(costs, program)
    part = [program.topology.of(rank).pp for rank in range(program.topology.world)]
    return [
        told(
            sender=a,
            receiver=b,
            awaited=round(len(samples) / steps),
            predicted=edges.get((part[a], part[b]), 0.0),
            measured=median_ms(samples),
        )
        for (a, b), samples in sorted(times.links.items())
        if samples
    ]


def compared_slices(steps: Sequence[RecordedStep], costs: Costs) -> Iterator[Facts]:
    """Yields ms of every slice on all stages, forward and backward (with W); nothing if microbatches are whole."""
    program = steps[0].program
    if program.slices == 1:
        return
    samples: dict[tuple[Kind, int, int], list[int]] = defaultdict(list)
    for step in steps:
        for rank, record in enumerate(step.ranks):
            for index, op in step.compute(rank):
                samples[op.kind, op.stage, op.slice].append(record.end[index] - record.work[index])
    whole = len(steps) * program.microbatches * (len(steps[0].ranks) // program.placement.ranks)
    meant, took = ([[0.0, 0.0] for _ in range(program.slices)] for _ in range(2))
    for (kind, stage, j), values in samples.items():
        share, side = len(values) / whole, int(not kind.is_forward)  # a backward may be fused or split
        meant[j][side] += share * costs.of(kind.row.cost, stage, j)
        took[j][side] += share * median_ms(values)
    for j in range(program.slices):
        yield told(
            number=j,
            predicted_f_ms=meant[j][0],
            measured_f_ms=took[j][0],
            predicted_b_ms=meant[j][1],
            measured_b_ms=took[j][1],
        )


def _edges(costs: Costs, program: Program) -> Mapping[tuple[int, int], float]:
    """Predicted ms of a transfer between two ranks of a pipeline."""
    edges = {}
    for pipe, homes in enumerate(program.placement.pipes):
        for (a, b), times in costs.links[pipe].items():
            ms = statistics.median(times) if isinstance(times, tuple) else times
            edges[homes[a], homes[b]] = edges[homes[b], homes[a]] = ms
    return edges


def slow_ranks(found: Sequence[Deviation]) -> list[Facts]:
    """The ranks whose ops take `ratio` times the predicted time, slow compared with `others`, the slowest first. Ranks
    with the same stages, in other replicas of the pipeline or in the other pipe, are the basis of comparison if they
    exist: stages that take longer than predicted do so on all of them."""
    spent, meant, holds = dict[int, float](), dict[int, float](), dict[int, set[int]]()
    for deviation in found:
        holds.setdefault(deviation.rank, set()).add(deviation.stage)
        spent[deviation.rank] = spent.get(deviation.rank, 0.0) + deviation.ops * deviation.measured
        meant[deviation.rank] = meant.get(deviation.rank, 0.0) + deviation.ops * deviation.predicted
    ratios = {rank: spent[rank] / meant[rank] for rank in spent if meant[rank] > 0}
    slow = []
    for rank, ratio in ratios.items():
        rest = {number: value for number, value in ratios.items() if number != rank}
        twins = [value for number, value in rest.items() if holds[number] == holds[rank]]
        normal = statistics.median(twins or [*rest.values()] or [ratio])
        if ratio > SLOW * normal > 0:
            slow.append(told(rank=rank, ratio=ratio, others=normal))
    return sorted(slow, key=lambda row: -row.ratio / row.others)


def slow_links(found: Sequence[Facts], step_ms: float) -> list[Facts]:
    """The links whose transfers are slow compared with the others', the slowest first; ms of both."""
    slow = []
    for link in found:
        rest = [entry.measured for entry in found if {entry.sender, entry.receiver} != {link.sender, link.receiver}]
        normal = statistics.median(rest) if rest else link.predicted
        if link.measured > SLOW_LINK * normal and link.measured - normal > LEAST_LINK * step_ms:
            slow.append(told(sender=link.sender, receiver=link.receiver, ms=link.measured, others=normal))
    return sorted(slow, key=lambda link: -link.ms)


def outliers(steps: Sequence[RecordedStep], times: Times, step_ms: float) -> tuple[list[Outlier], list[Facts]]:
    """Single outlying ops and transfers, the longest first, and stalls: most ranks stood still at once, for about `ms`,
    which the machine causes, not the plan."""
    rows, stalls, frozen = list[Outlier](), list[Facts](), list[tuple[float, float]]()
    for group in _together(_out_of_line(_ops(steps, times), step_ms)):
        ranks = {slow.rank for slow in group}
        if len(ranks) == 1 or 2 * len(ranks) <= len(steps[0].ranks):
            rows += group
            continue
        lost = [max(slow.measured - slow.usual for slow in group if slow.rank == rank) for rank in ranks]
        stalls.append(told(step=group[0].step, ranks=tuple(sorted(ranks)), ms=statistics.median(lost)))
        frozen.append((group[0].start, max(slow.end for slow in group)))
    late = _out_of_line(_messages(steps, times), step_ms)
    rows += [slow for slow in late if not any(slow.start < end and begin < slow.end for begin, end in frozen)]
    return sorted(rows, key=lambda slow: slow.usual - slow.measured), sorted(stalls, key=lambda stall: -stall.ms)


def _together(found: Iterable[Outlier]) -> Iterator[list[Outlier]]:
    """Yields groups of outliers that overlap in time, one after the other."""
    group, end = list[Outlier](), 0.0
    for slow in sorted(found, key=lambda slow: slow.start):
        if group and slow.start >= end:
            yield group
            group = []
        end = max(end, slow.end) if group else slow.end
        group.append(slow)
    if group:
        yield group


def _out_of_line(found: Iterable[Outlier], step_ms: float) -> Iterator[Outlier]:
    for slow in found:
        if slow.measured - slow.usual > max((OUT_OF_LINE - 1) * slow.usual, LEAST_OUTLIER * step_ms):
            yield slow


def _ops(steps: Sequence[RecordedStep], times: Times) -> Iterator[Outlier]:
    usual = {key: median_ms(samples) for key, samples in times.work.items()}
    for step in steps:
        for rank, record in enumerate(step.ranks):
            for index, op in step.compute(rank):
                ms = (record.end[index] - record.work[index]) / _MS
                normal = usual[op.kind, op.stage, rank] / times.typical.of(op)
                yield Outlier(step.number, rank, op, normal, ms, record.work[index] / _MS)


def _messages(steps: Sequence[RecordedStep], times: Times) -> Iterator[Outlier]:
    usual = {pair: median_ms(samples) for pair, samples in times.links.items() if samples}
    for step in steps:
        for message in step.messages():
            if message.awaited:
                ms, start = message.took / _MS, max(message.sent, message.posted) / _MS
                normal = usual[message.sender, message.receiver] / times.typical.sent(message)
                yield Outlier(step.number, message.receiver, message.taker, normal, ms, start, message.sender)
