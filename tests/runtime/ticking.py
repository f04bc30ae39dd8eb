"""Layers whose ops take exact times on a clock that only they move, or sleep as long."""

import time
from collections.abc import Callable

import torch
from torch import nn

from tests.runtime.zoo import layer_of
from zbc.runtime.core.slot import accumulate, current_slot

NOW = [0.0]  # seconds


def tick(ms: float) -> None:
    NOW[0] += ms / 1e3


def sleep(ms: float) -> None:
    time.sleep(ms / 1e3)


class _Tick(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer, slot):
        ctx.layer, ctx.slot, ctx.weight = layer, slot, weight
        if not x.is_meta:
            layer.tick(layer.f)
        return x * weight

    @staticmethod
    def backward(ctx, *grads):
        layer, slot, weight = ctx.layer, ctx.slot, ctx.weight
        layer.tick(layer.b)

        def weight_grad():
            layer.tick(layer.w)
            accumulate(weight, torch.zeros_like(weight))

        if slot is None:
            weight_grad()
        else:
            slot.defer(weight_grad)
        return grads[0] * weight, None, None, None


class Ticker(nn.Module):
    def __init__(self, f: float, b: float, w: float, width: int = 1, tick: Callable[[float], None] = tick) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.f, self.b, self.w, self.tick = f, b, w, tick

    def forward(self, x):
        return _Tick.apply(x, self.weight, self, current_slot())


def layers(f: float = 1.0, b: float = 2.0, w: float = 4.0, count: int = 6, width: int = 1) -> list[nn.Module]:
    """Every third takes ten times as long."""
    return [Ticker(f * (10 if i % 3 == 1 else 1), b, w, width) for i in range(count)]


def sleepers(ms: list[list[float]], width: int) -> list[nn.Module]:
    """A layer for every F, B and W."""
    return [Ticker(f, b, w, width, sleep) for f, b, w in ms]


# A layer that keeps its output (ReLU) and not its input.
Net = layer_of(lambda m, x: torch.relu(m.linear(x + 1.0)), linear=lambda width: nn.Linear(width, width))


def nets(width: int = 24, count: int = 6) -> list[nn.Module]:
    """Ready-made modules, in turns of two kinds, and a head."""
    body = [Net(width) if i % 2 else nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for i in range(count)]
    return [*body, nn.Linear(width, 3)]


class Vectors:
    def __init__(self, width: int = 1, classes: int = 0) -> None:
        self.width, self.classes = width, classes

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int):
        x = torch.randn(self.width, generator=torch.Generator().manual_seed(index))
        return x, torch.tensor(index % self.classes) if self.classes else torch.zeros(self.width)
