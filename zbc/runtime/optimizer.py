"""The optimizer of one stage on one rank, behind one interface.

Handlers know stages by `StageOptimizer` alone: whether the weights that forward reads are what the optimizer updates,
a low-precision copy of it, or a part of it that other ranks complete is the business of the implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from zbc import spec
from zbc.runtime.split import SplitLinear
from zbc.runtime.validate import sum_of_squares


class StageOptimizer(Protocol):
    """One stage's weights and what updates them.

    `parameters`: the working weights, those that forward reads and whose `.grad` backward fills, by global name.
    `optimizer`: the torch optimizer that holds the state; None if nothing of the stage trains here.
    """

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...

    def squares(self) -> dict[str, Tensor]:
        """Sum of squares of each gradient this rank answers for, as float64 scalars by global name."""

    def step(self, scale: float | None) -> None:
        """Multiply the gradients by `scale` (None: leave them) and update the working weights with them."""

    def drop(self) -> None:
        """End the step: drop the gradients, and the casts of weights that may have changed."""


class InPlace:
    """The ordinary one: torch's optimizer updates the working weights themselves."""

    def __init__(
        self, options: spec.Optimizer, parameters: Mapping[str, nn.Parameter], casts: Iterable[SplitLinear] = ()
    ) -> None:
        self.parameters = parameters
        self.optimizer = torch_optimizer(options, parameters.values())
        self._casts = tuple(casts)

    def squares(self) -> dict[str, Tensor]:
        return {name: sum_of_squares(p.grad) for name, p in self.parameters.items() if p.grad is not None}

    def step(self, scale: float | None) -> None:
        if self.optimizer is None:
            return
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        if scale is not None and grads:
            torch._foreach_mul_(grads, scale)
        self.optimizer.step()

    def drop(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        for cast in self._casts:
            cast.forget()


def torch_optimizer(options: spec.Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
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
