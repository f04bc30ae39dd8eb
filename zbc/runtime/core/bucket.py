"""Sums of gradients over ranks: one flat vector for all parameters of a stage, started and finished apart.

    REDUCE     start: the gradients move into the vector, and the sum goes on beside what still runs
    VALIDATE   finish: the sums are there, and gradients are views of the vector

The order in the vector is that of the parameters. After them stands one entry each that says whether a rank had a
gradient at all: where none had, there is none after the sum either, and an optimizer leaves that parameter alone. A
rank that had all of them need not look, which a GPU would have to be waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.runtime.core.private import copy_all
from zbc.runtime.core.tensors import constant
from zbc.runtime.transports.transport import Pending, Transport


class GradientSum(Protocol):
    """What REDUCE and TIE work on."""

    def start(self, transport: Transport) -> None:
        """Start the sum over the ranks that hold a copy of the parameters; they have no gradients until it is over."""

    def finish(self) -> None:
        """Wait until it is there."""


class Bucket:
    """Gradients summed in full on each of `ranks`."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: tuple[int, ...]) -> None:
        trained = sorted((p for p in parameters if p.requires_grad), key=lambda p: str(gradient_type(p)))
        self._groups = [list(group) for _, group in groupby(trained, gradient_type)]
        self._ranks = ranks
        self._flats: list[tuple[Pending, Tensor, bool]] = []  # and whether there were all gradients here

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
    """In place of a parameter with gradients of `dtype` that others of the ranks sum, and this one has not; it takes no
    room."""
    return _Absent(torch.zeros((), dtype=dtype, device=device).expand(size))


class _Absent(nn.Parameter):
    """Has no gradient before a sum, nor after one."""


def gradient_type(parameter: nn.Parameter) -> torch.dtype:
    """The type of a parameter's gradient, which may be wider than its own."""
    return parameter.grad_dtype or parameter.dtype


def flags(present: Sequence[bool], dtype: torch.dtype, device: torch.device) -> Tensor:
    """1.0 for each that is there, 0.0 for the others; made once where a device would wait for them."""
    return constant(tuple(map(float, present)), dtype, device)


def _flatten(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Move the gradients into one vector, zeros where there is none, and whether there is one after them."""
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
    """Make the parts of a summed vector the gradients; `every`: no rank can have had none of one."""
    *parts, present = torch.split_with_sizes(flat, [*(p.numel() for p in parameters), len(parameters)])
    found = [1.0] * len(parts) if every else present.tolist()
    for part, parameter, there in zip(parts, parameters, found, strict=True):
        there = there and not isinstance(parameter, _Absent)
        parameter.grad = part.view(parameter.shape) if there else None
