"""Checks that a plan conforms to its job: all requested features, and memory that fits.

The other checks ask whether an order can run; these, whether the job allows it.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler import recall
from zbc.compiler.check.found import raise_found
from zbc.compiler.check.memory import check_host, check_memory
from zbc.compiler.memory.per_rank import peaks
from zbc.errors import ZbcError
from zbc.excludes import FLUSHLESS
from zbc.ir import Kind, Program
from zbc.job.spec import Job
from zbc.plan.directory import Manifest


def check_asked(manifest: Manifest, program: Program) -> None:
    """Raise E202 for features of the job that are missing; E301 and E302 for memory that does not fit.

    For a program that passes the other checks. Memory is not known if microbatches have slices that the job does not
    describe.
    """
    job = recall.job_of(manifest)
    raise_found(missing_problems(job, program))
    if manifest.slices == job.slices:
        costs = recall.costs_for(job, manifest)
        check_memory(job, peaks(program, costs), costs)
        check_host(job, program, costs)


def missing_problems(job: Job, program: Program) -> Iterator[ZbcError]:
    """Yields E202 for each setting of a job without any trace in its complete program: a pass has left it out.

    Offload copies and frozen layers are not required: a program may do without.
    """
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
