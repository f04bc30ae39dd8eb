"""Gradients that have their memory for themselves.

The first gradient of a parameter in a step is taken over from the walk of the graph, not copied, and later ones are
added to it in place. What autograd takes over may be a view of a tensor that something else in a pipeline still needs:
the output gradient of a linear layer whose W waits in a slot, or the input gradient of the stage on its way to the rank
before. In `linear(x) + bias.view(shape)` all of these are one piece of memory. Autograd looks at who else holds the
tensor, not at who holds its memory; within one walk that does no harm, between two walks it does.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zbc.runtime.core.private import shares_memory


class Alone:
    """Looks at the gradients of a stage until each has been seen once in a step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._all = [p for p in parameters if p.requires_grad]
        self._step, self._unseen = -1, list[nn.Parameter]()

    def look(self, step: int) -> None:
        """To be called after every backward: copies the gradients that are new and hold shared memory."""
        if step != self._step:
            self._step, self._unseen = step, self._all
        if not self._unseen:
            return
        for parameter in self._unseen:
            grad = parameter.grad
            if grad is not None and grad.layout is torch.strided and shares_memory(grad):
                parameter.grad = grad.clone()
        self._unseen = [parameter for parameter in self._unseen if parameter.grad is None]
