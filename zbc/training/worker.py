"""Builds a rank's `Worker` from its plan: stages, data, loss and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zbc.plan.directory import RankPlan
from zbc.plan.phases import Phases
from zbc.runtime import features
from zbc.runtime.core.feature import Context
from zbc.runtime.core.state import PhaseRun, Worker
from zbc.runtime.core.validate import VectorLayout
from zbc.runtime.handlers import HANDLERS
from zbc.runtime.seeding import Watch
from zbc.runtime.transports.transport import Transport
from zbc.training.building.context import Site, batches_of, count_of_targets, warnings_of
from zbc.training.building.stages import (
    build_stages,
    compile_stages,
    optimizers_of,
    refuse,
    sums_of,
    tied_weights,
)
from zbc.training.data.split import Steps
from zbc.training.evaluate import build_evaluation
from zbc.training.models import model
from zbc.training.models.adapters import Frozen
from zbc.training.models.model import loss_of
from zbc.training.models.sharding import share_out
from zbc.training.models.shared_words import tables_of
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
    """Builds the worker of one rank, on `device`; `ramp` are the plans of the first phases of its training.

    `plans` are the layers, if they are not those of the plan's model; `tell` is called with texts before long tasks.
    `looks` caches the shapes of the layers, by the rows of a slice, for other ranks of the plan in this process.

    Raises E205 or E406 (the plan needs something that this runtime does not support), E501 to E509 (data, user code,
    shapes), E602 (no compiler).
    """
    site = Site([*ramp, plan], transport, device, plans, {} if looks is None else looks)
    manifest, settings, chosen = site.manifest, site.settings, site.settings.model
    phases, shapes = Phases.of(manifest) if site.dealer is None else site.dealer.phases, site.shapes
    site.work.follow(phases)
    shared, tables = features.groups_of(site), tables_of(site)
    own_loss = chosen.loss not in model.LOSSES
    watch = Watch(device, loss=own_loss) if own_loss or not chosen.causal else None
    stages = build_stages(site, share_out(site, shared, tables, site.tokens and site.tokens.rows), watch)
    refuse(site, stages)
    tied = tied_weights(site)
    specs = {s: [of.stages[s] for of in site.by_slice] for s in site.mine}
    ends = [of.stages[0].takes for of in site.by_slice], [of.output for of in site.by_slice]
    words = None if tables is None else tables.words(site, site.layers, *ends)
    optimizers = optimizers_of(site, stages, tied, shared, words)
    made = stages, optimizers, site.rank, device, shared, tied, site.slices, specs, words, site.unequal
    context = Context(site.parts, *made)
    runs = [phase_run(site, part) for part in site.parts]
    count = count_of_targets(site)
    loss = loss_of(chosen, shared.group, (layer.module for stage in stages.values() for layer in stage.layers))
    warnings = warnings_of(site, loss)
    if isinstance(site.samples, Steps):
        loss = site.samples.cut(loss)
    if chosen.compile:
        compile_stages(stages, site.parts, chosen.dtype, tell)
    frozen = Frozen(stages, shapes.gradients) if settings.adapter.rank else None
    evaluates = settings.train.eval_every
    return Worker(
        phase_runs=runs,
        work=site.work,
        phases=phases,
        transport=transport,
        device=device,
        stages=stages,
        batches=batches_of(site, phases, runs, count),
        loss=loss,
        watch=watch,
        optimizers=optimizers,
        sums=sums_of(site, stages, context),
        clip=settings.optimizer.clip_grad_norm,
        rate=lambda phases, step: phases.rate(
            settings.optimizer.peak_lr, settings.optimizer.schedule, settings.train.steps, step
        ),
        features=features.built(context, (frozen,)),
        hidden=shared.hidden,
        evaluation=build_evaluation(site, runs[-1].layout, count) if evaluates else None,
        warnings=warnings,
    )


def phase_run(site: Site, plan: RankPlan) -> PhaseRun:
    manifest, run, shapes = plan.manifest, plan.manifest.topology, site.shapes
    placement, unequal = manifest.to_placement(), site.manifest.balance
    batch = run.batch if unequal is None else run.dp * unequal.most
    apart = run.dp // run.span if manifest.averages else 1
    chosen = site.settings.model
    routed = (chosen.experts or 0) * chosen.layers
    layout = VectorLayout(
        shapes.parameters, batch, run.world, shapes.sizes, apart, site.dealer is not None, routed, site.ranks
    )
    return PhaseRun(plan, layout, [(HANDLERS[op.kind], op, placement.text(op)) for op in plan.ops])
