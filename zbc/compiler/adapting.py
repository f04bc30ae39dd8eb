"""[adapter]: savings reported for a plan, compared with a training of all weights in the same order."""

from __future__ import annotations

from dataclasses import replace

from zbc.compiler.cost import estimate, pricing
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.partition.setup import Ordered, as_ordered
from zbc.compiler.report.report import Facts, told
from zbc.job.spec import Adapter, Job


def adapter_report(job: Job, found: Ordered) -> Facts | None:
    """Parameters that adapters train, and all; ms of a step of the full training and bytes of its fullest rank, in the
    same order: None if times were given or measured, and so cover only one of the two trainings."""
    if not job.adapter.rank:
        return None
    plain = replace(as_ordered(job, found), adapter=Adapter.model_validate({}), profile=None)
    mine, theirs = estimate.layers(job), estimate.layers(plain)
    every = estimate.layers(plain.with_vocabulary("ends"))  # shared tables are of no layer
    trained, whole = (sum(layer.params for layer in table) - table[-1].tied for table in (mine, every))
    whole = whole or sum(layer.frozen for layer in mine)
    if job.profile is not None or job.costs.f is not None or not job.model.builtin:
        return told(rank=job.adapter.rank, trained=trained, whole=whole, whole_ms=None, whole_bytes=None)
    context = found.complete.priced(pricing.build(plain, found.program.placement, found.stages, theirs))
    held = peaks(context.program, context.costs, context.timeline)
    most = max(one.bytes or 0.0 for one in held)
    times = {"whole_ms": context.timeline.makespan, "whole_bytes": most}
    return told(rank=job.adapter.rank, trained=trained, whole=whole, **times)
