"""Parts of built-in blocks: linear layers with initial weights, and rotary positions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zbc.job.model_section import Model
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
