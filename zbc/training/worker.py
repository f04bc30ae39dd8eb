"""Build a rank's `Worker` from its plan: stages, data, loss and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from zbc.ir import Kind
from zbc.ops import WORDS, experts_of
from zbc.plan.directory import RankPlan
from zbc.plan.lateness import lateness
from zbc.plan.phases import Phases
from zbc.runtime.core.feature import Context, Feature, Features
from zbc.runtime.core.optimizer import StageOptimizer
from zbc.runtime.core.stage import Stage
from zbc.runtime.core.state import Worker
from zbc.runtime.features import built
from zbc.runtime.features.ahead import Ahead
from zbc.runtime.features.expert_parallel import split
from zbc.runtime.features.freezing import Resting
from zbc.runtime.features.stage_slice import in_slices
from zbc.runtime.features.units import braid
from zbc.runtime.features.vocabulary_state import Vocabulary
from zbc.runtime.transports.transport import Transport
from zbc.training.building.context import LOWERED, Settings, layer_plans, looks_of, parts_of
from zbc.training.building.data import batches_of, counted, reads_data, samples_of, work_of
from zbc.training.building.optimizers import averages_of, optimizer_of, sums_of, tied_weights
from zbc.training.building.refusals import refuse
from zbc.training.building.runs import phase_run, turns_in
from zbc.training.building.shares import (
    Shared,
    experts_in,
    group_for,
    loss_of,
    shared_out,
    swaps_for,
    tables_of,
    vocabulary_of,
)
from zbc.training.building.stages import build_stages, compile_stages, forms
from zbc.training.data.counted import count_of, no_mean
from zbc.training.data.data import KINDS, build_validation, place
from zbc.training.evaluate import build_evaluation
from zbc.training.models import model
from zbc.training.probing.shapes import Shapes


def build_worker(
    plan: RankPlan,
    transport: Transport,
    device: torch.device,
    ramp: Sequence[RankPlan] = (),
    plans: Sequence[model.LayerPlan] | None = None,
    tell: Callable[[str], None] = lambda text: None,
    looks: dict[int | None, Shapes] | None = None,
) -> Worker:
    """Build what one rank needs to run its plan, on `device`; `ramp` are the plans that its training begins with.

    `plans` are the layers, if they are not those of the plan's model; `tell` is told of what takes long. `looks`: what
    other ranks of the plan saw of its layers, by the rows of a slice, and this one sees if it is the first.

    Raises E205 or E406 (the plan asks for what this runtime does not do), E501 to E511 (data, user code, shapes), E617
    (nothing to compile with).
    """
    manifest, rank = plan.manifest, transport.rank
    settings, placement = Settings.of(manifest), manifest.to_placement()
    chosen, mine, parts = settings.model, placement.stages_of(plan.rank), [*ramp, plan]
    work = work_of(settings, manifest)
    phases = Phases.of(manifest) if work is None else work.phases
    samples = samples_of(settings, manifest, work, plan.rank)
    plans = layer_plans(settings) if plans is None else list(plans)
    shapes, by_slice = looks_of(settings, plans, samples, manifest, device, {} if looks is None else looks)
    shared, tables = Shared(group_for(manifest, transport, device)), tables_of(manifest, settings, plan.rank)
    swaps = swaps_for(manifest, transport, device)
    share = shared_out(swaps, shared.part(chosen) if tables is None else tables.cut)
    stages = build_stages(parts, settings, plans, shapes, device, share)
    slices = parts_of(manifest)
    for stage in stages.values() if slices else ():
        in_slices(stage, slices, [forms(manifest, stage.index, one) for one in by_slice])
    last = any(not placement.sinks(s) for s in mine)
    refuse(settings, manifest, parts, plans, stages, samples, shapes, last=last)
    late = lateness(plan.ops) if manifest.flushless else {}
    optimizers = dict[int, StageOptimizer]()
    for s in mine:
        stage, behind = stages[s], late.get(s, 0)
        of = (stage.parameters,) if swaps is None else split(stage.parameters, experts_in(stage))
        for owner, own in zip((s, experts_of(s)), of, strict=False):
            optimizers[owner] = optimizer_of(settings, stage, manifest, rank, plans, behind, owner, own)
    words = None if tables is None else vocabulary_of(plan, settings, plans, tables, by_slice, transport, device)
    optimizers |= {} if words is None else {WORDS: words.optimizer}
    tied = tied_weights(manifest, plans)
    worker = Worker(
        phase_runs=[phase_run(part, shapes, manifest.balance) for part in parts],
        work=work,
        phases=phases,
        transport=transport,
        device=device,
        stages=stages,
        batches=batches_of(settings, parts, phases, samples, rank, work, device),
        loss=loss_of(chosen, shared.group),
        watched=not chosen.builtin,
        optimizers=optimizers,
        clip=settings.optimizer.clip_grad_norm,
        rate=lambda phases, step: phases.rate(
            settings.optimizer.lr, settings.optimizer.schedule, settings.train.steps, step
        ),
        tied=tied,
        group=shared.group,
        swaps=swaps,
        cuts=shared.cuts,
        features=features_of(settings, parts, stages, optimizers, tied, words, shared, rank, device),
    )
    if samples is not None and last and chosen.loss not in model.LOSSES:
        told = no_mean(chosen.loss, worker.loss, shapes.output, samples.targets(range(min(len(samples), 8))))
        worker.warnings = () if told is None else (told,)
    reads, counts = reads_data(manifest, plan.rank), None
    if samples is not None and settings.data.kind not in KINDS and reads:
        counts = count_of(model.loss(chosen.loss), chosen.loss, samples.targets([0]))
    if worker.batches is not None and counts is not None and (last or words is not None):
        worker.batches = counted(worker, worker.batches, counts)
    if chosen.compile:
        compile_stages(stages, parts, chosen.dtype, tell)
    worker.sums |= sums_of(worker, shapes)
    if settings.train.eval_every:
        kept = build_validation(settings.data, chosen, settings.train.seed) if reads else None
        where, lowered = place(settings.data, chosen, kept=True), LOWERED[chosen.parameters]
        worker.evaluation = build_evaluation(worker, settings.train, kept, counts=counts, lowered=lowered, where=where)
    for run in worker.phase_runs:
        if any(op.kind is Kind.REDO for op in run.plan.ops):
            run.ending = Ahead.of(worker, run)
    braid(worker)
    return worker


def features_of(
    settings: Settings,
    parts: Sequence[RankPlan],
    stages: Mapping[int, Stage],
    optimizers: Mapping[int, StageOptimizer],
    tied: Collection[str],
    words: Vocabulary | None,
    shared: Shared,
    rank: int,
    device: torch.device,
) -> Features:
    """What the plan asks for beside the pipeline, on a rank of the run."""
    partial = {s: shared.partial_of(stage) for s, stage in stages.items()}
    context = Context(parts, stages, optimizers, rank, device, shared.group, partial)
    given: list[Feature | None] = [
        Resting((part, turns_in(part, stages, settings)) for part in parts),
        words,
        averages_of(context.manifest, optimizers, tied, rank) if context.manifest.averages else None,
    ]
    return Features([*built(context), *(one for one in given if one is not None)])
