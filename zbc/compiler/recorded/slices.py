"""Slices of a microbatch: predicted and measured time of each through all stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.recorded.times import median_ms
from zbc.compiler.recorded.view import RecordedStep
from zbc.ir import Kind


class SliceCompared(NamedTuple):
    """ms of one slice of a microbatch on all stages, forward and backward."""

    number: int
    predicted_f_ms: float
    measured_f_ms: float
    predicted_b_ms: float  # with W
    measured_b_ms: float


def compared(steps: Sequence[RecordedStep], costs: Costs) -> Iterator[SliceCompared]:
    """Yields every slice; nothing if microbatches are whole."""
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
        yield SliceCompared(j, meant[j][0], took[j][0], meant[j][1], took[j][1])
