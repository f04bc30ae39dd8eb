"""A trial run of a user's layer with random numbers, and the distance between tensors that should be equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zbc.runtime.core.slot import Slot, using

ROUNDING = 1e-6  # reported for a difference that is only rounding
OUTPUT = "its output"


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
            y.backward(grad)  # type: ignore[no-untyped-call]
            if slot is not None:
                slot.run()
    grads = {"its input": leaf.grad} | {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    return {OUTPUT: y.detach().clone().requires_grad_(y.requires_grad)} | {
        f"the gradient of {name}": grad for name, grad in grads.items() if grad is not None
    }


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
