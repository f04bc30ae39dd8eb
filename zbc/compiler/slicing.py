"""How many slices a job's microbatches are cut into, where it leaves that open: schedule.slices = "auto"."""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.check.memory import check_memory
from zbc.compiler.cost import estimate
from zbc.compiler.order import order
from zbc.errors import ZbcError
from zbc.job.cuts import MULTIPLE
from zbc.job.spec import Job

WORTH = 0.002  # of a step, that twice as many slices have to save
MOST = 64


def decided(job: Job) -> Job:
    """The job with the number of slices that makes the fastest step that fits, as the fastest search finds it.

    Of 1, 2, 4, .. as long as the step falls: each further slice shortens the bubble, and adds what its kernels and
    messages take to get going. Where nothing fits it is 1, and planning says why.
    """
    if job.schedule.slices != "auto":
        return job
    best, least = job.in_slices(1), float("inf")
    for count in _counts(job):
        one = job.in_slices(count)
        try:
            found = order(one, estimate.layers(one), 0.0)
            check_memory(one, found.memory, found.costs)
        except ZbcError:
            continue
        step = found.complete.step_ms(one.objective)
        if step > least * (1 - WORTH):
            break
        best, least = one, step
    return best


def _counts(job: Job) -> Iterator[int]:
    length, count = job.model.seq_len or 1, 1
    while count <= min(MOST, length // MULTIPLE[job.hardware.device] or 1):
        yield count
        count *= 2
