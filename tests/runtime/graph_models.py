"""Models that are graphs of groups of small layers, by their counts; and their data."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tests.runtime.zoo import layer, layer_of

WIDTH = 8
GRAPHS = {  # graph, layers of each group, ranks
    "two branches": ({"a": [], "b": [], "c": ["a", "b"]}, {"a": 2, "b": 2, "c": 2}, 6),
    "one and three": ({"a": [], "b": [], "c": ["b", "a"]}, {"a": 1, "b": 3, "c": 2}, 6),
    "three branches": ({"a": [], "b": [], "c": [], "d": ["c", "a", "b"]}, {"a": 1, "b": 1, "c": 1, "d": 1}, 4),
    "skip": ({"a": [], "b": ["a"], "c": ["a", "b"]}, {"a": 1, "b": 2, "c": 1}, 4),
    "three readers": ({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "a", "c"]}, {"a": 2, "b": 1, "c": 2, "d": 1}, 4),
}


def layers(counts: dict[str, int], dropout: float = 0.0) -> dict[str, list[Callable[[], nn.Module]]]:
    return {name: [partial(Layer, dropout) for _ in range(count)] for name, count in counts.items()}


Two = layer_of(lambda m, x: {"one": x, "other": x}, none=lambda: None)


def ends_in_two(counts: dict[str, int], dropout: float) -> dict[str, list[Callable[[], nn.Module]]]:
    made = layers(counts)
    return {**made, "b": [*made["b"][:-1], Two]}


@layer(linear=lambda dropout: nn.Linear(WIDTH, WIDTH), dropout=nn.Dropout)
def Layer(self, *inputs: Tensor) -> Tensor:
    """tanh(linear(2 x + y / 3 + ..)): exchanged inputs change the result."""
    x = sum((x * (2.0 / (3**k)) for k, x in enumerate(inputs)), torch.zeros(()))
    return self.dropout(torch.tanh(self.linear(x)))


class Vectors:
    """Inputs for the groups `of`, or one for all."""

    def __init__(self, count: int = 64, of: tuple[str, ...] = ()) -> None:
        self.count, self.of = count, of

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor | dict[str, Tensor], Tensor]:
        made = torch.Generator().manual_seed(index)
        x = {name: torch.randn(WIDTH, generator=made) for name in self.of or ("",)}
        return x if self.of else x[""], torch.randn(WIDTH, generator=made)
