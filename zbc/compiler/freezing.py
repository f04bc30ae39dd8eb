"""[freeze]: gives an order that was found without it the shares that make its step shortest. [adapter]: its savings."""

from __future__ import annotations

from dataclasses import replace

from zbc.compiler.cost import estimate, pricing
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.partition.limits import bounds_of
from zbc.compiler.partition.setup import Ordered, as_ordered, freezing_refused
from zbc.compiler.passes.freeze import Freeze, alike, frozen, frozen_by_stage, trained
from zbc.compiler.report.report import Facts, told
from zbc.compiler.sim.bounds import Bounds
from zbc.ir import Op
from zbc.job.spec import Adapter, Job
from zbc.ops import round_trip


def freezes(job: Job, found: Ordered) -> Ordered:
    """The order with layers frozen, if requested. Raises E110 for orders in which none can be, E602."""
    if not job.freeze.share:
        return found
    refused = freezing_refused(job, found)
    if refused is not None:
        raise refused
    layers = tuple(trained(estimate.layers(job), part) for part in found.stages)
    lowering = replace(found.lowering, freeze=Freeze(job.freeze.share, layers))
    return replace(found, lowering=lowering, bounds=_bounds(job, found))


def _bounds(job: Job, found: Ordered) -> Bounds:
    """Lower bounds: as if weight gradients took no time, except for the work of the busiest rank."""
    placement, costs, m = found.program.placement, found.costs, job.schedule.microbatches
    least = bounds_of(job, placement, costs.with_ms(w=(0.0,) * placement.stages, bw=()))
    whole = round_trip(split=False)[-1]
    columns = zip(*map(costs.column, ("f", "bw")), strict=True)
    work = [m * (f + bw - costs.left_out(Op(whole, s), job.freeze.share)) for s, (f, bw) in enumerate(columns)]
    busiest = max(sum(work[s] for s in placement.stages_of(rank)) for rank in range(placement.ranks))
    return replace(least, makespan=max(least.makespan, busiest), span=max(least.span, busiest))


def freeze_report(job: Job, before: Ordered, found: Ordered) -> Facts | None:
    """The frozen shares of weight gradients, and ms of the order as it was `before`, and if each op skips `most`."""
    if not job.freeze.share:
        return None
    program, plain = found.complete.program, before.complete
    return told(
        most=job.freeze.share,
        frozen=frozen(program),  # mean over all ops that have weight gradients
        by_stage=tuple(frozen_by_stage(program)),
        unfrozen_ms=plain.timeline.makespan,
        alike_ms=alike(plain, job.freeze.share),
    )


def adapter_report(job: Job, found: Ordered) -> Facts | None:
    """Parameters that adapters train, and all; ms of a step of the full training and bytes of its fullest rank, in the
    same order: None if times were given or measured, and so cover only one of the two trainings."""
    if not job.adapter.rank:
        return None
    plain = replace(as_ordered(job, found), adapter=Adapter.model_validate({}), profile=None)
    mine = estimate.layers(job)
    every = estimate.layers(plain.with_vocabulary("ends"))  # shared tables are of no layer
    trained, whole = (sum(layer.params for layer in table) - table[-1].tied for table in (mine, every))
    whole = whole or sum(layer.frozen for layer in mine)
    if job.profile is not None or job.costs.f is not None or not job.model.builtin:
        return told(rank=job.adapter.rank, trained=trained, whole=whole, whole_ms=None, whole_bytes=None)
    context = found.complete.priced(pricing.build(plain, found.program.placement, found.stages))
    held = peaks(context.program, context.costs, context.timeline)
    most = max(one.bytes or 0.0 for one in held)
    times = {"whole_ms": context.timeline.makespan, "whole_bytes": most}
    return told(rank=job.adapter.rank, trained=trained, whole=whole, **times)
