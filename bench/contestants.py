"""Contestants of run.py and overhead.py on each rank: our runtime, and torch.distributed.pipelining in two forms.

`torch_schedule` runs the same layers in torch's own loop and transfers. W is deferred through `dw_builder`, torch's
hook for layers that split their backward themselves: torch's own split takes gradients from the autograd graph, in
which sleeping does not occur. `torch_training` is torch's general runtime with our order of compute ops, the norm and
the optimizer.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import PATIENCE
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from zbc.ir import Program
from zbc.plan.directory import RankPlan, StoredPlan
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.optimizer import torch_optimizer
from zbc.runtime.core.progress import StepResult
from zbc.runtime.core.slot import Slot, using
from zbc.runtime.core.state import Worker
from zbc.runtime.transports.network import Network
from zbc.training.building.context import Settings
from zbc.training.data.data import Batches, build_samples
from zbc.training.models import model
from zbc.training.worker import build_worker

LETTERS = {"F": "F", "B": "I", "W": "W", "BW": "B"}  # ours -> torch's


class Ours:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def step(self, step: int) -> StepResult | None:
        return run_step(self.worker, step)


def zbc(plan: StoredPlan, rank: int) -> Ours:
    cpu, seat = torch.device("cpu"), plan.manifest.topology.of(rank).pp
    network = Network(plan.manifest, cpu, PATIENCE)
    ramp = [RankPlan(seat, one.program.ranks[seat], one.manifest) for one in plan.ramp]
    return Ours(build_worker(RankPlan(seat, plan.program.ranks[seat], plan.manifest), network, cpu, ramp))


class Deferred(Slot):
    """Collects a stage's weight-gradient work; torch asks for it right after the backward that left it."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []

    def defer(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def take(self) -> Callable[[], None]:
        work, self.work = self.work, []

        def run() -> None:
            with torch.no_grad():
                for part in work:
                    part()

        return run


class StageModule(nn.Module):
    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.slot = Deferred()

    def forward(self, x: Tensor) -> Tensor:
        with using(self.slot):
            y: Tensor = self.layers(x)
            return y


class Peer:
    """One rank of a torch pipeline; `step` runs one training step without an optimizer."""

    def __init__(self, schedule: Any, modules: dict[int, StageModule], microbatches: int) -> None:
        self._schedule, self._modules, self._microbatches = schedule, modules, microbatches
        last = schedule._num_stages - 1
        self._first, self._last = 0 in modules, last in modules

    def step(self, step: int) -> None:
        for module in self._modules.values():
            module.zero_grad()
        numbers = torch.zeros(self._microbatches, 1)
        options = {"target": numbers} if self._last else {}
        self._schedule.step(*((numbers,) if self._first else ()), **options, return_outputs=False)


def torch_schedule(name: str, plan: StoredPlan, rank: int, folder: Path) -> Peer:
    """torch's schedule `name`, or its general runtime with our order, on one rank; `folder` is for its files."""
    program = plan.program
    placement, m = program.placement, program.microbatches
    settings = Settings.of(plan.manifest)
    layers = {layer.name: layer for layer in model.layers(settings.model, settings.train.seed)}
    modules = {}
    for s in placement.stages_of(rank):
        modules[s] = StageModule(layers[layer].build(settings.train.seed) for layer in plan.manifest.layers[s])
    cpu = torch.device("cpu")
    stages: list[Any] = [
        PipelineStage(module, s, placement.stages, cpu, dw_builder=module.slot.take) for s, module in modules.items()
    ]
    if name == "Schedule1F1B":
        return Peer(Schedule1F1B(stages[0], m, loss_fn=mse_loss), modules, m)
    if name == "ScheduleZBVZeroBubble":
        return Peer(ScheduleZBVZeroBubble(stages, m, loss_fn=mse_loss), modules, m)
    schedule = _PipelineScheduleRuntime(stages, m, loss_fn=mse_loss)  # type: ignore[no-untyped-call]
    path = folder / f"order-{rank}.csv"
    write_order(program, path)
    schedule._load_csv(str(path), format="compute_only")
    return Peer(schedule, modules, m)


def write_order(program: Program, path: Path) -> None:
    """The compute ops of every rank as torch's CSV: `1F0` is F of stage 1, microbatch 0."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        for ops in program.ranks:
            writer.writerow(f"{op.stage}{LETTERS[op.kind.value]}{op.mb}" for op in ops if op.kind.computes)


class Checkpointed(nn.Module):
    """A layer whose activations torch recomputes in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return y


def torch_training(plan: StoredPlan, rank: int, folder: Path, *, recompute: bool) -> Callable[[int], None]:
    """A function that trains one step on this rank, then computes the norm, clips, and runs the optimizer."""
    manifest, settings = plan.manifest, Settings.of(plan.manifest)
    placement, m, seed = manifest.to_placement(), manifest.microbatches, settings.train.seed
    by_name = {layer.name: layer for layer in model.layers(settings.model, seed)}
    modules = {}
    for s in placement.stages_of(rank):
        layers = [by_name[name].build(seed) for name in manifest.layers[s]]
        modules[s] = nn.Sequential(*(Checkpointed(layer) if recompute else layer for layer in layers))
    stages: list[Any] = [PipelineStage(part, s, placement.stages, torch.device("cpu")) for s, part in modules.items()]
    schedule = _PipelineScheduleRuntime(stages, m, loss_fn=model.loss(settings.model.loss))  # type: ignore[no-untyped-call]
    ranks = dict(enumerate(placement.pipes[0]))
    schedule.stage_index_to_group_rank = ranks
    for stage in stages:
        stage.stage_index_to_group_rank = ranks
    path = folder / f"order-{rank}.csv"
    write_order(plan.program, path)
    schedule._load_csv(str(path), format="compute_only")
    samples = build_samples(settings.data, settings.model, seed)
    batches = Batches(samples, seed=seed, microbatches=m, size=manifest.microbatch_size)
    first, last = 0 in modules, placement.stages - 1 in modules
    parameters = [p for part in modules.values() for p in part.parameters()]
    named = {name: p for s, part in modules.items() for name, p in part.named_parameters(prefix=f"{s}")}
    optimizer, largest = torch_optimizer(settings.optimizer, named), settings.optimizer.clip_grad_norm

    def run(step: int) -> None:
        inputs = (torch.cat([batches.inputs(step, mb) for mb in range(m)]),) if first else ()
        options = {"target": torch.cat([batches.targets(step, mb) for mb in range(m)])} if last else {}
        schedule.step(*inputs, **options, return_outputs=False)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) ** 2
        dist.all_reduce(norm)
        if largest is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm.sqrt())
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return run
