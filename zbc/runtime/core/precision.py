"""The dtypes of weights and gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # by model.dtype; others compute as they are


def lower_precision(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> None:
    """Casts floating-point parameters to `dtype`; those that train accumulate their gradients in float32.

    None leaves all parameters as they are.
    """
    if dtype is None:
        return
    for parameter in parameters:
        if not parameter.is_floating_point():
            continue
        parameter.data = parameter.data.to(dtype)
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32
