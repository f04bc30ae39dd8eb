"""Gradient buckets: one all-reduce of a flat vector for all parameters of a stage, started and finished separately.

    REDUCE     start: the gradients are moved into the vector; the all-reduce overlaps with the ops that follow
    VALIDATE   finish: the all-reduce has completed, and gradients are views of the vector

The vector has the gradients in the order of the parameters, then one entry per parameter that counts the ranks that had
a gradient: if none had, there is none after the sum either, and the optimizer skips that parameter. A rank that had all
gradients need not read these entries, for which it would have to wait on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.runtime.core.private import copy_all
from zbc.runtime.core.tensors import constant
from zbc.runtime.transports.transport import Pending, Transport


class GradientSum:
    """A gradient reduction that REDUCE or TIE starts."""

    def start(self, transport: Transport) -> None:
        """Starts the reduction over all replicas of the parameters; they have no gradients until it has completed."""

    def finish(self) -> None:
        """Waits until it has completed."""


class Bucket(GradientSum):
    """Gradients all-reduced over `ranks`."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: tuple[int, ...]) -> None:
        trained = sorted((p for p in parameters if p.requires_grad), key=lambda p: str(gradient_type(p)))
        self._groups = [list(group) for _, group in groupby(trained, gradient_type)]
        self._ranks = ranks
        self._flats: list[tuple[Pending, Tensor, bool]] = []  # and whether this rank had all gradients

    def start(self, transport: Transport) -> None:
        if self._flats:
            raise ZbcError("E703", "run: a sum of gradients was started twice", where=f"rank {transport.rank}")
        for parameters in self._groups:
            every = all(p.grad is not None or isinstance(p, _Absent) for p in parameters)
            flat = _flatten(parameters)
            self._flats.append((transport.start_sum(flat, self._ranks), flat, every))

    def finish(self) -> None:
        for parameters, (pending, flat, every) in zip(self._groups, self._flats, strict=True):
            pending.wait()
            _spread(flat, parameters, every)
        self._flats.clear()


def absent(size: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A placeholder for a parameter that other ranks of the sum have and this one has not, with gradients of `dtype`;
    it takes no memory."""
    return _Absent(torch.zeros((), dtype=dtype, device=device).expand(size))


class _Absent(nn.Parameter):
    """A parameter without a gradient, before and after a sum."""


def gradient_type(parameter: nn.Parameter) -> torch.dtype:
    """The type of a parameter's gradient, which may be wider than its own."""
    return parameter.grad_dtype or parameter.dtype


def flags(present: Sequence[bool], dtype: torch.dtype, device: torch.device) -> Tensor:
    """1.0 for each that is present, 0.0 for the others; cached, since a copy to the device would block."""
    return constant(tuple(map(float, present)), dtype, device)


def _flatten(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Moves the gradients into one vector, zeros for missing ones, followed by a flag for each that is present."""
    first = parameters[0]
    sizes = [p.numel() for p in parameters]
    flat = torch.empty(sum(sizes) + len(sizes), dtype=gradient_type(first), device=first.device)
    *parts, present = torch.split_with_sizes(flat, [*sizes, len(sizes)])
    present.copy_(flags([p.grad is not None for p in parameters], flat.dtype, flat.device))
    targets, sources = list[Tensor](), list[Tensor]()
    for part, parameter in zip(parts, parameters, strict=True):
        if parameter.grad is None:
            part.zero_()
        else:
            targets.append(part.view(parameter.shape))
            sources.append(parameter.grad)
    copy_all(targets, sources)
    for parameter in parameters:
        parameter.grad = None
    return flat


def _spread(flat: Tensor, parameters: Sequence[nn.Parameter], every: bool) -> None:
    """Makes the parts of a summed vector the gradients; `every`: this rank had all of them, so none is missing."""
    *parts, present = torch.split_with_sizes(flat, [*(p.numel() for p in parameters), len(parameters)])
    found = [1.0] * len(parts) if every else present.tolist()
    for part, parameter, there in zip(parts, parameters, found, strict=True):
        there = there and not isinstance(parameter, _Absent)
        parameter.grad = part.view(parameter.shape) if there else None
