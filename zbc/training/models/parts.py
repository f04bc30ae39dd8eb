"""Parts of built-in blocks: linear layers with initial weights, and rotary positions, maybe for longer sequences."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zbc.job.model_section import Model, RopeScaling
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

    def __init__(self, seq_len: int, size: int, theta: float = 10000.0, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        rates = rotation_rates(size, theta, scaling, seq_len)
        factor = 1.0 if scaling is None else scaling.attention
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), rates)
        self.own: Callable[[int, torch.device], Tensor] | None = None  # `Spread.positions`, if ranks share such rows
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos() * factor, persistent=False)
        self.register_buffer("sin", angles.sin() * factor, persistent=False)

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


def rotary_of(model: Model, *, windowed: bool = False) -> Rotary:
    """The positions of the layers of a model; `windowed`: of those whose attention has a window."""
    own = windowed and model.window_theta is not None
    theta, scaling = (model.window_theta, None) if own else (model.rope_theta, model.rope_scaling)
    return Rotary(model.seq_len or 0, model.head_width, theta or 0.0, scaling)


def rotation_rates(size: int, theta: float, scaling: RopeScaling | None, seq_len: int = 0) -> Tensor:
    """Radians per position of each feature pair, fastest first: theta ** (-2i / size).

    "linear" divides all rates by `factor`. "dynamic" has a larger theta for sequences longer than `original_seq_len`.
    "llama3" (Llama 3.1) divides rates with fewer than `low_freq_factor` turns per original sequence, keeps those with
    more than `high_freq_factor`, and interpolates linearly in the rate between. "yarn" (arXiv 2309.00071) interpolates
    linearly in i, from the pair of `high_freq_factor` turns to that of `low_freq_factor`, which are rounded to integers
    unless `fractions`.
    """
    if scaling is not None and scaling.kind == "dynamic":
        longer = max(1.0, seq_len / scaling.original_seq_len)
        theta *= (scaling.factor * longer - (scaling.factor - 1)) ** (size / (size - 2))
    rates = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if scaling is None or scaling.kind == "dynamic":
        return rates
    if scaling.kind == "linear":
        return rates / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if scaling.kind == "llama3":
        keep = (scaling.original_seq_len * rates / (2 * math.pi) - low) / (high - low)
    else:
        first, last = (
            size * math.log(scaling.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (high, low)
        )
        if not scaling.fractions:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        keep = 1 - (torch.arange(size // 2, dtype=torch.float32) - first) / (last - first or 0.001)
    keep = keep.clamp(0.0, 1.0)
    return keep * rates + (1.0 - keep) * rates / scaling.factor
