"""Evaluation between steps: the loss on validation samples, by the placement's forward-only program.

It does not change the training: modules are put into evaluation mode and back into their own modes, no graph is kept,
and all random draws of training have seeds of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job import userobject
from zbc.plan.directory import RankPlan
from zbc.plan.forward import forward_only
from zbc.runtime.core.bundle import ByName, shown
from zbc.runtime.core.feature import Pause
from zbc.runtime.core.progress import EvaluationResult
from zbc.runtime.core.remembered import left_alone
from zbc.runtime.core.state import BatchSource, PhaseRun, Work, Worker
from zbc.runtime.core.tensors import Batch, Loss
from zbc.runtime.core.validate import VectorLayout
from zbc.runtime.features.words.vocabulary_state import Meeting, Unit, Vocabulary, count_loss, settle
from zbc.runtime.handlers import HANDLERS
from zbc.runtime.seeding import seed_of
from zbc.training.building.context import Site
from zbc.training.checkpoint.folder import Best
from zbc.training.data.counted import counting
from zbc.training.data.data import Batches, all_samples, build_validation, place
from zbc.training.data.unequal import all_documents
from zbc.training.guest import Guest

KEY = "checkpoint.keep_best"
BATCHES = 100  # of an evaluation at most, unless train.eval_batches says otherwise


class Kept(NamedTuple):
    """A validation set; on ranks that read no data without batches, and of 0 microbatches and samples."""

    batches: BatchSource | None = None
    total: int = 0  # microbatches per evaluation, in all replicas
    samples: int = 0


@dataclass
class EvaluationRun(PhaseRun):
    """The PhaseRun of an evaluation: the forward-only program; `batches` of the set that is evaluated, None on ranks
    that read no data."""

    every: int = 0
    sets: dict[str, Kept] = field(default_factory=dict)  # by name; without names one
    results: list[EvaluationResult] = field(default_factory=list)
    counts: Callable[[Tensor], float] | None = None  # number of targets that count, if microbatches may differ in it
    weights: dict[int, float] = field(default_factory=dict)  # of the microbatches of a batch, on ranks with losses
    by: str | None = None  # the metric that says which evaluation is the best; None: the loss
    metric: ByName | None = None  # its function
    measured: dict[int, float] = field(default_factory=dict)  # what it returned, by microbatch

    def weigh(self, worker: Worker, number: int, target: Tensor, share: float) -> float:
        weight = share if self.counts is None else self.counts(target)
        self.weights[number] = self.weights.get(number, 0.0) + weight
        return weight

    def criterion(self, worker: Worker, number: int, loss: Loss) -> Loss:
        where = f"batch {worker.step + 1} of an evaluation, microbatch {number + 1}"
        return loss if self.metric is None else partial(self._measure, self.metric, loss, number, where)

    def _measure(self, metric: ByName, loss: Loss, number: int, where: str, output: Any, target: Batch) -> Tensor:
        found, where = loss(output, target), f"{where}: output {shown(output)}, target {shown(target)}"
        self.measured[number] = userobject.call(
            lambda: float(metric(output, target)), {}, self.by or "", KEY, where=where
        )
        return found

    def told(self, worker: Worker, unit: Unit, meeting: Meeting) -> None:
        """Counts a unit whose words all ranks share, on the rank that reports losses."""
        count_loss(worker, unit, meeting)


_Run = TypeVar("_Run", bound=EvaluationRun)


def build_evaluation(site: Site, layout: VectorLayout, counts: Callable[[Tensor], float] | None) -> EvaluationRun:
    """The evaluation of the job; `counts`: counts the targets that count. Floating-point inputs are cast to the type of
    the weights, as in training. Raises E504 if there are fewer validation samples than a step has samples."""
    settings = site.settings
    run = forward_run(EvaluationRun, site.plan, layout, site.rank, None)
    run.every, run.sets = settings.train.eval_every, {name: _kept(site, name) for name in settings.data.sets}
    run.counts = counts or (None if site.dealer is None else counting)
    if by := settings.checkpoint.metric:
        run.by, run.metric = by, userobject.call(partial(ByName, userobject.load(by, KEY)), {}, by, KEY)
    return run


def _kept(site: Site, name: str) -> Kept:
    manifest, settings, train = site.manifest, site.settings, site.settings.train
    every = all_samples if site.dealer is None else all_documents
    kept = build_validation(settings.data, settings.model, train.seed, every, name) if site.reads else None
    if kept is None:
        return Kept()
    per_step, size = manifest.topology.batch, manifest.microbatch_size
    if len(kept) < per_step * size:
        text = f"data: {len(kept)} samples are kept for evaluation, which takes {per_step * size} at once"
        hint = "set data.validation higher, or to a larger file"
        raise ZbcError("E504", text, where=place(settings.data, settings.model, kept=name), hint=hint)
    # A seed of its own, so that few batches are a random sample of all, the same one every time.
    seed = seed_of(train.seed, "evaluation")
    batches = Batches(kept, seed=seed, microbatches=per_step, size=size, lowered=settings.lowered, tokens=site.tokens)
    return Kept(batches, min(len(kept) // size, (train.eval_batches or BATCHES) * per_step), len(kept))


def forward_run(kind: type[_Run], plan: RankPlan, layout: VectorLayout, rank: int, batches: BatchSource | None) -> _Run:
    """The forward-only program of the placement of a plan, on data of its own, for a rank of the run."""
    manifest, placement = plan.manifest, plan.manifest.to_placement()
    shared = manifest.vocabulary is not None
    program = forward_only(placement, manifest.microbatches, manifest.slices, shared=shared)
    ops = program.ranks[plan.rank]
    script = [(HANDLERS[op.kind], op, placement.text(op)) for op in ops]
    first = manifest.topology.of(rank).dp * manifest.microbatches
    return kind(RankPlan(plan.rank, ops, manifest), layout, script, trains=False, batches=batches, first=first)


def forwards(worker: Worker, run: EvaluationRun, batches: int) -> Iterator[int]:
    """Runs one batch after the other, of equal shares of whole rows for all replicas; yields the number of each, while
    its losses and weights exist."""
    training, progress = (worker.phase_run, worker.work), worker.progress
    with evaluating(worker):
        worker.phase_run, worker.work = run, Work()
        for batch in range(batches):
            worker.step = batch
            for handler, op, text in run.script:
                progress.op, progress.since = f"{text} of evaluation batch {batch + 1}", time.monotonic()
                handler(worker, op)
            settle(worker, run.told)
            yield batch
            worker.losses.clear()
            run.weights.clear()
            worker.transport.finish_step(drain=True)
        worker.phase_run, worker.work = training


@dataclass
class Evaluations(Guest):
    """The evaluations of a run; `tell` receives their results. After `patience` of them in a row without a better one
    `stop` is given the reason to end the run, on rank 0."""

    worker: Worker
    tell: Callable[[EvaluationResult], None] | None = None
    best: Best | None = None
    patience: int | None = None
    stop: Callable[[str], None] = lambda reason: None
    _asked: bool = False

    def asks(self) -> bool:
        best = self.best
        if self._asked or self.patience is None or best is None or best.since < self.patience:
            return self._asked
        self._asked = True
        if self.worker.rank == 0:
            what = "lower loss" if best.by is None else f"better {best.by}"
            self.stop(f"train.patience = {self.patience}: no evaluation since step {best.step} has a {what}")
        return True

    def due(self, step: int, *, last: bool, stopping: bool = False) -> bool:
        evaluation = self.worker.evaluation
        return isinstance(evaluation, EvaluationRun) and ((step + 1) % evaluation.every == 0 or last)

    def after(self, step: int) -> None:
        found, best, run = evaluate(self.worker, step), self.best, self.worker.evaluation
        assert isinstance(run, EvaluationRun)
        value, larger = found.loss if found.metric is None else found.metric, getattr(run.metric, "larger_is_better", 0)
        if math.isfinite(value) and (best is None or (value > best.loss if larger else value < best.loss)):
            self.best = Best(step=step + 1, loss=value, by=run.by)
        elif best is not None:
            self.best = best.model_copy(update={"since": best.since + 1})
        if self.tell is not None:
            self.tell(found)


def evaluate(worker: Worker, step: int) -> EvaluationResult:
    """Evaluates the weights after step `step`; all ranks call this together. The last step has to be final."""
    run = worker.evaluation
    if not isinstance(run, EvaluationRun):
        raise ZbcError("E703", "run: this plan has no evaluation", hint="set train.eval_every and plan again")
    first, *others = (_evaluated(worker, run, name, step) for name in run.sets)
    result = replace(first, others=tuple(others))
    run.results.append(result)
    return result


def _evaluated(worker: Worker, run: EvaluationRun, name: str, step: int) -> EvaluationResult:
    began = time.monotonic()
    manifest, progress, given = worker.plan.manifest, worker.progress, run.sets[name]
    run.batches = given.batches
    reads = worker.copy == worker.share == 0 and worker.placement.rank_of(0) == worker.plan.rank
    count, kept = total(worker, *(given[1:] if reads else (0, 0)))
    per_batch = run.count * manifest.topology.dp
    batches = -(-count // per_batch)  # the last one may be filled up with earlier samples, which do not count
    losses = torch.zeros(3, batches * per_batch, dtype=torch.float64, device=worker.device)  # weighted: loss, 1, metric
    for batch in forwards(worker, run, batches):
        for mb, loss in () if worker.share else worker.losses.items():
            number = worker.number(mb)
            place = batch * per_batch + number
            losses[0, place], losses[1, place] = loss, run.weights[number]
            losses[2, place] = run.measured.get(number, 0.0) * run.weights[number]
    worker.all_reduce(losses, worker.everyone)
    worker.clock.read()  # drops the time, which is not part of a step
    progress.waiting = True
    totals = [*map(sum, losses[:, :count].tolist())]  # in order: the same for every partition
    progress.waiting, worker.step = False, step
    samples, (mean, measured) = count * manifest.microbatch_size, (totals[i] / (totals[1] or 1.0) for i in (0, 2))
    metric = None if run.metric is None else measured
    return EvaluationResult(step, mean, samples, time.monotonic() - began, kept, metric, name)


def total(worker: Worker, *numbers: int) -> list[int]:
    """The sum of each number over all ranks, which call this together."""
    found = torch.tensor(numbers, dtype=torch.float64, device=worker.device)
    worker.all_reduce(found, worker.everyone)
    return [int(number) for number in found.tolist()]


@contextmanager
def evaluating(worker: Worker) -> Iterator[None]:
    """Runs its body with all modules in evaluation mode; afterwards restores their modes and the buffers that forwards
    change even in that mode, and drops casts of weights."""
    modules: list[nn.Module] = [
        module for stage in worker.stages.values() for layer in stage.layers for module in layer.module.modules()
    ]
    before = [module.training for module in modules]
    for feature in worker.features:
        feature.pauses(worker, Pause(means=True, whole=True))
    try:
        for module in modules:
            module.training = False
        with left_alone([place for stage in worker.stages.values() for place in stage.buffers]):
            yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training
        shared = worker.features.find(Vocabulary)
        for cast in chain.from_iterable(stage.casts for stage in worker.stages.values()):
            cast.forget()
        if shared is not None:
            shared.output.cast.forget()
        for feature in worker.features:
            feature.resumes(worker)
