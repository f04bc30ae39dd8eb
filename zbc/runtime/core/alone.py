"""Parameter gradients that share memory with another tensor are copied.

Autograd takes over the first gradient of a parameter in a step from the backward pass without a copy, and adds later
ones to it in place. That first gradient may be a view of a tensor that the pipeline still needs: the output gradient of
a linear layer whose W waits in a slot, or the input gradient of the stage on its way to the previous rank. In
`linear(x) + bias.view(shape)` all of these are one storage. Autograd checks the references to the tensor, not the
references to its storage; that is safe within one backward pass, but not across two.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zbc.runtime.core.private import shares_memory


class Alone:
    """Checks the gradients of a stage until each has been checked once in a step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._all = [p for p in parameters if p.requires_grad]
        self._step, self._unseen = -1, list[nn.Parameter]()

    def look(self, step: int) -> None:
        """Copies new gradients whose storage is shared; to be called after every backward."""
        if step != self._step:
            self._step, self._unseen = step, self._all
        if not self._unseen:
            return
        for parameter in self._unseen:
            grad = parameter.grad
            if grad is not None and grad.layout is torch.strided and shares_memory(grad):
                parameter.grad = grad.clone()
        self._unseen = [parameter for parameter in self._unseen if parameter.grad is None]
