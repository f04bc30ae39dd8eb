"""A user's code that calls sys.exit() instead of its work; `where` names the place."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Leaves(nn.Linear):
    def __init__(self, where: str) -> None:
        super().__init__(8, 8)
        self.where = where
        if where == "constructor":
            sys.exit(where)

    def __deepcopy__(self, memo: dict[int, object]) -> Leaves:
        sys.exit("copy")

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            sys.exit(self.where)
        return super().forward(x)


class Fine(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)


def layers(where: str = "") -> Iterator[object]:
    if where == "factory":
        sys.exit(where)
    yield Fine
    if where == "generator":
        sys.exit(where)
    if where == "copy":
        yield Leaves(where)
    elif where in ("constructor", "forward"):
        yield type("Named", (Leaves,), {"__init__": lambda self: Leaves.__init__(self, where), "__deepcopy__": None})
    else:
        yield Fine


class Vectors:
    def __init__(self, where: str = "") -> None:
        self.where = where
        if where == "dataset":
            sys.exit(where)

    def __len__(self) -> int:
        return sys.exit(self.where) if self.where == "length" else 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return sys.exit(self.where) if self.where == "sample" else (torch.ones(8), torch.ones(8))


def loss(output: Tensor, target: Tensor) -> Tensor:
    sys.exit("loss")
