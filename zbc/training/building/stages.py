"""Builds the stages of a rank: layers, input and output specs, compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from zbc.job import spec
from zbc.plan.directory import Manifest, RankPlan
from zbc.runtime.core.again import ATTENTION, CHEAP, GATHERED
from zbc.runtime.core.stage import Stage
from zbc.runtime.features.stage_slice import in_slices
from zbc.runtime.seeding import Watch
from zbc.training.building.context import Site, group_of
from zbc.training.models.building import build_stage, share_ties
from zbc.training.probing.refusals import refuse_stage
from zbc.training.probing.shapes import Shapes


def build_stages(site: Site, share: Callable[[str, nn.Module], None], watch: Watch | None) -> dict[int, Stage]:
    manifest, settings, shapes = site.manifest, site.settings, site.shapes
    by_name, split = {layer.name: layer for layer in site.layers}, split_stages(site.parts)
    stages = {}
    for s in site.mine:
        stages[s] = build_stage(
            s,
            [by_name[name] for name in manifest.layers[s]],
            **forms(manifest, s, shapes),
            traits=shapes.traits,
            ways=site.ways,
            seed=settings.train.seed,
            device=site.device,
            dtype=settings.model.dtype,
            splits=s in split,
            recompute=settings.memory.recomputes(s),
            spares=_spares(site, s),
            flows=shapes.flows[s],
            passed=shapes.passed[s],
            compiles=settings.model.compile,
            fused=settings.train.fused_gradients,
            share=share,
        )
        stages[s].watch = None if settings.model.builtin else watch
        if settings.model.graph:
            stages[s].reads = group_of(settings.model, manifest.layers[s][0])
            stages[s].inputs = _arguments(settings.model, manifest, s)
        for part in site.parts:
            refuse_stage(part.manifest, part.ops, stages[s])
    if manifest.vocabulary is None:  # otherwise tied weights are one table in each rank's vocabulary shard
        share_ties(stages.values(), site.layers, settings.train.seed, site.device, share)
    for s in site.mine if site.slices else ():
        in_slices(stages[s], site.slices, [forms(manifest, s, shapes) for shapes in site.by_slice])
    return stages


def _spares(site: Site, stage: int) -> int:
    memory = site.settings.memory
    if memory.spares(stage):
        return ATTENTION if memory.attends_again else CHEAP
    return GATHERED if site.shares_sequence == "regather" and not memory.recomputes(stage) else 0


def _arguments(chosen: spec.Model, manifest: Manifest, stage: int) -> tuple[int, ...]:
    """The stages that a stage of a graph reads, in the order of its first layer's arguments; () for one or none."""
    group, _, number = manifest.layers[stage][0].partition(".")
    if number != "0" or len(chosen.graph[group]) < 2:
        return ()
    home = {name: s for s, names in enumerate(manifest.layers) for name in names}
    return tuple(home[f"{source}.{chosen.groups[source] - 1}"] for source in chosen.graph[group])


def forms(manifest: Manifest, stage: int, shapes: Shapes) -> dict[str, Any]:
    """The input and output specs of a stage, their packings and layouts, as arguments of `Stage`."""
    last = not manifest.to_placement().sinks(stage)
    return {
        "takes": shapes.inputs[stage],
        "gives": shapes.output if last and manifest.vocabulary is not None else shapes.outputs[stage],
        "came": shapes.layouts[stage],
        "goes": shapes.goes[stage],
        "laid": shapes.laid[stage],
    }


def split_stages(parts: Sequence[RankPlan]) -> set[int]:
    """The stages with separate B and W ops."""
    return {op.stage for plan in parts for op in plan.ops if op.kind.splits}


def compile_stages(
    stages: Mapping[int, Stage], parts: Sequence[RankPlan], dtype: str, tell: Callable[[str], None]
) -> None:
    """Compiles the layers that are to be compiled, and checks their results."""
    from zbc.training.models.compiled import make_room  # takes a second or two to import
    from zbc.training.probing.proof import prove

    make_room(sum(len(stage.layers) for stage in stages.values()))
    split = split_stages(parts)
    for index, stage in sorted(stages.items()):
        prove(stage, dtype, splits=index in split, tell=tell)
