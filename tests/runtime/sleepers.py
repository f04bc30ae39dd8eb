"""Layers that sleep for given times: ranks as threads sleep in parallel."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Sleeper) -> Tensor:
        ctx.layer = layer
        if not x.is_meta:  # there only shapes are asked for
            layer.forwards += 1
            time.sleep((layer.ms + (layer.odd if layer.forwards == layer.at else 0.0)) / 1e3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.layer.ms / 1e3)
        return grads[0], None


class Sleeper(nn.Module):
    """Forward and backward take `ms` each, the forward number `at` (from 1) `odd` ms more."""

    def __init__(self, ms: float, odd: float = 0.0, at: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.ms, self.odd, self.at, self.forwards = ms, odd, at, 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x * self.weight, self)  # type: ignore[no-untyped-call]
        return y


def layers(ms: list[float], odd: dict[str, float] | None = None) -> list[nn.Module]:
    """One layer per number; `odd` is the `layer`, `at` and `ms` of one forward that takes longer."""
    odd = odd or {}
    return [
        Sleeper(each, odd["ms"], int(odd["at"])) if odd.get("layer") == index else Sleeper(each)
        for index, each in enumerate(ms)
    ]


class Points:
    """One number in, one number out."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(1), torch.zeros(1)
