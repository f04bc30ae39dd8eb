"""Parts of built-in blocks: linear layers with initial weights, and rotary positions. Norms of models of transformers
that are the same function as torch's RMSNorm run as one kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zbc.job.model_section import Model
from zbc.runtime.core.private import real_tensors
from zbc.runtime.features.packing import places, rows_now
from zbc.runtime.features.slices.slicing import first_row

STD = 0.02


def same(x: Tensor) -> Tensor:
    """The identity: in place of the collectives of tensor parallelism (sharding.py)."""
    return x


def linear(inputs: int, outputs: int, residual_layers: int | None = None, *, bias: bool = True) -> nn.Linear:
    """A linear layer with initial weights; `residual_layers`: layers of a model, if it ends in the residual stream."""
    made = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(made.weight, std=STD if residual_layers is None else STD / math.sqrt(2 * residual_layers))
    if bias:
        nn.init.zeros_(made.bias)
    return made


class Rotary(nn.Module):
    """Rotates pairs of features, i and i + size/2, by position (arXiv 2104.09864); input (B, heads, T, size)."""

    def __init__(self, seq_len: int, size: int, theta: float = 10000.0) -> None:
        super().__init__()
        rates = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)  # radians per position, of pairs
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), rates)
        self.own: Callable[[int, torch.device], Tensor] | None = None  # `Spread.positions`, if ranks share such rows
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        start, count = first_row(), x.shape[-2]
        own = None if self.own is None else self.own(count, x.device)
        rows = slice(start, start + count) if own is None else own
        cos, sin = self.cos[rows], self.sin[rows]
        packed = rows_now()
        if packed is not None:
            where = places(packed, count if own is None else len(self.cos), x.device)
            where = where if own is None else where[:, own]
            cos, sin = self.cos[where].unsqueeze(1), self.sin[where].unsqueeze(1)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1).to(x.dtype)


def norm_of(model: Model, size: int) -> nn.Module:
    return (nn.RMSNorm if model.family == "llama" else nn.LayerNorm)(size, eps=model.norm_eps)


def rotary_of(model: Model) -> Rotary:
    return Rotary(model.seq_len or 0, model.head_width, model.rope_theta)


class _Fused(nn.Module):
    """Beside the class of a norm that is torch's RMSNorm of `weight + offset`, one kernel on a GPU."""

    weight: Tensor
    offset: float
    eps: float

    def forward(self, x: Tensor, *gate: Any, **named: Any) -> Any:
        if gate or named or x.dtype != self.weight.dtype:
            return super().forward(x, *gate, **named)
        scale = self.weight + self.offset if self.offset else self.weight
        return functional.rms_norm(x, scale.shape, scale, self.eps)


def fused(layer: nn.Module) -> nn.Module:
    """Makes the norms in a layer use torch's RMSNorm where it is the same function."""
    found: list[Any] = [one for one in layer.modules() if [name for name, _ in one.named_parameters()] == ["weight"]]
    for one in (one for one in found if one.weight.dim() == 1):
        kind: Any = type(one)
        one.__class__ = _norm(kind, *(of for of in vars(one).values() if isinstance(of, float)))
    return layer


@functools.cache
def _norm(kind: Any, *eps: float) -> Any:
    """A class of norms with torch's in place of its forward, if that computes the same."""
    with real_tensors(), torch.device("cpu"), torch.no_grad(), suppress(Exception):  # of its own code
        own, x = kind(64, *eps), torch.linspace(-9, 9, 192).sin().view(3, 64) * torch.tensor([[1e-3], [1], [30]])
        own.weight.copy_(torch.linspace(-0.5, 1.5, 64))
        for offset in (0.0, 1.0):
            if torch.allclose(own(x), functional.rms_norm(x, (64,), own.weight + offset, *eps), rtol=1e-6, atol=0):
                return type(kind.__name__, (_Fused, kind), {"offset": offset, "eps": eps[0]})
    return kind
