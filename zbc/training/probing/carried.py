"""State that a layer keeps in plain attributes from one forward to the next, which the runtime cannot restore.

Buffers that a forward changes are copied for every microbatch (runtime/core/remembered.py). A counter, or the last
input kept in an attribute, is not: the output equals that of one process only if each forward runs once, in order.
Likewise several microbatches share an attribute between their forward and their backward. Most attributes that change
are harmless, such as attention weights kept for inspection. So a layer that changes some in each forward, or makes
buffers in its first, is tried with random numbers: forward x, forward other, backward of x.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from zbc.job.userobject import FAILURES
from zbc.runtime.core.bundle import example_for
from zbc.runtime.core.private import tree_leaves
from zbc.runtime.core.remembered import left_alone, places
from zbc.runtime.core.tensors import TensorSpec
from zbc.runtime.seeding import seeded
from zbc.training.probing.contract import OUTPUT, there_and_back

_OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}


def attributes(module: nn.Module) -> dict[str, list[Any]]:
    """The plain attributes of a layer and of the modules inside it, with tensor versions; for `differing`."""
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
    """Whether the output of a layer depends on earlier forwards, and whether a forward changes the output or the
    gradients of an earlier one.

    `module` runs on the CPU and is modified. Both are False if it cannot run there.
    """
    with seeded(0):
        x, other = (example_for(module, takes) for _ in range(2))
    other = other if takes.numbers else torch.ones_like(other)
    try:
        first = _there_and_back(copy.deepcopy(module), x, None)
        with torch.no_grad():  # a graph could not be copied
            _forward(module, other, 2)  # makes the state that only a first forward makes
        alone = _there_and_back(copy.deepcopy(module), x, None)
    except FAILURES:
        return False, False
    try:
        apart = _there_and_back(module, x, other)
        again = _there_and_back(module, x, None)
    except FAILURES:  # autograd noticed that a saved tensor was overwritten
        return False, True
    y, *others = ({OUTPUT: found[OUTPUT]} for found in (alone, first, again))
    return not all(_same(y, result) for result in others), not _same(alone, apart)


def _there_and_back(module: nn.Module, x: Tensor, between: Tensor | None) -> dict[str, Tensor]:
    """One forward and backward, with the forward of `between` in between."""

    def both(x: Tensor) -> Tensor:
        y = _forward(module, x, 1)
        if between is not None:
            _forward(module, between.clone().requires_grad_(x.requires_grad), 2)
        return y

    with seeded(3):
        return there_and_back(module, both, x.clone().requires_grad_(TensorSpec.of(x).numbers), torch.ones_like)


def _forward(module: nn.Module, x: Tensor, seed: int) -> Tensor:
    """A forward that starts from the same buffers each time."""
    with left_alone(places(module, [name for name, _ in module.named_buffers()])), seeded(seed):
        y: Tensor = module(x.clone())
        return y


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(t.nan_to_num(), other[key].nan_to_num()) for key, t in one.items()
    )
