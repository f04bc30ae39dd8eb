"""Kinds of equal layers of a model, of which only one has to be measured."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zbc.training.models.model import LayerPlan

_DEEP = 4  # levels of nested objects that are compared
_SEARCHED = 120  # maximum number of layers for the search of pieces to leave out


def kinds(plans: Sequence[LayerPlan], inputs: Sequence[Hashable]) -> list[str]:
    """The kind of each layer; `inputs` are their input specs.

    Layers are of one kind if their modules have the same structure, sizes and settings, and the same input. The first
    layer, whose input needs no gradient, and the last, which ends in the loss, are kinds of their own. A kind is named
    by its layer in a built-in family (all blocks are "block"), otherwise by the class of its module.
    """
    found: dict[Hashable, str] = {}
    result = []
    for index, (plan, takes) in enumerate(zip(plans, inputs, strict=True)):
        key: Hashable
        if plan.like is not None or (plan.after is None and not plan.name.startswith("layers.")):
            key, name = (plan.like or plan.name, takes), plan.like or plan.name
        else:
            module = plan.on_meta()
            place = "+data" * (index == 0 or plan.after == ()) + "+loss" * (index == len(plans) - 1)
            key, name = (describe(module), takes, place), type(module).__name__ + place
        if key not in found:
            taken = sum(other.partition("-")[0] == name for other in found.values())
            found[key] = f"{name}-{taken + 1}" if taken else name
        result.append(found[key])
    return result


def describe(module: nn.Module) -> Hashable:
    """A key that is equal for modules with the same computation: everything except the values of tensors, and what the
    runtime has put in place of a forward, which has the module."""
    parameters = tuple((name, _tensor(p), p.requires_grad) for name, p in module._parameters.items() if p is not None)
    buffers = tuple((name, _tensor(b)) for name, b in module._buffers.items() if b is not None)
    ours = {key for key, value in vars(module).items() if type(value).__module__.startswith("zbc.runtime.")}
    own = {key: value for key, value in vars(module).items() if not key.startswith("_") and key not in ours}
    inner = tuple((name, None if child is None else describe(child)) for name, child in module._modules.items())
    return _name(type(module)), parameters, buffers, _setting(own, _DEEP), inner


def _setting(value: Any, depth: int) -> Hashable:
    """A setting of a module as a hashable value to compare."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value).__name__, value
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return str(value)
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, nn.Module):
        return describe(value)
    if depth == 0:
        return _name(type(value))
    if isinstance(value, Mapping):
        return tuple(sorted((repr(key), _setting(item, depth - 1)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return tuple(_setting(item, depth - 1) for item in value)
    if isinstance(value, functools.partial):
        return _setting((value.func, value.args, dict(value.keywords)), depth - 1)
    if isinstance(value, types.FunctionType):
        return _function(value, depth)
    if callable(value) and hasattr(value, "__qualname__"):
        return _name(value)
    return _name(type(value)), _setting(getattr(value, "__dict__", {}), depth - 1)


def _function(value: Callable[..., Any], depth: int) -> Hashable:
    """A function as its name and the values of its closure."""
    cells = getattr(value, "__closure__", None) or ()
    return _name(value), tuple(_setting(cell.cell_contents, depth - 1) for cell in cells)


def _tensor(value: Tensor) -> Hashable:
    return tuple(value.shape), str(value.dtype)


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def chain(order: Sequence[str], inputs: Sequence[Hashable]) -> list[int]:
    """A short chain of layers in which every kind occurs and each layer accepts the output of the previous one.

    `order` is the kind of each layer, `inputs` its input. The first and the last layer stay. A piece of the model can
    be left out if the layer after it has the same input as the piece, and its kinds occur elsewhere.
    """
    # Of a run of one kind, one layer is enough: its output has the spec of its input.
    kept = [i for i, kind in enumerate(order) if i == 0 or kind != order[i - 1]]
    while len(kept) <= _SEARCHED:
        cut = next(_spare(kept, order, inputs), None)
        if cut is None:
            return kept
        kept = kept[: cut[0]] + kept[cut[1] :]
    return kept


def _spare(kept: list[int], order: Sequence[str], inputs: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Pieces (from, to) of `kept` that can be left out, the longest first."""
    count = len(kept)
    for length in range(count - 2, 0, -1):
        for start in range(1, count - length):
            end = start + length
            if inputs[kept[start]] != inputs[kept[end]]:
                continue
            rest = {order[i] for i in kept[:start] + kept[end:]}
            if rest.issuperset(order[i] for i in kept[start:end]):
                yield start, end
