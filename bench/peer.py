"""torch.distributed.pipelining as a contestant of run.py: the same layers, its own loop and transfers.

W is deferred through `dw_builder`, torch's hook for layers that split their backward themselves: torch's own split
takes gradients from the autograd graph, in which sleeping does not occur.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

from zbc.ir import Program
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.slot import Slot, using
from zbc.training.building.context import Settings
from zbc.training.models import model

LETTERS = {"F": "F", "B": "I", "W": "W", "BW": "B"}  # ours -> torch's


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


def build(name: str, plan: StoredPlan, rank: int, folder: Path) -> Peer:
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
