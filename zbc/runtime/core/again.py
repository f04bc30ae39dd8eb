"""Selective recompute: B recomputes cheap functions between linear layers, F does not keep their results.

    y = linear(made_again(f, x))        F keeps x, not f(x), if the slot of its forward `spares`

The linear layer needs f(x) for its weight gradient, and f its own graph for the gradient of x: both use one `Remade`,
which runs f again, once, on the first use. Gradients of parameters inside f are accumulated as usual.

A forward may depend on more than its input: on the current slice, on the lengths of samples, on random numbers. Modules
that manage such a context add to `around` a function that captures it and returns a context manager that restores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbc.runtime.core.slot import current_slot
from zbc.runtime.seeding import RNG_LOCK

GATHERED, CHEAP, ATTENTION = 1, 2, 3  # levels of `Slot.spares`
Around = Callable[[], AbstractContextManager[object]]
around: list[Callable[[], Around | None]] = []


class Remade:
    """One call of a function, which can be recomputed until its backward has completed."""

    __slots__ = ("_low", "_made", "_value", "around", "function", "node", "readers")

    def __init__(self, function: Callable[..., Tensor], device: torch.device) -> None:
        self.function: Callable[..., Tensor] = function
        self.around = [context for capture in around if (context := capture()) is not None]
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
            self.around.append(lambda: torch.autocast(device.type, dtype))
        self._made: tuple[list[Tensor], GradientEdge] | None = None
        self._value: Tensor | None = None
        self._low: Tensor | None = None  # its cast, one for all readers, since each keeps what it reads until its W
        self.readers = 0  # number of calls of `value` to come
        self.node: Any = None

    def graph(self) -> tuple[list[Tensor], GradientEdge]:
        """Its inputs as leaves and the edge of its recomputed output, in a graph of their own."""
        if self._made is None:
            needs = self.node.needs_input_grad[2:]
            leaves = [x.detach().requires_grad_(need) for x, need in zip(self.node.saved_tensors, needs, strict=False)]
            slot = current_slot()
            before = 0 if slot is None else slot.spares
            if slot is not None:
                slot.spares = 0
            with ExitStack() as stack, torch.enable_grad():
                for enter in self.around:
                    stack.enter_context(enter())
                output = self.function(*leaves)
            self._made = leaves, get_gradient_edge(output)
            self._value = output.detach() if self.readers else None
            if slot is not None:
                slot.spares = before
        return self._made

    def value(self, dtype: torch.dtype) -> Tensor:
        """The recomputed output in the type of a reader, dropped here when its last reader has it."""
        self.graph()
        output, self.readers = self._value, self.readers - 1
        assert output is not None
        if output.dtype != dtype:
            if self._low is None or self._low.dtype != dtype:
                self._low = output.to(dtype)
            output = self._low
        if not self.readers:
            self._value = self._low = None
        return output

    def release(self) -> None:
        """Frees everything: its backward has completed."""
        self._made = self._value = self._low = self.node = None
        self.around.clear()


class _MadeAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, remade: Remade, count: int, *tensors: Tensor) -> Tensor:
        """`tensors`: `count` inputs, then the parameters inside the function."""
        inputs = tensors[:count]
        ctx.remade, ctx.parameters, remade.node = remade, tensors[count:], ctx
        ctx.save_for_backward(*inputs)
        return remade.function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        remade, parameters = ctx.remade, ctx.parameters
        leaves, made = remade.graph()
        needs = ctx.needs_input_grad[2:]
        wanted = [tensor for tensor, need in zip((*leaves, *parameters), needs, strict=True) if need]
        results = iter(torch.autograd.grad([made], wanted, [grads[0]], allow_unused=True))
        ctx.remade = ctx.parameters = None
        remade.release()
        return None, None, *(next(results) if need else None for need in needs)


def made_again(
    function: Callable[..., Tensor],
    *inputs: Tensor,
    inside: Sequence[nn.Module | None] = (),
    what: int = CHEAP,
    draws: bool = False,
) -> Tensor:
    """`function(*inputs)`, a new tensor, which B recomputes if the slot spares level `what`; `inside`: modules with
    parameters that the function runs; `draws`: it may draw random numbers."""
    slot = current_slot()
    if slot is None or slot.spares < what or not torch.is_grad_enabled():
        return function(*inputs)
    parameters = [p for module in inside if module is not None for p in module.parameters()]
    if not any(tensor.requires_grad for tensor in (*inputs, *parameters)):  # it has no backward
        return function(*inputs)
    remade = Remade(function, inputs[0].device)
    if draws:
        remade.around.append(_drawing(inputs[0].device))
    made: Tensor = _MadeAgain.apply(remade, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    made._remade = remade  # type: ignore[attr-defined]
    return made


def selective(module: nn.Module) -> nn.Module:
    """Recomputes a cheap module of yours (a norm, a dropout, an activation, an attention without weights of its own)
    in the backward of stages with `memory.activations = "selective"`, so that neither it nor the next linear layer
    keeps its result. Its arguments are tensors, its result is a new one. Changes the module, and returns it."""
    module.forward = MethodType(_forward, module)  # a bound method is copied with the module
    return module


def _forward(module: nn.Module, *inputs: Tensor) -> Tensor:
    return made_again(partial(type(module).forward, module), *inputs, inside=(module,), draws=True)


def _drawing(device: torch.device) -> Around:
    """A context that restores the generators' present state."""
    state = torch.get_rng_state()
    there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def again() -> Iterator[None]:
        with RNG_LOCK, torch.random.fork_rng([device] if there is not None else []):
            torch.set_rng_state(state)
            if there is not None:
                torch.cuda.set_rng_state(there, device)
            yield

    return again


def remade_of(x: Tensor) -> Remade | None:
    """The `Remade` that recomputes a tensor; None if the tensor is kept."""
    return getattr(x, "_remade", None)
