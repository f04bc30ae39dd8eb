"""Does a plan keep to its job: to what it may freeze, and to the memory it has?

The other checks ask whether an order can run; these, whether it is one of those that the job allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbc.compiler import recall
from zbc.compiler.check.found import raise_found
from zbc.compiler.check.memory import check_host, check_memory
from zbc.compiler.cost import estimate
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.passes.freeze import frozen_by_stage, trained, within
from zbc.errors import ZbcError
from zbc.ir import WHOLE, Program
from zbc.plan.directory import Manifest


def check_asked(manifest: Manifest, program: Program) -> None:
    """Raise E202 for layers that are frozen against the job's [freeze], E301, E302 and E305 for what does not fit.

    Of a program that the other checks let pass. Memory is not known where microbatches have slices that the job does
    not speak of.
    """
    job = recall.job_of(manifest)
    table = estimate.layers(job)
    stages = recall.stages_of(manifest, table)
    raise_found(freeze_problems(program, job.freeze.most, [trained(table, part) for part in stages]))
    if manifest.slices == job.slices:
        costs = recall.costs_for(job, manifest)
        check_memory(job, peaks(program, costs), costs)
        check_host(job, program, costs)


def freeze_problems(program: Program, most: float, layers: Sequence[int]) -> Iterator[ZbcError]:
    """What is frozen though it may not be, given how many layers of each stage have weight gradients."""
    for rank, step, op in program:
        if op.share == WHOLE or not op.kind.makes_part:
            continue
        where = f"rank {rank} step {step}"
        if not most:
            text = f"program: {op} leaves out weight gradients, and the job freezes nothing"
            yield ZbcError("E202", text, where=where, hint=f"write {op._replace(share=WHOLE)}, or set freeze.most")
        elif op.share not in {round(WHOLE * kept / layers[op.stage]) for kept in range(layers[op.stage])}:
            text = f"program: {op} freezes a part of a layer, stage {op.stage} has {layers[op.stage]}"
            yield ZbcError("E202", text, where=where, hint="plan again")
    for stage, share in enumerate(frozen_by_stage(program)):
        if most and not within(share, most):
            text = f"program: {share:.1%} of the weight gradients of stage {stage} are frozen, freeze.most is {most:g}"
            yield ZbcError("E202", text, hint="plan again")
