"""Builds a rank's `Worker` from its plan: stages, data, loss and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from zbc.ops import WORDS
from zbc.plan.directory import RankPlan
from zbc.plan.phases import Phases
from zbc.runtime.core.feature import Context, Features
from zbc.runtime.core.state import Worker
from zbc.runtime.features import built
from zbc.runtime.features.ahead import Ahead
from zbc.runtime.features.freezing import Resting
from zbc.runtime.features.lengths import Lengths
from zbc.runtime.features.units import braid
from zbc.runtime.seeding import Watch
from zbc.runtime.transports.transport import Transport
from zbc.training.building.context import Site
from zbc.training.building.data import batches_of, counted, groups_of
from zbc.training.building.optimizers import averages_of, optimizers_of, sums_of, tied_weights
from zbc.training.building.refusals import refuse
from zbc.training.building.runs import phase_run, turns_in
from zbc.training.building.shares import loss_of, share_out, shared_with, tables_of, vocabulary_of
from zbc.training.building.stages import build_stages, compile_stages
from zbc.training.data.counted import count_of, no_mean
from zbc.training.data.data import KINDS
from zbc.training.data.split import SplitBatches, Steps
from zbc.training.evaluate import build_evaluation
from zbc.training.models import model
from zbc.training.models.adapters import Frozen
from zbc.training.probing.contract import unscaled
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

    Raises E205 or E406 (the plan needs something that this runtime does not support), E501 to E511 (data, user code,
    shapes), E617 (no compiler).
    """
    site = Site([*ramp, plan], transport, device, plans, {} if looks is None else looks)
    manifest, settings, chosen = site.manifest, site.settings, site.settings.model
    phases, shapes = Phases.of(manifest) if site.dealer is None else site.dealer.phases, site.shapes
    shared, tables = shared_with(site), tables_of(site)
    own_loss = chosen.loss not in model.LOSSES
    watch = Watch(device, loss=own_loss) if own_loss or not chosen.builtin else None
    stages = build_stages(site, share_out(site, shared, tables), watch)
    refuse(site, stages)
    tied = tied_weights(site)
    optimizers = optimizers_of(site, stages, tied, shared)
    words = None if tables is None else vocabulary_of(site, tables, shared.group)
    optimizers |= {} if words is None else {WORDS: words.optimizer}
    context = Context(site.parts, stages, optimizers, site.rank, device, shared, tied)
    resting = Resting((part, turns_in(site, part, stages)) for part in site.parts)
    frozen = Frozen(stages, shapes.gradients) if settings.adapter.rank else None
    lengths = Lengths() if site.unequal else None
    features = [*built(context), lengths, resting, words, averages_of(site, optimizers, tied), frozen]
    worker = Worker(
        phase_runs=[phase_run(site, part) for part in site.parts],
        work=site.work,
        phases=phases,
        transport=transport,
        device=device,
        stages=stages,
        batches=batches_of(site, phases),
        loss=loss_of(chosen, shared.group, (layer.module for stage in stages.values() for layer in stage.layers)),
        watch=watch,
        optimizers=optimizers,
        clip=settings.optimizer.clip_grad_norm,
        rate=lambda phases, step: phases.rate(
            settings.optimizer.peak_lr, settings.optimizer.schedule, settings.train.steps, step
        ),
        features=Features(feature for feature in features if feature is not None),
    )
    if site.some_targets is not None:
        told = no_mean(chosen.loss, worker.loss, site.made_up(len(site.some_targets)), site.some_targets)
        worker.warnings = () if told is None else (told,)
    adds = [name for name, traits in shapes.traits.items() if traits.adds]
    if adds and site.last and (manifest.topology.batch > 1 or chosen.dtype == "float16"):
        worker.warnings += (" ".join(unscaled(adds)),)
    counts = None
    if isinstance(site.samples, Steps):
        worker.loss = site.samples.cut(worker.loss)
        if isinstance(worker.batches, SplitBatches):
            worker.batches.groups = partial(groups_of, worker)
    elif site.samples is not None and settings.data.kind not in KINDS and site.reads:
        counts = count_of(model.loss(chosen.loss), chosen.loss, site.samples.targets([0]))
    if worker.batches is not None and counts is not None and (site.last or words is not None):
        worker.batches = counted(worker, worker.batches, counts)
    if chosen.compile:
        compile_stages(stages, site.parts, chosen.dtype, tell)
    worker.sums |= sums_of(worker, shapes)
    if settings.train.eval_every:
        worker.evaluation = build_evaluation(worker, site, counts)
    for run in worker.phase_runs:
        if any(op.kind.row.closes == "ahead" for op in run.plan.ops):
            run.ending = Ahead.of(worker, run)
    braid(worker)
    return worker
