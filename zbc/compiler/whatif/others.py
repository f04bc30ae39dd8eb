"""Step times of a job under other schedules, as far as quickly known: for the summary of a plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from zbc.compiler.check.memory import excess
from zbc.compiler.compiled import Compiled
from zbc.compiler.cost import estimate
from zbc.compiler.deciding import shareable
from zbc.compiler.order import glance, under
from zbc.compiler.partition.moving import planned
from zbc.compiler.partition.setup import Ordered
from zbc.compiler.planner.case import Case
from zbc.compiler.schedules import AUTO, SCHEDULES, ScheduleCard
from zbc.compiler.steps import settled
from zbc.errors import ZbcError
from zbc.host.until import Until
from zbc.job.sections import is_name
from zbc.job.spec import Job

BASELINE = "1f1b"
TRIED = ("v-auto", "zb-auto", "bitpipe-zb", "chimera-zb", "zb-h1")  # the fastest for most jobs, quickly planned
LARGE = 20_000  # F, B and W of a step beyond which only 1F1B is tried
SMALL = 5_000  # up to which the best of these is planned with each of its partitions, if near
NEAR = 0.03  # of a step, within which that may make it faster
HARDLY = 0.05  # of the memory of the fullest rank, below which recompute saves too little
WORTH = 0.01  # of a step, below which a faster schedule is not reported
HEAVY = 1.0  # blocks, from which on an output layer is worth sharing
ENDLESS = Until(math.inf)
FEW = 500  # F, B and W up to which each partition is tried with it; above, that took longer than the plan itself


class Other(NamedTuple):
    """Another schedule: its name and the ms of a step with its optimizer."""

    schedule: str
    ms: float
    bytes: float | None = None  # of its fullest rank, if known


class Others(NamedTuple):
    """The baseline, and a faster schedule; None if there is none."""

    baseline: Other | None
    faster: Other | None


def others(compiled: Compiled, until: Until = ENDLESS) -> Others:
    """1F1B, and the fastest of a few schedules if it is clearly faster, by the fastest search, as many as there is time
    for."""
    job, schedule = compiled.job, compiled.job.schedule
    named = is_name(schedule.kind)
    if named and compiled.schedule == BASELINE:
        base: Other | None = Other(BASELINE, compiled.settled_ms)
    else:
        base = quick(job, BASELINE)
    plans = [] if base is None else [base]
    ops, own = 3 * compiled.program.placement.stages * schedule.microbatches, compiled.settled_ms
    if ops <= LARGE and schedule.kind.lower() != AUTO:
        tried = (name for name in TRIED if name != compiled.schedule and not until.over())
        plans += [plan for name in tried if (plan := quick(job, name)) is not None]
    best = min(plans, key=lambda plan: plan.ms, default=None)
    if best is not None and ops <= SMALL and abs(best.ms / own - 1) <= NEAR and not until.over():
        best = quick(job, best.schedule, every=True)
    return Others(base, best if best is not None and best.ms < own * (1 - WORTH) else None)


def kept(compiled: Compiled, until: Until = ENDLESS) -> Other | None:
    """The same schedule without recompute, if clearly faster with hardly more memory: with recompute B runs a forward
    again, and leaves F's activations for a later W anyway. None if not so, or not known at once."""
    job = compiled.job
    again = {stage.stage for stage in compiled.report.cut.stages if stage.recompute}
    if not compiled.program.split & again or not is_name(job.schedule.kind):
        return None
    if until.over(compiled.report.compile_seconds):
        return None
    plain = replace(job, memory=job.memory.model_copy(update={"activations": "keep"}))
    plan = quick(plain, compiled.schedule, every=True)
    if plan is None or plan.bytes is None or plan.ms >= compiled.settled_ms * (1 - WORTH):
        return None
    return plan if plan.bytes <= (1 + HARDLY) * max(rank.bytes for rank in compiled.memory) else None


def speedup(base: Other | None, ms: float) -> float | None:
    """The speedup over 1F1B of a step of `ms`, as in reports."""
    return None if base is None or not ms else round(base.ms / ms, 9)


def quick(job: Job, name: str, *, every: bool = False) -> Other | None:
    """None if impossible, too large, or if only a search could tell whether it fits. For a searched schedule one
    partition is tried, or `every` one that a comparison starts from."""
    variant = under(job, name)
    try:
        made = _ordered(variant, SCHEDULES[name], every=every)
        if made is None or excess(variant, made.memory, made.costs) > 0:
            return None
        held = None if made.costs.bytes is None else max(rank.bytes for rank in made.memory)
        return Other(name, settled(made.complete), held)
    except ZbcError:
        return None


def _ordered(job: Job, card: ScheduleCard, *, every: bool) -> Ordered | None:
    if every or not card.searched or job.model.graph:
        return glance(job)
    case = Case(job, card, job.schedule.chunks)
    choice = next(filter(case.may_fit, case.starts), None)
    return None if choice is None else planned(case.setup(choice), 0.0)


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


def sharing(compiled: Compiled, until: Until = ENDLESS) -> Sharing | None:
    """None if the output layer is light, cannot be shared, or the comparison takes a search, or longer than the
    remaining time."""
    job, schedule = compiled.job, compiled.job.schedule
    ops = 3 * compiled.program.placement.stages * schedule.microbatches * job.slices
    if not is_name(schedule.kind) or ops > LARGE or not (job.vocabulary or shareable(job)):
        return None
    table = estimate.layers(job.with_vocabulary("ends"))
    blocks = table[1:-1]
    mean = sum(layer.f + layer.bw for layer in blocks) / len(blocks) if blocks else 0.0
    head = (table[-1].f + table[-1].bw) / mean if mean else 0.0
    if head < HEAVY or until.over(compiled.report.compile_seconds):
        return None
    variant = job.with_vocabulary("ends" if job.vocabulary else "shared")
    plan = quick(variant, compiled.schedule, every=ops <= FEW)
    return None if plan is None else Sharing(head, bool(job.vocabulary), plan.ms, plan.bytes)
