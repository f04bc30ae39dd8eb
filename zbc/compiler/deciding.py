"""What a job leaves open that changes the work of its ops: schedule.slices = "auto", then parallel.vocabulary = "auto".

Each is settled by the step that the fastest search finds.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc import excludes
from zbc.compiler.check.memory import check_memory
from zbc.compiler.cost import estimate
from zbc.compiler.order import order
from zbc.compiler.schedules import AUTO, find
from zbc.errors import ZbcError
from zbc.job.cuts import MULTIPLE
from zbc.job.rules import unshareable
from zbc.job.spec import Job

WORTH = 0.002  # of a step, that twice as many slices have to save, or meetings of all ranks
MOST = 64


def decided(job: Job) -> Job:
    """The job with nothing of that left open. Where nothing fits it is the plain way, and planning says why."""
    return placed(sliced(job))


def sliced(job: Job) -> Job:
    """The job with the number of slices that makes the fastest step that fits.

    Of 1, 2, 4, .. as long as the step falls: each further slice shortens the bubble, and adds what its kernels and
    messages take to get going.
    """
    if job.schedule.slices != "auto":
        return job
    best, least = job.in_slices(1), float("inf")
    for count in _counts(job):
        one = job.in_slices(count)
        step = quick_ms(one)
        if step is None:
            continue
        if step > least * (1 - WORTH):
            break
        best, least = one, step
    return best


def placed(job: Job) -> Job:
    """The job with its vocabulary at the "ends" or "shared"."""
    if job.parallel.vocabulary != "auto":
        return job
    ends, shared = job.with_vocabulary("ends"), job.with_vocabulary("shared")
    if not shareable(job):
        return ends
    plain, other = quick_ms(ends), quick_ms(shared)
    return ends if other is None or (plain is not None and other > plain * (1 - WORTH)) else shared


def shareable(job: Job) -> bool:
    """Whether all ranks could share the job's vocabulary, and there are several."""
    kind = (job.schedule.kind or AUTO).lower()
    shared = job.with_vocabulary("shared")
    traits = frozenset[str]() if kind == AUTO else find(kind).traits
    apart = (pair for pair in excludes.clashes(vars(shared), traits) if pair.one == "shared vocabulary")
    return job.parallel.pp > 1 and not any(apart) and not any(unshareable(vars(job)))


def quick_ms(job: Job) -> float | None:
    """ms of a step by the fastest search; None where there is none that fits."""
    try:
        found = order(job, estimate.layers(job), 0.0)
        check_memory(job, found.memory, found.costs)
    except ZbcError:
        return None
    return found.complete.step_ms(job.objective)


def _counts(job: Job) -> Iterator[int]:
    length, count = job.model.seq_len or 1, 1
    while count <= min(MOST, length // MULTIPLE[job.hardware.device] or 1):
        yield count
        count *= 2
