"""What F leaves for the backward of one microbatch: the graph it recorded, or only the inputs of its layers.

    Graph      B and BW walk the graph of the whole stage
    Inputs     B and BW go through the layers from the last to the first: run its forward again on the input that was
               kept, walk the graph of this one layer, and drop both

With `Inputs` each layer's forward runs twice per microbatch, in F and in its backward, whether that is split or not:
what W needs waits in the slot as it does without recompute.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from zbc.runtime.core.private import engine


class Tape(Protocol):
    """What F left of one microbatch."""

    def backward(self, grad: Tensor | None) -> None:
        """Add the gradients of the stage's input and of the weights, those that do not wait in the slot.

        The microbatch's slot has to be current, for layers that run their forward again. `grad` is the gradient of the
        stage's output, of its dtype. Once only: it releases what F kept.
        """


class RecordedGraph:
    """The autograd graph of the whole stage. It keeps no output: that one's memory goes with the SEND."""

    __slots__ = ("_edge",)

    def __init__(self, output: Tensor) -> None:
        self._edge = get_gradient_edge(output) if output.requires_grad else None

    def backward(self, grad: Tensor | None) -> None:
        edge = self._edge
        if edge is None:
            return
        if engine is None or grad is None:
            torch.autograd.backward((edge,), (grad,))
        else:  # the handlers have looked at shapes and types
            engine((edge,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)


class Inputs:
    """The inputs of a stage's layers; `run(i, x)` is the forward of layer i, the loss included where it ends in one.

    `again(i)` surrounds the second forward and the backward of layer i. `first` is the first layer after whose input
    something trains: there the way back ends.
    """

    __slots__ = ("_again", "_first", "_run", "inputs")

    def __init__(
        self,
        inputs: list[Tensor],
        run: Callable[[int, Tensor], Tensor],
        again: Callable[[int], AbstractContextManager[None]],
        first: int,
    ) -> None:
        self.inputs, self._run, self._again, self._first = inputs, run, again, first

    def backward(self, grad: Tensor | None) -> None:
        while len(self.inputs) > self._first:
            grad = self._layer(grad)
            if grad is None:  # a stage's first layer ends here; so does one that passes no gradient on
                break
        self.inputs.clear()

    def _layer(self, grad: Tensor | None) -> Tensor | None:
        """Backward of the last layer that is left: the gradient of its input, None if it has none."""
        x = self.inputs.pop()
        index = len(self.inputs)
        x = input_of(index, x, self._first)
        with self._again(index):
            graph = RecordedGraph(self._run(index, x))
            graph.backward(grad)
        return x.grad


def input_of(index: int, x: Tensor, first: int) -> Tensor:
    """What layer `index` of a stage takes when its backward is to follow; what nobody trains needs no gradient."""
    if not index:  # the stage's own, made for this
        return x
    return x.detach().requires_grad_(index > first and (x.is_floating_point() or x.is_complex()))
