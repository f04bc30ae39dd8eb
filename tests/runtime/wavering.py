"""Layers that some forwards skip, or whose draws and gradients depend on data; and random models of them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

W = 8


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Above(Plain):
    """Adds a term that depends on the size of its inputs."""

    def __init__(self, above: float) -> None:
        super().__init__()
        self.above = above

    def large(self, x: Tensor) -> bool:
        return bool(x.abs().max() > self.above)


class LeftOut(Plain):
    """Skipped at random per microbatch: stochastic depth."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < self.rate else super().forward(x)


class Expert(Above):
    """Runs only the samples whose first number is large, if any."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, 0] > self.above
        return torch.where(mask[:, None], super().forward(x), x) if mask.any() else x


class Hidden(Above):
    """Adds noise if its inputs are large, and then adds `number` to `DREW`; inputs of a trial are 0."""

    def __init__(self, above: float, number: int = -1) -> None:
        super().__init__(above)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.large(x):
            return y
        DREW.add(self.number)
        return y + 0.1 * torch.randn_like(y)


DREW = set[int]()


class Noisy(Hidden):
    """As that, and says so."""

    zbc_random = True


class Stops(Plain):
    """Stops gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Fork(Above):
    """(B, W) -> a state and an encoding that depends on a weight if the inputs are large, else zeros."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, 0.5 * y if self.large(x) else 0.0 * y


class Join(Plain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + y)


class Skip(Plain):
    """Takes two tensors and passes the second on."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), y


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
        if self.place == 1 and x.abs().max() > self.above:
            y = y + 0.0 * torch.rand(())
        return self.leave(self.enter(y) / self.ranks)


class SumsNoise(Sums):
    """Draws before and after its sum."""

    zbc_random = True

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x * (1 + 0.1 * torch.rand_like(x)))
        return y + 0.1 * torch.randn_like(y)


class Evaluates(Plain):
    """Draws in evaluation only."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.training else y + torch.randn_like(y)


class OwnDraw(Above):
    """Draws from an unseeded generator if its inputs are large."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * float(numpy.random.rand()) if self.large(x) else y


class Masks(Above):
    """Returns a second tensor that requires a gradient if the inputs are large, never in a trial."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y if self.large(x) else x.detach()


class Large(Plain):
    """Large numbers, which no trial uses."""

    def forward(self, x: Tensor) -> Tensor:
        return 100 * super().forward(x)


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
