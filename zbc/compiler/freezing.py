"""[freeze]: gives an order that was found without it the shares that make its step shortest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zbc.compiler.cost import estimate
from zbc.compiler.partition.limits import bounds_of
from zbc.compiler.partition.setup import Ordered, freezing_refused
from zbc.compiler.passes.freeze import Freeze, alike, frozen, frozen_by_stage, trained
from zbc.compiler.report.report import Facts, told
from zbc.compiler.sim.bounds import Bounds
from zbc.ir import Op
from zbc.job.spec import Job
from zbc.ops import round_trip


def freezes(job: Job, found: Ordered, table: Sequence[estimate.Layer]) -> Ordered:
    """The order with layers frozen, if requested. Raises E110 for orders in which none can be, E602."""
    if not job.freeze.share:
        return found
    refused = freezing_refused(job, found)
    if refused is not None:
        raise refused
    layers = tuple(trained(table, part) for part in found.stages)
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
