"""What a layer keeps in plain attributes from one forward to the next, where nobody can put it back.

Buffers that a forward changes are renewed for every microbatch (runtime/core/remembered.py). A counter, or the last
input kept in an attribute, is not: its output is that of one process only where each forward runs once, in order. Nor
can anybody keep apart what several microbatches leave in one attribute between their forward and their backward. Most
attributes that change do no harm, such as attention weights kept to be looked at. So a layer that changes some in each
forward, or that makes buffers in its first, runs with made-up numbers: forward x, forward other, backward of x.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from zbc.job.userobject import FAILURES
from zbc.runtime.core.bundle import example_for
from zbc.runtime.core.private import tree_leaves
from zbc.runtime.core.remembered import as_before, places, present
from zbc.runtime.core.tensors import TensorSpec
from zbc.runtime.seeding import seeded

_OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}


def attributes(module: nn.Module) -> dict[str, list[Any]]:
    """What stands in the plain attributes of a layer and of the modules inside it; for `differing`."""
    return {
        f"{path}.{key}" if path else key: [
            (leaf, leaf._version if isinstance(leaf, Tensor) else 0) for leaf in tree_leaves(value)
        ]
        for path, inner in module.named_modules()
        for key, value in vars(inner).items()
        if key not in _OF_TORCH
    }


def differing(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> tuple[str, ...]:
    """The attributes that changed or are new."""
    return tuple(key for key, value in after.items() if key not in before or not _alike(before[key], value))


def _alike(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        at == then and (a is b or (type(a) is type(b) and isinstance(a, int | float | complex | str) and a == b))
        for (a, at), (b, then) in zip(one, other, strict=True)
    )


def carried(module: nn.Module, takes: TensorSpec) -> tuple[bool, bool]:
    """Whether the output of a layer follows the forwards before it, and whether a forward changes the output or the
    gradients of the one before.

    `module` runs on the CPU and is used up. One that cannot run there is said to do neither.
    """
    x, other = torch.zeros(takes.shape, dtype=takes.dtype), torch.ones(takes.shape, dtype=takes.dtype)
    if x.is_floating_point() or x.is_complex():  # whole numbers stay words of any vocabulary
        with seeded(0):
            several = [example_for(module, x.device) for _ in range(2)]
            x, other = (torch.randn_like(x) if one is None else one for one in several)
    try:
        first = _there_and_back(copy.deepcopy(module), x, None)
        _warm(module, other)
        alone = _there_and_back(copy.deepcopy(module), x, None)
    except FAILURES:
        return False, False
    try:
        apart = _there_and_back(module, x, other)
        again = _there_and_back(module, x, None)
    except FAILURES:  # autograd noticed that what it kept was overwritten
        return False, True
    return not (_same(alone[0], first[0]) and _same(alone[0], again[0])), not all(map(_same, alone, apart))


def _warm(module: nn.Module, x: Tensor) -> None:
    """A first forward, which makes what only that one makes; it leaves no graph, which could not be copied."""
    buffers = places(module, [name for name, _ in module.named_buffers()])
    with as_before(buffers, present(buffers)), seeded(2), torch.no_grad():
        module(x.clone())


def _there_and_back(module: nn.Module, x: Tensor, between: Tensor | None) -> list[Tensor | None]:
    """The output of a layer and the gradients of its input and parameters; the forward of `between` comes in between.

    Every forward finds the same buffers.
    """
    buffers = places(module, [name for name, _ in module.named_buffers()])
    before = present(buffers)

    def forward(x: Tensor, seed: int) -> Tensor:
        with as_before(buffers, before), seeded(seed):
            y: Tensor = module(x.clone())
            return y

    module.zero_grad()
    x = x.clone().requires_grad_(x.is_floating_point() or x.is_complex())
    with torch.enable_grad(), seeded(3):
        y = forward(x, 1)
        if between is not None:
            forward(between.clone().requires_grad_(x.requires_grad), 2)
        if y.requires_grad:
            torch.autograd.backward(y, torch.ones_like(y))
    return [y.detach().clone(), x.grad, *(parameter.grad for parameter in module.parameters())]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.nan_to_num(), other.nan_to_num())
