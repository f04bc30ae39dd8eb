"""The stages of a rank: their layers, split or compiled, with tied weights; their input and output specs; their
optimizers, and the reductions of their gradients over replicas. Refusals of layers, data and losses that are
incompatible with a plan's features, as far as a rank can tell."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zbc import excludes
from zbc.errors import ZbcError, raise_all
from zbc.ir import COPY, Op
from zbc.job import spec
from zbc.ops import TIED, WORDS, experts_of
from zbc.plan.directory import FROZEN, Manifest, RankPlan, meeting
from zbc.plan.lateness import lateness
from zbc.runtime import features
from zbc.runtime.core.again import ATTENTION, CHEAP, GATHERED
from zbc.runtime.core.bucket import Bucket, GradientSum, absent
from zbc.runtime.core.bundle import adapt, is_adapted
from zbc.runtime.core.feature import Context
from zbc.runtime.core.muon import Whole, is_called
from zbc.runtime.core.optimizer import StageOptimizer, inside
from zbc.runtime.core.remembered import places
from zbc.runtime.core.split import LINEAR, SPLIT, GroupedLinear, Patch, SplitLinear, is_a, split_backward
from zbc.runtime.core.stage import Stage, StageLayer
from zbc.runtime.core.tensors import AUTOCAST, Length
from zbc.runtime.seeding import Watch, draws
from zbc.training.building.context import Site, group_of
from zbc.training.data.data import KINDS
from zbc.training.data.split import Steps
from zbc.training.models import model
from zbc.training.models.adapters import WithAdapters
from zbc.training.probing.mixing import refuse_others, try_layers, try_loss, try_packed, try_padded, try_padding
from zbc.training.probing.probe import refuse_stage

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
    """A stage, its layers with their initial weights on the rank's device. `splits`: the plan has separate B and W for
    this stage; without it layers stay unpatched, with torch's own cost."""
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
        **shapes.stages[index]._asdict(),
        seed=settings.train.seed,
        device=device,
        autocast=nullcontext() if low is None else torch.autocast(device.type, low),
        recompute=settings.memory.again(index, names),
        spares=spares,
        casts=casts,
        fused=fused,
    )


def _compiled(module: nn.Module, patches: Sequence[Patch]) -> Callable[[Tensor], Tensor] | None:
    """The forward of a layer, compiled when it first runs; None if its user compiled it, if it takes or returns several
    tensors, or if it is one of those that stay uncompiled."""
    from zbc.training.models.compiled import compile_layer  # takes a second or two to import

    if is_a(module, "OptimizedModule") or is_adapted(module) or any(patch.module is module for patch in patches):
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


def refuse(site: Site, stages: Mapping[int, Stage]) -> None:
    """Raises E110, E406, E512 or E513 for features of the plan that this rank cannot run."""
    settings, data = site.settings, site.settings.data.kind
    name, loss, users = settings.model.loss, model.loss(settings.model.loss), not settings.model.builtin
    if name in model.LOSSES and site.shapes.ends is not None:
        text = f"run: the last layer returns {site.shapes.ends}, and model.loss = {name} takes one tensor"
        raise ZbcError("E505", text, hint='return it, or set model.loss = "package.module:function", which gets all')
    if (site.slices or site.manifest.balance is not None) and site.shapes.ends is not None:
        text = f"run: the last layer returns {site.shapes.ends}; slices and packed rows with several outputs"
        hint = 'return one tensor, or set schedule.slices = 1 and data.balance = "none"'
        raise ZbcError("E110", f"{text} are not written yet", hint=hint)
    if users and site.manifest.tokens and site.unequal:
        _refuse_unlike(site, stages)
    if users and isinstance(site.samples, Steps) and site.manifest.microbatch_size > 1:
        try_padded(site, stages.values())
    if site.slices:
        if site.samples is not None and data not in KINDS:
            some = range(min(len(site.samples), 8))
            read: Any = site.samples
            for what, found in (("inputs", read.inputs(some)), ("targets", read.targets(some))):
                refuse_others(data, what, found, site.ranks * site.slices[-1].length)
        if site.some_targets is not None:
            try_loss(name, loss, site.shapes.output, site.some_targets)
    if users and (site.slices or site.tokens is not None):
        try_layers(site, stages.values())
    if site.dealer is not None:
        if users and site.manifest.balance is not None:
            try_packed(site, stages.values())
        if site.some_targets is not None:
            try_padding(name, loss, site.shapes.output, site.some_targets, site.dealer.documents.padding)
    if settings.model.dtype == "fp8":
        text = 'run: model.dtype = "fp8" is for plans alone: nothing here multiplies in it yet'
        raise ZbcError("E110", text, hint='plan again with model.dtype = "bfloat16"')
    for name in (name for group in settings.optimizer.groups for name in group.names):
        if not any(is_called(known, name) for known in site.shapes.parameters):
            text = f"run: no parameter of the model is called {name}, which optimizer.groups names"
            near = ", ".join(site.shapes.parameters[:4])
            raise ZbcError("E110", text, hint=f"they are called as in {near}; * stands for any letters")
    _refuse_pairs(site)


def _refuse_unlike(site: Site, stages: Mapping[int, Stage]) -> None:
    """Raises E110 or E512 for layers of users that do not run on rows of another length."""
    shapes, wanted = site.shapes, site.settings.model.seq_len or 1
    several = next((name for name, both in shapes.packed.items() if any(both)), None)
    if several is not None:
        text = f"run: schedule.tokens and layers with several tensors between them, as at {several}, do not go together"
        raise ZbcError("E110", f"{text} yet", hint="let layers take and return one tensor, or drop schedule.tokens")
    length = Length(min(site.manifest.tokens), wanted)
    found = site.look(length.tokens)
    both = zip(shapes.stages, found.stages, strict=True)
    for stage, (whole, cut) in enumerate((one.takes, other.takes) for one, other in both):
        if len(whole.shape) < 2 or whole.of_rows(length) != cut:
            text = f"run: the input of stage {stage} is {whole} for {wanted} tokens, and {cut} for {length.tokens}"
            raise ZbcError("E512", text, hint="keep tokens in the second dimension, or drop schedule.tokens")
    if site.dealer is not None:
        try_packed(site, stages.values(), behind=True)


def _refuse_pairs(site: Site) -> None:
    """Raises E406 for a plan with incompatible features, which was not made by this zbc."""
    kinds, manifest = {op.kind for part in site.parts for op in part.ops}, site.manifest
    has = {
        "freeze": FROZEN in manifest.capabilities,
        "copies": len(manifest.placement[0]) > 1,
        "tied embeddings": manifest.tied,
        "slices": manifest.slices > 1,
        "shared vocabulary": manifest.vocabulary is not None,
        "post-validate": any(kind.row.closes == "ahead" for kind in kinds),
        "compile": site.settings.model.compile,
        "offload": not kinds.isdisjoint(COPY),
    }
    raise_all(excludes.of_plan({name for name, there in has.items() if there}))
