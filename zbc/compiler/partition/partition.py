"""Layers to stages: contiguous, embedding on the first stage and head on the last, balanced on real costs.

What has to be even is the work of a rank over all its stages; see balance.py. Where the job leaves the cut open, this
is the one that the search for better ones starts from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Literal

from zbc.compiler.cost.estimate import Layer
from zbc.compiler.partition import megatron_layout
from zbc.compiler.partition.balance import even
from zbc.errors import ZbcError
from zbc.ir import Placement
from zbc.job.spec import Job

Stages = tuple[tuple[int, ...], ...]  # stage -> indices of its layers


def partition(job: Job, placement: Placement, table: Sequence[Layer]) -> Stages:
    """Cut `table` for the stages of `placement` as `[partition]` asks. Raises E130 (too few layers) or E131 (sums)."""
    stages = placement.stages
    blocks = [i for i, layer in enumerate(table) if layer.name not in ("embed", "head")]
    given = job.partition.layers_per_stage
    if given is not None:
        return _listed(job, stages, table, blocks, given)
    if job.partition.layout is not None:
        counts = megatron_layout.loads(job.partition.layout, job.where("partition", "layout"))
        return _listed(job, stages, table, blocks, list(counts), key="layout")
    available = len(table) if is_open(job) else len(blocks)
    if available < stages:
        ends = available - len(blocks)
        has = f"{available}" + (f", {len(blocks)} blocks, embedding and head" if ends else "")
        text = f"partition: {stages} stages need {stages} layers, the model has {has}"
        hint = f"use model.layers = {stages - ends} or more, or fewer ranks or chunks"
        raise ZbcError("E130", text, where=job.where("model", "layers"), hint=hint)
    if not is_open(job):
        return uniform(table, stages)
    again = [s for s in range(stages) if job.memory.of(s) == "recompute"]
    cuts = even(weights(table, stages, again), placement)
    return tuple(tuple(range(a, b)) for a, b in pairwise(cuts))


def uniform(table: Sequence[Layer], stages: int) -> Stages:
    """Blocks spread evenly, whatever they cost; a stage may stay empty if there are fewer blocks than stages."""
    blocks = [i for i, layer in enumerate(table) if layer.name not in ("embed", "head")]
    return _with_ends(_counts(len(blocks), stages), table, blocks)


def is_open(job: Job) -> bool:
    """Whether the job leaves the cut to its costs.

    Costs given per rank or stage say what a stage costs whatever it holds, so layers only have to be spread.
    """
    asked = job.partition
    given = asked.layers_per_stage is not None or asked.layout is not None or asked.mode == "uniform"
    return not given and (job.costs.f is None or job.costs.per == "layer")


def weights(table: Sequence[Layer], stages: int, again: Collection[int], *, split: bool = True) -> list[list[float]]:
    """[stage][layer] ms of F and backward, in two ops or (`split` false) in one.

    A stage of `again` runs each forward once more, so where a layer lies decides what it costs.
    """
    plain = [layer.f + (layer.b + layer.w if split else layer.backward) for layer in table]
    twice = [ms + layer.again for ms, layer in zip(plain, table, strict=True)]
    return [twice if s in again else plain for s in range(stages)]


def _listed(
    job: Job,
    stages: int,
    table: Sequence[Layer],
    blocks: list[int],
    given: list[int],
    key: Literal["layers_per_stage", "layout"] = "layers_per_stage",
) -> Stages:
    where = job.where("partition", key)
    if len(given) != stages:
        text = f"partition: {key} has {len(given)} {'entries' if key != 'layout' else 'stages'}"
        hint = f"give {stages} numbers" if key != "layout" else f"it needs {stages - 1} bars"
        raise ZbcError("E131", f"{text}, the schedule has {stages} stages", where=where, hint=hint)
    if sum(given) != len(blocks):
        text = "partition: layers do not add up"
        hint = f"{key} = {given} sums to {sum(given)}, model.layers is {len(blocks)}"
        raise ZbcError("E131", text, where=where, hint=f"{hint} ({job.where('model', 'layers')})")
    parts = _with_ends(given, table, blocks)
    for stage, part in enumerate(parts):
        if not part:
            text = f"partition: stage {stage} has no layers"
            raise ZbcError("E131", text, where=job.where("partition", key, stage))
    return parts


def _counts(layers: int, stages: int) -> list[int]:
    return [layers // stages + (s < layers % stages) for s in range(stages)]


def _with_ends(counts: Sequence[int], table: Sequence[Layer], blocks: list[int]) -> Stages:
    """Blocks by count; the embedding joins the first stage, the head the last."""
    cuts = [0, *accumulate(counts)]
    parts = [blocks[a:b] for a, b in pairwise(cuts)]
    parts[0] = [*range(blocks[0]), *parts[0]]
    parts[-1] = [*parts[-1], *range(blocks[-1] + 1, len(table))]
    return tuple(map(tuple, parts))
