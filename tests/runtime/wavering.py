"""Layers that some forwards skip, or whose draws and gradients depend on data; and random models of them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.runtime.zoo import LINEAR, layer_of


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = LINEAR()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


plain = Plain.forward


def large(layer: nn.Module, x: Tensor) -> bool:
    return bool(x.abs().max() > layer.above)


def if_large(forward: Callable[..., Any]) -> type[nn.Module]:
    """A class of layers that compute something else where their inputs are above a number."""
    return layer_of(forward, linear=lambda above: LINEAR(), above=lambda above: above)


# Skipped at random per microbatch: stochastic depth.
LeftOut = if_large(lambda m, x: x if torch.rand(()) < m.above else plain(m, x))
# Runs only the samples whose first number is large, if any.
Expert = if_large(lambda m, x: torch.where(mask[:, None], plain(m, x), x) if (mask := x[:, 0] > m.above).any() else x)


class Hidden(Plain):
    """Adds noise if its inputs are large, and then adds `number` to `DREW`; inputs of a trial are 0."""

    def __init__(self, above: float, number: int = -1) -> None:
        super().__init__()
        self.above, self.number = above, number

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not large(self, x):
            return y
        DREW.add(self.number)
        return y + 0.1 * torch.randn_like(y)


DREW = set[int]()


class Noisy(Hidden):
    """As that, and says so."""

    zbc_random = True


Stops = layer_of(lambda m, x: plain(m, x.detach()))
# (B, W) -> a state and an encoding that depends on a weight if the inputs are large, else zeros.
Fork = if_large(lambda m, x: (y := plain(m, x), 0.5 * y if large(m, x) else 0.0 * y))
Join = layer_of(lambda m, x, y: plain(m, x + y))
# Takes two tensors and passes the second on.
Skip = layer_of(lambda m, x, y: (plain(m, x), y))
# Draws in evaluation only.
Evaluates = layer_of(lambda m, x: plain(m, x) if m.training else plain(m, x) + torch.randn_like(x))
# Draws from an unseeded generator if its inputs are large.
OwnDraw = if_large(lambda m, x: plain(m, x) * (float(numpy.random.rand()) if large(m, x) else 1.0))
# Returns a second tensor that requires a gradient if the inputs are large, never in a trial.
Masks = if_large(lambda m, x: (y := plain(m, x), y if large(m, x) else x.detach()))
# Large numbers, which no trial uses.
Large = layer_of(lambda m, x: 100 * plain(m, x))


class Sums(Plain):
    """Adds up over ranks that share it; on the second of them it draws if its inputs are large."""

    def __init__(self, above: float) -> None:
        super().__init__()
        self.above, self.place, self.ranks = above, 0, 1
        self.enter = self.leave = lambda x: x

    def shard(self, group: Any) -> dict[str, int]:
        self.enter, self.leave, self.place, self.ranks = group.enter, group.leave, group.place, group.size
        return {}

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.place == 1 and large(self, x):
            y = y + 0.0 * torch.rand(())
        return self.leave(self.enter(y) / self.ranks)


class SumsNoise(Sums):
    """Draws before and after its sum."""

    zbc_random = True

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x * (1 + 0.1 * torch.rand_like(x)))
        return y + 0.1 * torch.randn_like(y)


def hidden_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output + torch.randn_like(output), target)


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return hidden_loss(output, target)


noisy_loss.zbc_random = True  # type: ignore[attr-defined]


def layers(kinds: Sequence[tuple[str, Sequence[float]]]) -> list[Callable[[], nn.Module]]:
    return [partial(globals()[name], *numbers) for name, numbers in kinds]


@st.composite
def models(draw: st.DrawFn, count: int) -> list[tuple[str, list[float]]]:
    """Arguments of `layers`: `count` layers with one tensor at both ends, and sometimes two in between."""
    found: list[tuple[str, list[float]]] = []
    above = st.sampled_from([0.0, 0.5, 1.5, 2.5, 100.0])
    rate = st.sampled_from([0.0, 0.3, 0.9, 1.0])
    while len(found) < count:
        left = count - len(found)
        name = draw(st.sampled_from(["Plain", "LeftOut", "LeftOut", "Expert", "Noisy", "Stops", "Fork"]))
        if name == "Fork" and left >= 2:
            skips = draw(st.integers(0, min(2, left - 2)))
            found += [("Fork", [draw(above)]), *([("Skip", list[float]())] * skips), ("Join", [])]
        elif name in ("Plain", "Stops", "Fork"):
            found.append(("Plain" if name == "Fork" else name, []))
        else:
            found.append((name, [draw(rate if name == "LeftOut" else above)]))
    return found
