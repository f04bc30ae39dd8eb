"""Sequences with few or no targets that count, a model, and losses with their own ignored number."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from tests.runtime.zoo import layer

IGNORED, WORDS, LENGTH, W = -100, 7, 4, 6


class Padded:
    """Sample i has `counts[i]` targets that count; `ignored` marks the others."""

    def __init__(self, counts: list[int], ignored: int = IGNORED) -> None:
        source = torch.Generator().manual_seed(5)
        self.x = torch.randint(WORDS, (len(counts), LENGTH), generator=source)
        self.y = torch.randint(1, WORDS, (len(counts), LENGTH), generator=source)
        for i, count in enumerate(counts):
            self.y[i, torch.randperm(LENGTH, generator=source)[count:]] = ignored

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


@layer(linear=lambda: nn.Linear(W, W, dtype=torch.float64))
def Body(self, x: Tensor) -> Tensor:
    return x + torch.tanh(self.linear(x))


def layers():
    ends = (lambda: nn.Embedding(WORDS, W, dtype=torch.float64)), (lambda: nn.Linear(W, WORDS, dtype=torch.float64))
    return [ends[0], Body, Body, ends[1]]


def own(output: Tensor, target: Tensor) -> Tensor:
    """Ignores the same targets as cross entropy, without declaring it."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def zeros(output: Tensor, target: Tensor) -> Tensor:
    """Ignores zeros, and declares it."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=0)


zeros.count = lambda target: (target != 0).sum()


def silent(output: Tensor, target: Tensor) -> Tensor:
    return zeros(output, target)


def total(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


@dataclass
class Found:
    logits: Tensor
    extra: Tensor


pytree.register_dataclass(Found)

FORMS = {
    "tensor": lambda logits, extra: logits,
    "tuple": lambda logits, extra: (extra, logits),
    "list": lambda logits, extra: [extra, logits, None],
    "dict": lambda logits, extra: {"extra": extra, "logits": logits},
    "nested": lambda logits, extra: {"all": [(extra, {"logits": logits}), 3]},
    "registered": Found,
}


@layer(form=lambda what: FORMS[what], linear=lambda what: nn.Linear(W, WORDS, dtype=torch.float64))
def Ends(self, x: Tensor) -> Any:
    return self.form(self.linear(x), self.linear.weight.square().mean())


def several(what: str):
    return [lambda: nn.Embedding(WORDS, W, dtype=torch.float64), lambda: Ends(what)]


def sum_of(output: Any, target: Tensor, reduction: str = "sum") -> Tensor:
    logits = next(tensor for tensor in pytree.tree_leaves(output) if isinstance(tensor, Tensor) and tensor.dim() > 1)
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction=reduction)


def mean_of(output: Any, target: Tensor) -> Tensor:
    return sum_of(output, target, "mean")
