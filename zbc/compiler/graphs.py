"""The order of ops of a model that is a graph of groups of layers."""

from __future__ import annotations

from collections.abc import Sequence

from zbc.compiler.cost import pricing
from zbc.compiler.cost.estimate import Layer
from zbc.compiler.partition.groups import stages_of
from zbc.compiler.partition.limits import bounds_of, limit_of
from zbc.compiler.partition.moving import moving
from zbc.compiler.partition.setup import Ordered, finished, lowering_of, moves, refusals, with_recompute
from zbc.compiler.schedules import AUTO, find
from zbc.compiler.schedules.branched import branched
from zbc.compiler.schedules.request import Request
from zbc.errors import raise_all
from zbc.job.spec import Job


def of_graph(job: Job, table: Sequence[Layer]) -> Ordered:
    """Raises E110 for a schedule without an order for graphs, E110 or E130 for impossible stages, E303 for a limit."""
    kind = job.schedule.kind.lower()
    if kind != AUTO:
        raise_all(refusals(job, find(kind)))
    stages, placement = stages_of(job, table)
    costs = pricing.build(with_recompute(job, (), placement), placement, stages, table)
    request = Request(job.parallel.pp, job.schedule.microbatches, costs=costs, objective=job.objective)
    made = branched(kind, placement, request)
    program = finished(job, made, costs, stages)
    limit, lowering = limit_of(job, placement, costs), lowering_of(job)
    if limit.units is not None and moves(job, placement):
        lowering = moving(job, placement, limit, limit.units)
    return Ordered(made.history[0], program, stages, costs, bounds_of(job, placement, costs), lowering)
