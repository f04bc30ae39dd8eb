"""torch.distributed.pipelining as a contestant of run.py: its general runtime with our order of compute ops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peer import write_order
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.utils.checkpoint import checkpoint

from zbc.plan.directory import StoredPlan
from zbc.runtime.core.optimizer import torch_optimizer
from zbc.training.building.context import Settings
from zbc.training.data.data import Batches, build_samples
from zbc.training.models import model


class Checkpointed(nn.Module):
    """A layer whose activations torch recomputes in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return y


def build(plan: StoredPlan, rank: int, folder: Path, *, recompute: bool) -> Callable[[int], None]:
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
