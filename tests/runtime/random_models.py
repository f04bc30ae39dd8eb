"""Random models of layers from zoo.py, in double precision, and data that spoil some gradients."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.runtime import zoo

W = zoo.W
SIZE = 2  # of a microbatch: some layers know it
NAN, LARGE = 111.0, 222.0  # targets that make the gradient of their sample NaN or large

_ALONE = [zoo.Inline, zoo.Custom, zoo.Conv, zoo.Tied, zoo.Hooked, zoo.Overwrites, zoo.Strided, zoo.Unused]
_ALONE += [zoo.Noise, zoo.Dropped, zoo.Averages, zoo.Stops, zoo.Mapped, zoo.Made, zoo.Empty, zoo.Hands]
# Input of a layer -> its factory and its output. v: vectors, c: complex, i: whole numbers, t: transposed.
Piece = tuple[Callable[[], nn.Module], str]
PIECES: dict[str, dict[str, Piece]] = {
    "v": {
        "linear": (lambda: nn.Linear(W, W), "v"),
        "relu": (lambda: nn.ReLU(inplace=True), "v"),
        "identity": (nn.Identity, "v"),
        "batchnorm": (lambda: nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.Tanh()), "v"),
        **{kind.__name__: (kind, "v") for kind in _ALONE},
        "Listens": (partial(zoo.Listens, "each"), "v"),
        "Carries": (partial(zoo.Carries, "count"), "v"),
        "Grows": (partial(zoo.Grows, "none"), "v"),
        "Reuses": (partial(zoo.Reuses, "factor"), "v"),
        "Aside": (partial(zoo.Reuses, "aside"), "v"),
        "Shaped": (partial(zoo.Shaped, True), "v"),
        "Pairs": (partial(zoo.Pairs, False), "c"),
        "Rounds": (zoo.Rounds, "i"),
        "Turns": (partial(zoo.Turns, False), "t"),
    },
    "c": {"Complex": (zoo.Complex, "c"), "Mirrors": (zoo.Mirrors, "c"), "Parts": (partial(zoo.Pairs, True), "v")},
    "i": {"Looks": (zoo.Looks, "v")},
    "t": {"Back": (partial(zoo.Turns, True), "v")},
}
_HOME = {"c": "Parts", "i": "Looks", "t": "Back"}


def chain(rng: random.Random, count: int) -> list[str]:
    """The names of `count` layers, each with the output of the one before as input; vectors at both ends."""
    found: list[str] = []
    now = "v"
    for left in range(count, 0, -1):
        fit = {name: gives for name, (_, gives) in PIECES[now].items() if left > 1 or gives == "v"}
        name = rng.choice(sorted(fit)) if left > 1 or now == "v" else _HOME[now]
        found.append(name)
        now = fit[name]
    return found


def layers(names: list[str]) -> list[Callable[[], nn.Module]]:
    made = {name: make for pieces in PIECES.values() for name, (make, _) in pieces.items()}
    return [partial(_wide, made[name]) for name in names]


def _wide(make: Callable[[], nn.Module]) -> nn.Module:
    module = make()
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.complex128 if parameter.is_complex() else torch.float64)
    for inner in module.modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                inner._buffers[name] = buffer.double()
    return module


class Vectors:
    """Random vectors and a linear map of them; samples `nan` and `large` spoil the gradient of their microbatch."""

    def __init__(self, nan: tuple[int, ...] = (), large: tuple[int, ...] = (), count: int = 64) -> None:
        self.x = torch.randn(count, W, dtype=torch.float64)
        self.y = self.x @ torch.randn(W, W, dtype=torch.float64)
        for index in nan:
            self.y[index, 0] = NAN
        for index in large:
            self.y[index, 0] = LARGE

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class _Spoiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(target[:, :1])
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (told,) = ctx.saved_tensors
        return grads[0] * torch.where(told == NAN, torch.nan, torch.where(told == LARGE, 1e3, 1.0)), None


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error; finite for every sample, even if the gradient is not."""
    wanted = torch.where(target > 100, 0.0, target)
    return functional.mse_loss(_Spoiled.apply(output, target), wanted)
