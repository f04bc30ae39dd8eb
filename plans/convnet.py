"""A model and a dataset of your own: what `family = "plans.convnet:layers"` and `data.kind` in convnet.toml name.

zbc needs two things from you. A function that returns the layers as a list, each taking the one tensor the layer before
returns; and a dataset of (input, target) pairs with a length and an index. Arguments come from the job file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn


def layers(channels: int = 16, blocks: int = 6, classes: int = 4) -> list[Callable[[], nn.Module]]:
    """A small convolutional net: stem, residual blocks, classifier.

    Builders (functions without arguments) let each rank build its own layers only; ready-made modules work too.
    """
    stem = partial(nn.Conv2d, 1, channels, kernel_size=3, padding=1)
    return [stem, *(partial(Block, channels) for _ in range(blocks)), partial(Classifier, channels, classes)]


class Block(nn.Module):
    """x + conv(gelu(norm(x))); the norm counts no batch statistics, so microbatches do not see each other."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.conv = nn.Conv2d(channels, channels, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(nn.functional.gelu(self.norm(x)))


class Classifier(nn.Module):
    """Mean over each quarter of the image, then a linear layer: (B, C, H, W) -> (B, classes)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.adaptive_avg_pool2d(x, 2).flatten(1))


class Quadrants:
    """Noisy square images in which one quarter is a little brighter; the class says which."""

    def __init__(self, count: int = 8192, size: int = 16, contrast: float = 0.5) -> None:
        self.count, self.size, self.contrast = count, size, contrast

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = torch.randn(1, self.size, self.size, generator=torch.Generator().manual_seed(index))
        label, half = index % 4, self.size // 2
        row, column = divmod(label, 2)
        image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += self.contrast
        return image, torch.tensor(label)
