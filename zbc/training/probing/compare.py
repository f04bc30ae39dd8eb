"""How far two tensors are apart that should be the same up to rounding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDING = 1e-6  # what is said of a difference that is nothing but rounding


def apart(plain: Tensor | None, found: Tensor | None, least: float = 0.0) -> float:
    """The largest difference as a share of the largest number of `plain`.

    0 where all bits are equal, inf where one is missing, of another shape or not finite where the other is. Differences
    up to `least` are rounding: some gradients are nothing else (that of a bias in front of a softmax).
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
    """The largest of the numbers that are finite; 0 where there are none."""
    if tensor is None:
        return 0.0
    known = tensor.detach()[tensor.isfinite()]
    return known.abs().max().item() if known.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
