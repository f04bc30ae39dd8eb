"""The optimizer of one stage's parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zbc import spec


def build_optimizer(options: spec.Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """`torch.optim` AdamW or SGD over the parameters that train; None if none does.

    On cuda the fused kernels: one launch for all parameters instead of several per parameter.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return None
    fused = True if all(p.is_cuda for p in trained) else None
    decay = options.weight_decay
    if options.kind == "sgd":
        return torch.optim.SGD(trained, lr=options.lr, momentum=options.momentum, weight_decay=decay, fused=fused)
    betas = options.betas
    return torch.optim.AdamW(trained, lr=options.lr, betas=betas, eps=options.eps, weight_decay=decay, fused=fused)
