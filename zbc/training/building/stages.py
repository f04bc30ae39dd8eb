"""The stages of a rank: their layers, split or compiled, with tied weights; their input and output specs; their
optimizers, and the reductions of their gradients over replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.ir import Op
from zbc.job import spec
from zbc.ops import TIED, WORDS, experts_of
from zbc.plan.directory import Manifest, RankPlan, meeting
from zbc.plan.lateness import lateness
from zbc.runtime import features
from zbc.runtime.core.again import ATTENTION, CHEAP, GATHERED
from zbc.runtime.core.bucket import Bucket, GradientSum, absent
from zbc.runtime.core.bundle import adapt, is_adapted
from zbc.runtime.core.feature import Context
from zbc.runtime.core.muon import Whole
from zbc.runtime.core.optimizer import StageOptimizer, inside
from zbc.runtime.core.remembered import places
from zbc.runtime.core.split import LINEAR, SPLIT, GroupedLinear, Patch, SplitLinear, split_backward
from zbc.runtime.core.stage import Stage, StageLayer
from zbc.runtime.core.tensors import AUTOCAST
from zbc.runtime.seeding import Watch, draws
from zbc.training.building.context import Site, group_of
from zbc.training.models.adapters import WithAdapters
from zbc.training.probing.refusals import refuse_stage
from zbc.training.probing.shapes import Shapes

if TYPE_CHECKING:
    from zbc.runtime.features.tensor_parallel import Shared
    from zbc.runtime.features.words.vocabulary_state import Words

Share = Callable[[str, nn.Module], None]  # reduces a layer to this rank's shard


def build_stages(site: Site, share: Share, watch: Watch | None) -> dict[int, Stage]:
    manifest, settings = site.manifest, site.settings
    split = split_stages(site.parts)
    stages = {s: _build(site, s, share, splits=s in split) for s in site.mine}
    for s, stage in stages.items():
        stage.watch = None if settings.model.causal else watch
        if settings.model.graph:
            stage.reads = group_of(settings.model, manifest.layers[s][0])
            stage.inputs = _arguments(settings.model, manifest, s)
        for part in site.parts:
            refuse_stage(part.manifest, part.ops, stage)
    if manifest.vocabulary is None:  # otherwise tied weights are one table in each rank's vocabulary shard
        _share_ties(site, stages, share)
    return stages


def _build(site: Site, index: int, share: Share, *, splits: bool) -> Stage:
    """A stage, its layers with their initial weights on the rank's device.

    `splits`: the plan has separate B and W for this stage; without it layers stay unpatched, with torch's own cost.
    """
    settings, shapes, device = site.settings, site.shapes, site.device
    low, fused, spares = AUTOCAST.get(settings.model.dtype), settings.train.fused_gradients, _spares(site, index)
    layers, patches, names = list[StageLayer](), list[Patch](), site.manifest.layers[index]
    for plan in (plan for plan in site.layers if plan.name in names):
        module = adapt(plan.name, plan.build(settings.train.seed), site.ways(plan.name))
        share(plan.name, module)
        if any(t.device != device for t in (*module.parameters(), *module.buffers())):
            module.to(device)
        seen = shapes.traits[plan.name]
        seen = replace(seen, random=seen.random or draws(module))
        chosen = settings.model.compile and plan.compiles
        # Under autocast torch's linear layer saves a cast of its weight per microbatch, ours has one for all.
        own = spares or fused or (low is not None and not chosen)
        kinds = () if seen.whole else SPLIT if splits else LINEAR if own else (GroupedLinear,)
        found = split_backward(module, kinds, fused=fused)
        compiled = _compiled(module, found) if chosen else None
        layers.append(StageLayer(plan.name, module, seen, places(module, seen.remembers), compiled))
        patches += found
    casts = [patch for patch in patches if isinstance(patch, SplitLinear)]
    inside = (inner for layer in layers for inner in layer.module.modules())
    casts += [inner.frozen for inner in inside if isinstance(inner, WithAdapters)]
    return Stage(
        index,
        tuple(layers),
        **forms(site.manifest, index, shapes),
        seed=settings.train.seed,
        device=device,
        autocast=nullcontext() if low is None else torch.autocast(device.type, low),
        recompute=settings.memory.again(index, names),
        spares=spares,
        flows=shapes.flows[index],
        passed=shapes.passed[index],
        casts=casts,
        fused=fused,
    )


def _compiled(module: nn.Module, patches: Sequence[Patch]) -> Callable[[Tensor], Tensor] | None:
    """The forward of a layer, compiled when it first runs; None if its user compiled it, if it takes or returns several
    tensors, or if it is one of those that stay uncompiled."""
    from zbc.runtime.core.private import is_compiled
    from zbc.training.models.compiled import compile_layer  # takes a second or two to import

    if is_compiled(module) or is_adapted(module) or any(patch.module is module for patch in patches):
        return None
    return compile_layer(module, patches)


def _share_ties(site: Site, stages: Mapping[int, Stage], share: Share) -> None:
    """Makes layers that are tied to a parameter of another one use it, under its name.

    If the owner is on this rank they share one parameter, which belongs to the owner's stage; otherwise they get one
    copy with the same initial values, which belongs to the first of them. To be called before the parameters of the
    stages are used elsewhere.
    """
    owned = {name: p for stage in stages.values() for name, p in stage.parameters.items()}
    ties = {plan.name: plan.ties for plan in site.layers}
    for stage in stages.values():
        for layer in stage.layers:
            for local, target in ties[layer.name].items():
                del stage.parameters[f"{layer.name}.{local}"]
                shared = owned.get(target)
                if shared is None:
                    stage.parameters[target] = owned[target] = shared = _initial(site, target, share)
                path, _, leaf = local.rpartition(".")
                setattr(layer.module.get_submodule(path), leaf, shared)


def _initial(site: Site, name: str, share: Share) -> nn.Parameter:
    """A parameter of a layer of another rank, with its initial values."""
    plan = next(plan for plan in site.layers if name.startswith(f"{plan.name}."))
    layer = plan.build(site.settings.train.seed)
    share(plan.name, layer)
    found = layer.get_parameter(name.removeprefix(f"{plan.name}."))
    return nn.Parameter(found.detach().to(site.device), found.requires_grad)


def _spares(site: Site, stage: int) -> int:
    memory = site.settings.memory
    if memory.spares(stage):
        return ATTENTION if memory.attends_again else CHEAP
    names = site.manifest.layers[stage]
    return GATHERED if site.shares_sequence == "regather" and memory.again(stage, names) < len(names) else 0


def _arguments(chosen: spec.Model, manifest: Manifest, stage: int) -> tuple[int, ...]:
    """The stages that a stage of a graph reads, in the order of its first layer's arguments; () for one or none."""
    group, _, number = manifest.layers[stage][0].partition(".")
    if number != "0" or len(chosen.reads[group]) < 2:
        return ()
    home = {name.rpartition(".")[0]: s for s, names in enumerate(manifest.layers) for name in names}  # of its last one
    return tuple(home[source] for source in chosen.reads[group])


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


def tied_weights(site: Site) -> dict[str, tuple[int, ...]]:
    """The weights that stages share, each with its stages, the owner's first."""
    found: dict[str, tuple[int, ...]] = {}
    if not (site.manifest.tied or site.settings.adapter.rank) or site.manifest.vocabulary is not None:
        return found
    home = {name: stage for stage, names in enumerate(site.manifest.layers) for name in names}
    for plan in site.layers:
        for target in plan.ties.values():
            owner = next(home[other.name] for other in site.layers if target.startswith(f"{other.name}."))
            found[target] = (*dict.fromkeys((*found.get(target, (owner,)), home[plan.name])),)
    return found


def optimizers_of(
    site: Site, stages: Mapping[int, Stage], tied: Collection[str], shared: Shared, words: Words | None
) -> dict[int, StageOptimizer]:
    """The optimizers by owner: stages, the experts of each stage with some that are sharded, and `words`. Raises E505
    for experts in a stage that has none by the plan."""
    late = lateness(site.plan.ops) if site.manifest.flushless else {}
    wholes = {
        name: Whole(partial(cut.collect, group=group), cut.of)
        for name, cut in shared.cuts.items()
        if (group := shared.group) is not None
    }
    found = dict[int, StageOptimizer]()
    for s in site.mine:
        of = dict(zip((s, experts_of(s)), shared.apart(stages[s].parameters), strict=True))
        experts = {id(parameter) for parameter in of[experts_of(s)].values()}
        if (not site.manifest.ep or s in site.manifest.dense) and of.pop(experts_of(s)):
            raise ZbcError("E505", f"run: the plan has no experts in stage {s}, the model has", hint="plan again")
        for owner, own in of.items():
            trained = [cast for cast in stages[s].casts if cast.module.weight.requires_grad]
            casts = [cast for cast in trained if (id(cast.module.weight) in experts) == (owner != s)]
            found[owner] = features.optimizer_of(site, owner, own, casts, wholes, tied=tied, late=late.get(s, 0))
    return found if words is None else {**found, WORDS: words.optimizer(site)}


def sums_of(site: Site, stages: Mapping[int, Stage], context: Context) -> dict[Op, GradientSum]:
    """The gradient reduction of each REDUCE of the plan."""
    sizes = dict(zip(site.shapes.parameters, site.shapes.sizes, strict=True))
    gradients, tied, found = site.shapes.gradients, context.tied, dict[Op, GradientSum]()
    for op in dict.fromkeys(op for plan in site.parts for op in plan.ops if op.kind.sums):
        ranks = meeting(site.manifest, op, site.rank)
        if op.stage == TIED:
            mine = {n: p for s in stages.values() for n, p in s.parameters.items() if n in tied}
            summed = [
                mine[n] if n in mine else absent(_share_of(site, context.shared, sizes[n]), gradients[n], site.device)
                for n in sorted(tied)
                if n in gradients  # otherwise it is frozen, on every rank
            ]
            found[op] = Bucket(summed, ranks)
            continue
        optimizer = context.optimizers[op.stage]
        own = [p for name, p in optimizer.parameters.items() if name not in tied]
        found[op] = inside(optimizer, GradientSum) or Bucket(own, ranks)
    return found


def _share_of(site: Site, shared: Shared, size: int) -> int:
    """Elements of a tied weight on this rank: its rows of the embedding, the only weight that built-in models tie."""
    if shared.group is None:
        return size
    words = site.manifest.planning["model"]["vocab"]
    low, high = shared.group.bounds(words)
    return size // int(words) * (high - low)
