"""The cost of a model's output layer in a pipeline, and with vocabulary parallelism: for the summary."""

from __future__ import annotations

from typing import NamedTuple

from zbc.compiler.compiled import Compiled
from zbc.compiler.cost import estimate
from zbc.compiler.deciding import shareable
from zbc.compiler.whatif.others import LARGE, WORTH, quick
from zbc.host.until import Until
from zbc.job.sections import is_name

HEAVY = 1.0  # blocks, from which on an output layer is worth considering
FEW = 500  # F, B and W of a step up to which each partition is tried; above, that took longer than the plan itself


class Sharing(NamedTuple):
    """An output layer that takes as long as `blocks` blocks, and a step with it in the other place."""

    blocks: float
    shared: bool  # now
    ms: float  # of a step with its optimizer, the other way
    bytes: float | None  # of the fullest rank then, if known

    @property
    def other(self) -> str:
        return "ends" if self.shared else "shared"

    def pays(self, ms: float) -> bool:
        """Whether the other way is clearly faster than `ms`."""
        return self.ms < ms * (1 - WORTH)


def sharing(compiled: Compiled, until: Until | None = None) -> Sharing | None:
    """None if the output layer is light, cannot be shared, or the comparison takes a search, or longer than the
    remaining time."""
    job, schedule = compiled.job, compiled.job.schedule
    named = is_name(schedule.kind)
    ops = 3 * compiled.program.placement.stages * schedule.microbatches * job.slices
    if not named or ops > LARGE or not (job.vocabulary or shareable(job)):
        return None
    table = estimate.layers(job.with_vocabulary("ends"))
    blocks = table[1:-1]
    mean = sum(layer.f + layer.bw for layer in blocks) / len(blocks) if blocks else 0.0
    head = (table[-1].f + table[-1].bw) / mean if mean else 0.0
    if head < HEAVY:
        return None
    if until is not None and until.over(compiled.report.compile_seconds):
        return None
    variant = job.with_vocabulary("ends" if job.vocabulary else "shared")
    plan = quick(variant, compiled.schedule, every=ops <= FEW)
    return None if plan is None else Sharing(head, bool(job.vocabulary), plan.ms, plan.bytes)
