"""Builds the stages of a rank: their layers, split or compiled, with tied weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from zbc.runtime.core.bundle import Packing, Ways, adapt, is_adapted
from zbc.runtime.core.precision import AUTOCAST
from zbc.runtime.core.remembered import places
from zbc.runtime.core.split import LINEAR, SPLIT, GroupedLinear, Patch, SplitLinear, split_backward
from zbc.runtime.core.stage import Stage, StageLayer, Traits
from zbc.runtime.core.tensors import Laid, TensorSpec
from zbc.runtime.seeding import draws
from zbc.training.models.adapters import LoraLinear
from zbc.training.models.model import LayerPlan


def build_stage(
    index: int,
    plans: list[LayerPlan],
    takes: TensorSpec,
    gives: TensorSpec | None,
    *,
    traits: Mapping[str, Traits],
    ways: Callable[[str], Ways],
    seed: int,
    device: torch.device,
    dtype: str,
    splits: bool,
    recompute: bool,
    spares: int,
    flows: bool,
    passed: bool,
    compiles: bool = False,
    fused: bool = False,
    laid: Laid | None = None,
    came: Packing | None = None,
    goes: Packing | None = None,
    share: Callable[[str, nn.Module], None] = lambda name, layer: None,
) -> Stage:
    """Builds a stage's layers with their initial weights and moves them to `device`.

    `splits`: the plan has separate B and W for this stage; without it layers stay unpatched, with torch's own cost.
    `compiles`: layers that can be compiled are, when they first run. `fused`: linear layers accumulate weight gradients
    inside their products. `share` reduces a layer to this rank's shard.
    """
    layers, patches, low = list[StageLayer](), list[Patch](), AUTOCAST.get(dtype)
    for plan in plans:
        module = adapt(plan.name, plan.build(seed), ways(plan.name))
        share(plan.name, module)
        if any(t.device != device for t in (*module.parameters(), *module.buffers())):
            module.to(device)
        seen = traits[plan.name]
        seen = replace(seen, random=seen.random or draws(module))
        chosen = compiles and plan.compiles
        # Under autocast torch's linear layer saves a cast of its weight per microbatch, ours has one for all.
        own = spares or fused or (low is not None and not chosen)
        kinds = () if seen.whole else SPLIT if splits else LINEAR if own else (GroupedLinear,)
        found = split_backward(module, kinds, fused=fused)
        compiled = _compiled(module, found) if chosen else None
        layers.append(StageLayer(plan.name, module, seen, places(module, seen.remembers), compiled))
        patches += found
    autocast = nullcontext() if low is None else torch.autocast(device.type, low)
    casts = [patch for patch in patches if isinstance(patch, SplitLinear)]
    casts += [inner.frozen for layer in layers for inner in layer.module.modules() if isinstance(inner, LoraLinear)]
    how = (recompute, spares, flows, passed)
    stage = Stage(index, tuple(layers), takes, gives, seed, device, autocast, *how, casts, laid, came, goes)
    stage.fused = fused
    return stage


def _compiled(module: nn.Module, patches: Sequence[Patch]) -> Callable[[Tensor], Tensor] | None:
    """The compiled forward of a layer; None if its user compiled it, if it takes or returns several tensors, or if it
    is one of those that stay uncompiled."""
    from zbc.runtime.core.private import is_compiled
    from zbc.training.models.compiled import compile_layer  # takes a second or two to import

    if is_compiled(module) or is_adapted(module) or any(patch.module is module for patch in patches):
        return None
    return compile_layer(module, patches)


def share_ties(
    stages: Iterable[Stage],
    plans: Sequence[LayerPlan],
    seed: int,
    device: torch.device,
    share: Callable[[str, nn.Module], None] = lambda name, layer: None,
) -> None:
    """Makes layers that are tied to a parameter of another one use it, under its name.

    If the owner is on this rank they share one parameter, which belongs to the owner's stage; otherwise they get one
    copy with the same initial values, which belongs to the first of them. To be called with all stages of a rank,
    before their parameters are used elsewhere.
    """
    found = list(stages)
    owned = {name: p for stage in found for name, p in stage.parameters.items()}
    ties = {plan.name: plan.ties for plan in plans}
    for stage in found:
        for layer in stage.layers:
            for local, target in ties[layer.name].items():
                del stage.parameters[f"{layer.name}.{local}"]
                shared = owned.get(target)
                if shared is None:
                    stage.parameters[target] = owned[target] = shared = _initial(target, plans, seed, device, share)
                path, _, leaf = local.rpartition(".")
                setattr(layer.module.get_submodule(path), leaf, shared)


def _initial(
    name: str,
    plans: Sequence[LayerPlan],
    seed: int,
    device: torch.device,
    share: Callable[[str, nn.Module], None],
) -> nn.Parameter:
    """A parameter of a layer of another rank, with its initial values."""
    plan = next(plan for plan in plans if name.startswith(f"{plan.name}."))
    layer = plan.build(seed)
    share(plan.name, layer)
    found = layer.get_parameter(name.removeprefix(f"{plan.name}."))
    return nn.Parameter(found.detach().to(device), found.requires_grad)
