"""Stages of a rank from its plan: their layers built, split or compiled, and tied to those of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from zbc.runtime.core.bundle import Packing, Ways, adapt, is_adapted
from zbc.runtime.core.remembered import places
from zbc.runtime.core.split import SPLIT, Patch, SplitLinear, split_backward
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
    watched: bool = False,
    fused: bool = False,
    laid: Laid | None = None,
    came: Packing | None = None,
    goes: Packing | None = None,
    share: Callable[[str, nn.Module], None] = lambda name, layer: None,
) -> Stage:
    """Build a stage's layers with their initial weights and move them to `device`.

    `splits`: the plan runs B and W of this stage apart; without it they stay as they are and cost what they cost.
    `compiles`: layers that can be are compiled, when they first run. `watched`: any forward may turn out to draw random
    numbers, in whatever trials did not show. `fused`: linear layers add up weight gradients inside their products.
    `share` leaves this rank's part of a layer that several ranks share.
    """
    layers, patches, low = list[StageLayer](), list[Patch](), dtype == "bfloat16"
    for plan in plans:
        module = adapt(plan.name, plan.build(seed), ways(plan.name))
        share(plan.name, module)
        module.to(device)
        seen = traits[plan.name]
        seen = replace(seen, random=seen.random or draws(module))
        chosen = compiles and plan.compiles
        # Under autocast a linear layer of torch keeps a cast of its weight for every microbatch, ours one for all.
        own = spares or fused or (low and not chosen)
        kinds = () if seen.whole else SPLIT if splits else (nn.Linear,) if own else ()
        found = split_backward(module, kinds, fused=fused)
        compiled = _compiled(module, found) if chosen else None
        layers.append(StageLayer(plan.name, module, seen, places(module, seen.remembers), compiled))
        patches += found
    autocast = torch.autocast(device.type, torch.bfloat16) if low else nullcontext()
    casts = [patch for patch in patches if isinstance(patch, SplitLinear)]
    casts += [one.frozen for layer in layers for one in layer.module.modules() if isinstance(one, LoraLinear)]
    how = (recompute, spares, flows, passed)
    stage = Stage(index, tuple(layers), takes, gives, seed, device, autocast, *how, casts, laid, came, goes)
    stage.watched, stage.fused = watched, fused
    if watched and any(layer.traits.random for layer in layers):
        stage.seed_all()
    return stage


def _compiled(module: nn.Module, patches: Sequence[Patch]) -> Callable[[Tensor], Tensor] | None:
    """None where there is nothing to compile: a layer that its user compiled, that takes or returns several tensors, or
    that is one of those left outside."""
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
    """Let layers that are tied to a parameter of another one use it, under its name.

    Where the owner is on this rank they share one parameter, which belongs to the owner's stage; elsewhere they get one
    copy with the same initial values, which belongs to the first of them. To be called with all stages of a rank,
    before anything holds their parameters.
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
    """A parameter of a layer that another rank holds, with its initial values."""
    plan = next(plan for plan in plans if name.startswith(f"{plan.name}."))
    layer = plan.build(seed)
    share(plan.name, layer)
    found = layer.get_parameter(name.removeprefix(f"{plan.name}."))
    return nn.Parameter(found.detach().to(device), found.requires_grad)
