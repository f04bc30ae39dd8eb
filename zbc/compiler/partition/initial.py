"""The partition that a job requests, or that the search starts from: contiguous layers for each stage.

The embedding is on the first stage, the head on the last. If the job leaves the partition open, it is the one whose
ranks are most even in time (balance.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

from zbc.compiler.cost.estimate import Layer, layers, on_the_mean, selective, slow_of
from zbc.compiler.partition import megatron_layout
from zbc.compiler.partition.balance import even
from zbc.errors import ZbcError
from zbc.ir import Placement
from zbc.job.spec import Job

Stages = tuple[tuple[int, ...], ...]  # stage -> indices of its layers


def initial(job: Job, placement: Placement) -> Stages:
    """The layers of each stage. Raises E130 (too few layers, wrong sums, or no layout)."""
    stages, asked, table = placement.stages, job.partition, layers(job)
    if isinstance(asked.layers_per_stage, list):
        return _listed(job, stages, table, asked.layers_per_stage, "layers_per_stage")
    if asked.layout is not None:
        counts = megatron_layout.loads(asked.layout, job.where("partition", "layers_per_stage"))
        return _listed(job, stages, table, counts, "layout")
    blocks = len(_blocks(table))
    available = len(table) if is_open(job) else blocks
    if available < stages:
        ends = available - blocks
        has = f"{available}" + (f", {blocks} blocks, embedding and head" if ends else "")
        text = f"partition: {stages} stages need {stages} layers, the model has {has}"
        hint = f"use model.layers = {stages - ends} or more, or fewer ranks or chunks"
        raise ZbcError("E130", text, where=job.where("model", "layers"), hint=hint)
    if not is_open(job):
        return uniform(table, stages)
    points = even(times(job, on_the_mean(job, table), slow_of(job, placement)), placement)
    return tuple(tuple(range(a, b)) for a, b in pairwise(points))


def uniform(table: Sequence[Layer], stages: int) -> Stages:
    """Blocks spread evenly, at any cost; a stage may stay empty if there are fewer blocks than stages."""
    blocks = len(_blocks(table))
    return _with_ends([blocks // stages + (s < blocks % stages) for s in range(stages)], table)


def is_open(job: Job) -> bool:
    """Whether layers may move. Costs given per rank or stage do not depend on the layers, so these are only spread."""
    asked = job.partition
    return asked.layers_per_stage is None and (job.costs.f is None or job.costs.per == "layer")


def times(
    job: Job, table: Sequence[Layer], slow: Sequence[float], recompute: Collection[int] = (), *, split: bool = True
) -> list[list[float]]:
    """[stage][layer] ms of F and backward, in two ops or (`split` false) in one; with F twice in the stages that
    recompute by the job, and in those of `recompute`. `slow`: factor on the times of each stage."""

    def once(layer: Layer) -> float:
        return layer.f + (layer.b + layer.w if split else layer.bw)

    memory = job.memory
    kept, some = [once(layer) for layer in table], any(map(memory.spares, range(len(slow))))
    spared = [once(selective(layer, memory.attends_again)) for layer in table] if some else kept
    twice = [ms + layer.again for ms, layer in zip(kept, table, strict=True)]
    rows = [
        twice if s in recompute or memory.recomputes(s) else spared if memory.spares(s) else kept
        for s in range(len(slow))
    ]
    return [[k * ms for ms in row] if k != 1.0 else row for k, row in zip(slow, rows, strict=True)]


def _blocks(table: Sequence[Layer]) -> list[int]:
    return [i for i, layer in enumerate(table) if layer.name not in ("embed", "head")]


def _listed(job: Job, stages: int, table: Sequence[Layer], given: Sequence[int], key: str) -> Stages:
    where, blocks = job.where("partition", "layers_per_stage"), len(_blocks(table))
    if len(given) != stages:
        text = f"partition: {key} has {len(given)} {'entries' if key != 'layout' else 'stages'}"
        hint = f"give {stages} numbers" if key != "layout" else f"it needs {stages - 1} bars"
        raise ZbcError("E130", f"{text}, the schedule has {stages} stages", where=where, hint=hint)
    if sum(given) != blocks:
        hint = f"{key} = {list(given)} sums to {sum(given)}, model.layers is {blocks} ({job.where('model', 'layers')})"
        raise ZbcError("E130", "partition: layers do not add up", where=where, hint=hint)
    parts = _with_ends(given, table)
    for stage, part in enumerate(parts):
        if not part:
            text = f"partition: stage {stage} has no layers"
            raise ZbcError("E130", text, where=job.where("partition", "layers_per_stage", stage))
    return parts


def _with_ends(counts: Sequence[int], table: Sequence[Layer]) -> Stages:
    """Blocks by count; the embedding joins the first stage, the head the last."""
    blocks = _blocks(table)
    parts = [blocks[a:b] for a, b in pairwise([0, *accumulate(counts)])]
    parts[0] = [*range(blocks[0]), *parts[0]]
    parts[-1] = [*parts[-1], *range(blocks[-1] + 1, len(table))]
    return tuple(map(tuple, parts))
