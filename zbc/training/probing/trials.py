"""Trials of a user's layer with random numbers: a forward and backward, changed inputs, and distances of tensors.

What the runtime has to know of a layer, and observing a forward (probe.py) cannot show, is judged by them: here what
it keeps in attributes or adds in its backward, in mixing.py slices and packed rows, in proof.py compiled layers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from zbc.job.userobject import FAILURES
from zbc.runtime.core.bundle import example_for
from zbc.runtime.core.remembered import left_alone, places
from zbc.runtime.core.slot import Slot, using
from zbc.runtime.core.tape import RecordedGraph
from zbc.runtime.core.tensors import TensorSpec
from zbc.runtime.features.added import Adding, adding_to
from zbc.runtime.seeding import seeded

ROUNDING = 1e-6  # reported for a difference that is only rounding
OUTPUT, INPUT = "its output", "the gradient of its input"
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the largest number; of others 5e-2

# An input, and a function that cuts out of an output what stays as it is for another one; None: nothing.
Changed = tuple[Tensor, Callable[[Tensor], Tensor | None]]


def unscaled(layers: Sequence[str]) -> tuple[str, str, str]:
    """A warning of layers that add gradients of their own, its reason and a way out."""
    what = f"gradients of {', '.join(layers)} do not double with the loss:"
    hint = "zbc.add_loss(x, value) and zbc.loss_scale() count it once a step: docs/models.md"
    return what, "what the backward adds itself counts once for each microbatch;", hint


def there_and_back(
    module: nn.Module,
    call: Callable[[Tensor], Tensor],
    x: Tensor,
    grad_of: Callable[[Tensor], Tensor],
    slot: Slot | None = None,
) -> dict[str, Tensor]:
    """One forward and backward of a layer by `call`: its output, and the existing gradients of input and parameters, by
    their descriptions; with a `slot` W is separate. `grad_of` makes the gradient of the output."""
    module.zero_grad()
    leaf = x.detach().requires_grad_(x.requires_grad)
    with using(slot), torch.enable_grad():
        y = call(leaf)
    if y.requires_grad:
        grad = grad_of(y)
        with using(slot), torch.autograd.set_multithreading_enabled(False):  # as in a step
            if slot is not None:
                slot.split = True
            RecordedGraph(y).backward(grad)  # Tensor.backward would leave the answers of a dry run
            if slot is not None:
                slot.run()
    grads = {INPUT: leaf.grad} | {f"the gradient of {name}": p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    return {OUTPUT: y.detach().clone().requires_grad_(y.requires_grad)} | {
        name: grad for name, grad in grads.items() if grad is not None
    }


def unmoved(run: Callable[[Tensor], Tensor], x: Tensor, changed: Iterable[Changed]) -> bool:
    """Whether the output of `run` for changed inputs is that for `x` where it has to be. Of an output that differs from
    run to run, since a layer draws random numbers, nobody can tell."""
    with torch.no_grad():
        first, again = run(x), run(x)
        return not torch.equal(first, again) or all(alike(part(first), part(run(other))) for other, part in changed)


def alike(plain: Tensor | None, found: Tensor | None) -> bool:
    """Whether two results are equal up to rounding."""
    return plain is found or (plain is not None and apart(plain, found) <= TOLERANCE.get(plain.dtype, 5e-2))


def apart(plain: Tensor | None, found: Tensor | None, least: float = 0.0) -> float:
    """The largest absolute difference, divided by the largest absolute number of `plain`.

    0 if both are equal, inf if one is missing or they differ in shape or in which numbers are finite. Differences up to
    `least` count as rounding: some gradients consist of rounding only (that of a bias before a softmax).
    """
    if plain is None or found is None:
        return 0.0 if plain is found else math.inf
    if plain.shape != found.shape or not torch.equal(plain.isfinite(), found.isfinite()):
        return math.inf
    if torch.equal(plain, found):
        return 0.0
    distance = largest(_wide(plain) - _wide(found))
    if distance <= least:
        return ROUNDING if distance else 0.0
    return distance / (largest(plain) or 1.0)


def largest(tensor: Tensor | None) -> float:
    """The largest absolute value of the finite numbers; 0 if there are none."""
    if tensor is None:
        return 0.0
    known = tensor.detach()[tensor.isfinite()]
    return known.abs().max().item() if known.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


# ---- judgments ------------------------------------------------------------------------------------------------


def adds(module: nn.Module, takes: TensorSpec) -> bool:
    """Whether a backward with a zero gradient of the output, in a loss that weighs nothing, gives gradients: `module`
    adds them itself, once per microbatch. It runs on the CPU; False if it cannot run there."""
    try:
        with seeded(3), adding_to(Adding(0.0)):
            x = example_for(module, takes).requires_grad_(takes.numbers)
            found = there_and_back(module, module, x, torch.zeros_like)
        return any(largest(grad) > 0 for name, grad in found.items() if name != OUTPUT)
    except FAILURES:  # in a dry run nobody can tell
        return False


def carried(module: nn.Module, takes: TensorSpec) -> tuple[bool, bool]:
    """Whether the output of a layer depends on earlier forwards, and whether a forward changes the output or the
    gradients of an earlier one.

    Buffers that a forward changes are copied for every microbatch (core/remembered.py), plain attributes are not: a
    counter, or the last input. Most attributes that change are harmless, such as attention weights kept for inspection.
    So layers that change some are tried: forward x, forward other, backward of x.

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
