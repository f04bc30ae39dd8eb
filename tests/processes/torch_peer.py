"""torch.distributed.pipelining runs our order of compute ops, with its own transfers, stages and backward split."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import zbc
from tests.processes.gloo_ranks import pack
from zbc.plan.directory import StoredPlan
from zbc.training.building.context import Settings
from zbc.training.data.data import Batches, build_samples
from zbc.training.models import model


def train(rank: int, plan: StoredPlan, path: str | None) -> tuple[list[float], bytes]:
    """One step: the losses of all microbatches (on the rank that has them) and the gradients, packed.

    In the order of the plan by `zbc.torch_schedule`, or of a file in the dialect compute_comms.
    """
    manifest, settings = plan.manifest, Settings.of(plan.manifest)
    placement, m, seed = manifest.to_placement(), manifest.microbatches, settings.train.seed
    by_name = {layer.name: layer for layer in model.layers(settings.model, seed)}
    layers = {s: [(n, by_name[n].build(seed)) for n in manifest.layers[s]] for s in placement.stages_of(rank)}
    stages = [
        PipelineStage(nn.Sequential(*(module for _, module in part)), s, placement.stages, torch.device("cpu"))
        for s, part in layers.items()
    ]
    loss = model.loss(settings.model.loss)
    if path is None:
        schedule = zbc.torch_schedule(zbc.Plan("order", plan.program), stages, loss)
    else:
        schedule = _PipelineScheduleRuntime(stages, m, loss_fn=loss)
        ranks = dict(enumerate(placement.pipes[0]))
        schedule.stage_index_to_group_rank = ranks
        for stage in stages:
            stage.stage_index_to_group_rank = ranks
        schedule._load_csv(path, format="compute_comms")
    samples = build_samples(settings.data, settings.model, seed)
    batches = Batches(samples, seed=seed, microbatches=m, size=manifest.microbatch_size)
    inputs = (torch.cat([batches.inputs(0, mb) for mb in range(m)]),) if 0 in layers else ()
    losses: list[torch.Tensor] = []
    options = {}
    if placement.stages - 1 in layers:
        options = {"target": torch.cat([batches.targets(0, mb) for mb in range(m)]), "losses": losses}
    schedule.step(*inputs, **options, return_outputs=False)
    grads = {
        f"{name}.{local}": parameter.grad
        for part in layers.values()
        for name, module in part
        for local, parameter in module.named_parameters()
    }
    return [loss.item() for loss in losses], pack(grads)


def sharded(rank: int, plan: StoredPlan) -> bytes:
    """The gradients of one step of two replicas of the pipeline, packed: each stage in FSDP2 over its copies.

    Ranks 2r and 2r + 1 are the copies of rank r of the pipeline.
    """
    manifest, settings = plan.manifest, Settings.of(plan.manifest)
    placement, m, seed = manifest.to_placement(), manifest.microbatches, settings.train.seed
    mesh = init_device_mesh("cpu", (placement.ranks, 2), mesh_dim_names=("pp", "dp"))
    by_name = {layer.name: layer for layer in model.layers(settings.model, seed)}
    stages, parts = [], []
    for s in placement.stages_of(rank // 2):
        part = nn.Sequential(*(by_name[name].build(seed) for name in manifest.layers[s]))
        parts.append((manifest.layers[s], fully_shard(part, mesh=mesh["dp"])))
        stages.append(PipelineStage(part, s, placement.stages, torch.device("cpu"), group=mesh["pp"].get_group()))
    schedule = zbc.torch_schedule(zbc.Plan("order", plan.program), stages, model.loss(settings.model.loss))
    kinds = {action.computation_type.name for action in schedule.pipeline_order_with_comms[rank // 2]}
    assert {"UNSHARD", "RESHARD"} <= kinds
    samples = build_samples(settings.data, settings.model, seed)
    batches = Batches(samples, seed=seed, microbatches=2 * m, size=manifest.microbatch_size)
    mine = range(rank % 2 * m, rank % 2 * m + m)
    inputs = (torch.cat([batches.inputs(0, mb) for mb in mine]),) if stages[0].is_first else ()
    options = {}
    if any(stage.is_last for stage in stages):
        options = {"target": torch.cat([batches.targets(0, mb) for mb in mine]), "losses": []}
    schedule.step(*inputs, **options, return_outputs=False)
    grads = {
        f"{names[int(number)]}.{local}": parameter.grad.full_tensor()
        for names, part in parts
        for name, parameter in part.named_parameters()
        for number, _, local in (name.partition("."),)
    }
    return pack(grads)


def refused(rank: int, plan: StoredPlan, changes: dict[str, object]) -> str:
    """The error of `zbc.torch_schedule` for stages that are not the plan's."""
    placement = plan.manifest.to_placement()
    mine = changes.get("stages", {}).get(rank, placement.stages_of(rank))  # type: ignore[attr-defined]
    total = int(changes.get("total", placement.stages))  # type: ignore[call-overload]
    parts = [nn.Linear(2, 2) for _ in mine]
    if changes.get("ddp"):
        parts = [nn.parallel.DistributedDataParallel(part) for part in parts]
    stages = [PipelineStage(part, s, total, torch.device("cpu")) for part, s in zip(parts, mine, strict=True)]
    try:
        zbc.torch_schedule(zbc.Plan("order", plan.program), stages, nn.functional.mse_loss)
    except zbc.ZbcError as error:
        return f"{error.code} {'; '.join(error.details)}"
    return ""
