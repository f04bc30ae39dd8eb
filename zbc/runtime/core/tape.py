"""Tapes: the state that F saves for the backward of one microbatch, its graph or only the inputs of its layers.

    Graph      B and BW run the backward of the whole stage's graph
    Inputs     B and BW go through the layers from the last to the first: they run its forward again on the saved
               input, run the backward of this layer, and drop both; after the graph of later layers that do not
               run again

With `Inputs` each layer's forward runs twice per microbatch, in F and in its backward, whether that is split or not:
the slot keeps the tensors that W needs, as without recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zbc.runtime.core.private import engine, shares_memory


class Tape(Protocol):
    """The saved state of one microbatch."""

    def backward(self, grad: Tensor | None) -> None:
        """Accumulates the gradients of the stage's input and of the weights, except those deferred to the slot. The
        microbatch's slot has to be current, for layers that run their forward again. `grad` is the gradient of the
        stage's output, of its dtype. To be called once: it frees the saved state."""


class RecordedGraph:
    """The autograd graph of the whole stage. It does not keep the output, which is freed after its SEND."""

    __slots__ = ("_edge",)

    def __init__(self, output: Tensor) -> None:
        self._edge = get_gradient_edge(output) if output.requires_grad else None

    def backward(self, grad: Tensor | None) -> None:
        edge = self._edge
        if edge is None:
            return
        if engine is None or grad is None:
            torch.autograd.backward((edge,), (grad,))
        else:  # the handlers have checked shapes and types
            engine((edge,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)


@dataclass(slots=True)
class Inputs:
    """The inputs of a stage's first layers; `run(i, x)` is the forward of layer i, and the loss after the last stage's
    last. `rest`: the input and the graph of the layers after these.

    `again(i)` is the context of the second forward and the backward of layer i. `first` is the layer where backward
    ends: the first one whose input or parameters need a gradient.
    """

    inputs: list[Tensor]
    run: Callable[[int, Tensor], Tensor]
    again: Callable[[int], AbstractContextManager[None]]
    first: int
    rest: tuple[Tensor, RecordedGraph] | None = None

    def backward(self, grad: Tensor | None) -> None:
        goes_on = True
        if self.rest is not None:
            (x, graph), self.rest = self.rest, None
            graph.backward(grad)
            grad = x.grad
            goes_on = grad is not None
            del x, graph
        while goes_on and len(self.inputs) > self.first:
            index = len(self.inputs) - 1
            x = input_of(index, self.inputs.pop(), self.first)
            with self.again(index):
                RecordedGraph(self.run(index, x)).backward(grad)
            grad = x.grad
            goes_on = grad is not None  # else the stage's input, or the input of a layer, has no gradient
        self.inputs.clear()


def input_of(index: int, x: Tensor, first: int) -> Tensor:
    """The input of layer `index` for a forward with a backward; without a gradient if no layer before it trains."""
    if not index:  # the stage's own input, which already is a leaf
        return x
    return x.detach().requires_grad_(index > first and (x.is_floating_point() or x.is_complex()))


class Alone:
    """Copies gradients of a stage's parameters that share memory with another tensor.

    Autograd takes over the first gradient of a parameter in a step without a copy, and adds later ones to it in place.
    That first one may be a view of a tensor that the pipeline still needs: the output gradient of a linear layer whose
    W waits in a slot, or the input gradient of the stage on its way to the previous rank. In
    `linear(x) + bias.view(shape)` all of these are one storage. Autograd checks the references to the tensor, not those
    to its storage: safe within one backward pass, but not across two.
    """

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
