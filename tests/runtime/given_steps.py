"""Datasets whose items are steps of microbatches of unequal sizes, as a user would write them."""

from functools import partial

import torch
from torch import Tensor, nn

LENGTH, VOCAB = 12, 61


class Ragged:
    """Vectors: each step has `count` microbatches of 1 to `size` rows, with weights of their own."""

    def __init__(self, count: int = 4, size: int = 3, steps: int = 5, **wrong) -> None:
        self.count, self.size, self.steps, self.wrong = count, size, steps, wrong

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int):
        made = torch.Generator().manual_seed(index)
        return [self.microbatch(made, 1 + (index + 2 * mb) % self.size, mb) for mb in range(self.count)]

    def microbatch(self, made: torch.Generator, rows: int, mb: int):
        x, y = torch.randn(rows, 8, generator=made), torch.randn(rows, 8, generator=made)
        weight = self.wrong.get("weight", 0.5 + mb % 3)
        return x, y[: self.wrong.get("targets", rows)], weight


class Sentences(Ragged):
    """Tokens: rows of other lengths as well; every fifth microbatch has no target that counts."""

    def microbatch(self, made: torch.Generator, rows: int, mb: int):
        length = 3 + (5 * mb + rows) % (LENGTH - 2)
        tokens = torch.randint(VOCAB, (rows, length + 1), generator=made)
        target = tokens[:, 1:].clone()
        target[:, 1] = -100
        return tokens[:, :-1], target if mb % 5 != 4 else torch.full_like(target, -100), float(rows * (length - 1))


class NoList(Ragged):
    def __getitem__(self, index: int):
        return torch.zeros(4), torch.zeros(4), 1.0, 2.0


def summed(output: Tensor, target: Tensor) -> Tensor:
    """No mean: what it is for padding would show."""
    assert output.shape == target.shape
    return (output - target).square().sum()


def logits_too(output: Tensor, target: Tensor) -> Tensor:
    assert output.shape[:2] == target.shape
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch_norms(width: int = 8, count: int = 4):
    norm = partial(nn.BatchNorm1d, width, track_running_stats=False)
    return [nn.Sequential(nn.Linear(width, width), norm()) for _ in range(count)]


def running(width: int = 8, count: int = 4):
    return [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(count)]
