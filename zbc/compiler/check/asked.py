"""Checks that a plan conforms to its job: all requested features, no more freezing than allowed, and memory that fits.

The other checks ask whether an order can run; these, whether the job allows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbc.compiler import recall
from zbc.compiler.check.memory import check_host, check_memory
from zbc.compiler.cost import estimate
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.passes.freeze import frozen_by_stage, trained, within
from zbc.errors import ZbcError, raise_found
from zbc.excludes import FLUSHLESS
from zbc.ir import WHOLE, Kind, Program
from zbc.job.spec import Job
from zbc.plan.directory import Manifest
from zbc.plan.reading import job_of


def check_asked(manifest: Manifest, program: Program) -> None:
    """Raise E202 for features of the job that are missing and for layers frozen against its [freeze]; E301, E302 and
    E301 for memory that does not fit. For a program that passes the other checks. Memory is not known if microbatches
    have slices that the job does not describe."""
    job = job_of(manifest)
    table = estimate.layers(job)
    stages = recall.stages_of(manifest, table)
    raise_found(missing_problems(job, program))
    raise_found(freeze_problems(program, job.freeze.share, [trained(table, part) for part in stages]))
    if manifest.slices == job.slices:
        costs = recall.costs_for(job, manifest)
        check_memory(job, peaks(program, costs), costs)
        check_host(job, program, costs)


def missing_problems(job: Job, program: Program) -> Iterator[ZbcError]:
    """Yields E202 for each setting of a job without any trace in its complete program: a pass has left it out. Offload
    copies and frozen layers are not required: a program may do without."""
    kinds, parallel, sync = program.kinds, job.parallel, job.optimizer.sync
    lacks, held = {kind.row.feature for kind in Kind if kind not in kinds}, max(parallel.copies, parallel.of_experts)
    several, averages = parallel.copies > 1, parallel.average is not None
    asked = {
        "schedule.slices": (job.slices > 1, program.slices == job.slices),
        "parallel.cp": (parallel.cp > 1, program.cp == parallel.cp),
        "parallel.tp": (parallel.tp > 1, program.tp == parallel.tp),
        "parallel.dp": (several and not averages, any(kind.sums for kind in kinds)),
        "parallel.average": (several and averages, "averages" not in lacks),
        "parallel.ep": (parallel.ep > 1, program.ep == parallel.ep),
        "parallel.shard": (held > 1 and job.parallel.shard != "none", program.sharded and "sharded" not in lacks),
        "parallel.shard: weights": (parallel.frees, program.resident > 0 and not lacks & {"sharded", "resident"}),
        "parallel.shard: gradients": (parallel.scatters, program.scatters),
        "parallel.exchange": (parallel.one_sided, program.one_sided),
        "parallel.vocabulary": (job.vocabulary > 0, program.vocabulary == job.vocabulary and "vocabulary" not in lacks),
        "optimizer.sync": (sync == "post-validate", kinds >= {kind for kind in Kind if kind.row.closes == "ahead"}),
        "optimizer.sync: no flush": (sync in FLUSHLESS, program.flushless),
    }
    for key, (wanted, there) in asked.items():
        if wanted and not there:
            text = f"program: the job has {key}, and its ops do nothing of it"
            yield ZbcError("E202", text, hint="plan again; if `zbc plan` made it, this is an error of zbc")


def freeze_problems(program: Program, most: float, layers: Sequence[int]) -> Iterator[ZbcError]:
    """Yields frozen shares that are not allowed, given the number of layers of each stage with weight gradients."""
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
