"""Every boundary tensor and parameter name of a model, found without computing anything.

All layers are built and run once, in order, on torch's meta device. Every rank does this for the whole model, so all
know the same names in the same order and the same shapes, and a plan that disagrees is refused before training.

Under autocast a layer's output type depends on the ops inside. The meta device knows no autocast, so there the layers
run as fake tensors of the real device: boundaries get the type they would have without a cut, which keeps results
independent of it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zbc.errors import ZbcError
from zbc.plan import Boundary, Manifest
from zbc.runtime.model import LayerPlan, Owners, hollow
from zbc.runtime.precision import lower_precision
from zbc.runtime.probe import Traits, observe
from zbc.runtime.seeding import seeded


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor for one microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def maker(self, device: torch.device) -> Callable[[], Tensor]:
        """Makes tensors like this with whatever in them, in two thirds of the time that torch.empty takes."""
        like = torch.empty((), dtype=self.dtype, device=device).expand(self.shape)  # takes no room itself
        return functools.partial(torch.empty_like, like, memory_format=torch.contiguous_format)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Shapes:
    """What the whole model looks like: per stage its input; every parameter name of the model, sorted, and its size;
    per layer what its forward does besides returning a tensor."""

    inputs: tuple[TensorSpec, ...]
    parameters: tuple[str, ...]
    sizes: tuple[int, ...]
    traits: dict[str, Traits]


def derive(
    plans: Sequence[LayerPlan],
    first: TensorSpec,
    manifest: Manifest,
    *,
    autocast: torch.device | None,
    lowered: torch.dtype | None = None,
) -> Shapes:
    """Run all layers without data, from a model input like `first`; `autocast` is the device to autocast for, if any.

    `lowered` is the type parameters are turned into for forward, if it is not their own.

    Raises E505 if a layer cannot run or the plan's boundary tensors are others, E506 if its layers are, E508 if two
    layers share a parameter, E509 if a layer does what cannot be trained in a pipeline.
    """
    _check_layers(plans, manifest)
    sizes: dict[str, int] = {}
    behind = [first]  # behind[i]: the input of layer i
    known: dict[tuple[str, TensorSpec], tuple[dict[str, int], TensorSpec, Traits]] = {}
    traits: dict[str, Traits] = {}
    owners = Owners()
    for plan in plans:
        place = (plan.like or plan.name, behind[-1])
        if place not in known:
            module = plan.on_meta(owners)
            inner = {local: p.numel() for local, p in module.named_parameters()}
            lower_precision(module.parameters(), lowered)
            known[place] = inner, *_output(plan, module, behind[-1], autocast, lowered)
        inner, output, traits[plan.name] = known[place]
        sizes |= {f"{plan.name}.{local}": size for local, size in inner.items() if local not in plan.ties}
        behind.append(output)
    inputs, position = [first], 0
    for stage, layers in enumerate(manifest.layers[:-1]):
        position += len(layers)
        free = autocast is not None
        inputs.append(_agreed(stage, behind[position], manifest.boundaries[stage], free_dtype=free))
    names = sorted(sizes)
    return Shapes(tuple(inputs), tuple(names), tuple(sizes[name] for name in names), traits)


def _check_layers(plans: Sequence[LayerPlan], manifest: Manifest) -> None:
    planned = [name for names in manifest.layers for name in names]
    found = [plan.name for plan in plans]
    if planned != found:
        where = next((i for i, (a, b) in enumerate(zip(planned, found, strict=False)) if a != b), None)
        what = f"{len(planned)} layers" if where is None else f"{planned[where]!r} as layer {where}"
        have = f"{len(found)}" if where is None else f"{found[where]!r}"
        hint = "the model changed after planning: plan again"
        raise ZbcError("E506", f"run: the plan has {what}, the model has {have}", hint=hint)


def _output(
    plan: LayerPlan,
    module: nn.Module,
    takes: TensorSpec,
    autocast: torch.device | None,
    lowered: torch.dtype | None,
) -> tuple[TensorSpec, Traits]:
    """What a layer makes of its input; a layer that cannot run without values is built and run once on the CPU."""
    try:
        y, traits = _run(plan, module, takes, "meta") if autocast is None else _run_fake(plan, module, takes, autocast)
    except ZbcError:
        raise
    except Exception:
        try:
            with seeded(0), nullcontext() if autocast is None else torch.autocast("cpu", torch.bfloat16):
                built = copy.deepcopy(plan.build(0))  # it may be ready-made and in use
                if lowered is not None:
                    lower_precision(built.parameters(), lowered)
                y, traits = _run(plan, built, takes, "cpu")
        except ZbcError:
            raise
        except Exception as error:
            text = f"run: layer {plan.name} cannot take a tensor {takes}"
            details = [f"{type(error).__name__}: {error}"]
            hint = "each layer takes the one tensor that the layer before returns"
            raise ZbcError("E505", text, hint=hint, details=details) from error
    if not isinstance(y, Tensor):
        text = f"run: layer {plan.name} returned {type(y).__name__}, not one tensor"
        raise ZbcError("E505", text, hint="layers pass one tensor on; put what belongs together into one layer")
    return TensorSpec.of(y), traits


def _run(plan: LayerPlan, module: nn.Module, takes: TensorSpec, device: torch.device | str) -> tuple[object, Traits]:
    with torch.no_grad():
        return observe(plan.name, module, torch.zeros(takes.shape, dtype=takes.dtype, device=device), module)


def _run_fake(plan: LayerPlan, module: nn.Module, takes: TensorSpec, device: torch.device) -> tuple[object, Traits]:
    with FakeTensorMode(), torch.autocast(device.type, torch.bfloat16):
        return _run(plan, hollow(module, device), takes, device)


def _agreed(stage: int, derived: TensorSpec, planned: Boundary | None, *, free_dtype: bool) -> TensorSpec:
    """The tensor behind `stage`. Under autocast a plan may choose another floating-point type than the layers'."""
    if planned is None:
        return derived
    dtype = getattr(torch, planned.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ZbcError("E505", f"run: the plan's boundary behind stage {stage} has unknown dtype {planned.dtype!r}")
    told = TensorSpec(tuple(planned.shape), dtype)
    free = free_dtype and dtype.is_floating_point and derived.dtype.is_floating_point
    if told.shape != derived.shape or (told.dtype != derived.dtype and not free):
        text = f"run: the tensor behind stage {stage} is {derived}, the plan says {told}"
        raise ZbcError("E505", text, hint="the model or its data changed after planning: plan again")
    return told
