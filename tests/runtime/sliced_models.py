"""Layers and data of sequences, named by tests as by users: some run in slices, some cannot."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import zbc
from tests.runtime.zoo import layer, layer_of

LENGTH = 16
LONGEST = 64


class Sequences:
    """Random sequences of vectors; targets are the running mean of a map of them."""

    def __init__(self, width: int = 8, count: int = 32, length: int = LENGTH) -> None:
        self.x = torch.randn(count, length, width)
        self.y = (self.x @ torch.randn(width, width)).cumsum(1) / 4

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Uneven(Sequences):
    """From the tenth on, sequences have four tokens more."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        both = self.x[index], self.y[index]
        return both if index < 9 else (torch.cat([both[0], both[0][:4]]), torch.cat([both[1], both[1][:4]]))


class OneNumber(Sequences):
    """A number for a whole sequence."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index].sum()


class Padded:
    """Tokens whose targets at the end, more in every sample, do not count."""

    def __init__(self, vocab: int = 61, count: int = 32, length: int = LENGTH, ignored: int = -100) -> None:
        self.tokens, self.ignored = torch.randint(1, vocab, (count, length + 1)), ignored

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        target = self.tokens[index, 1:].clone()
        target[len(target) - 1 - index % 12 :] = self.ignored
        return self.tokens[index, :-1], target


class Mixer(nn.Module):
    """Attention among the tokens, with their positions."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.places = nn.Embedding(LONGEST, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x + self.places(zbc.positions(x))).view(batch, tokens, 3, 2, -1).permute(2, 0, 3, 1, 4)
        return x + self.drop(self.out(zbc.attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)))


class Begins(nn.Linear):
    """One tensor in, two out: the state and the positions of its tokens."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), zbc.positions(x)


class GoesOn(Mixer):
    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x + places[:, None] / LENGTH), places


Ends = layer_of(lambda m, x, places: x * (1 + places[:, None]), none=lambda: None)


@layer(linear=lambda how: nn.Linear(8, 8), how=lambda how: how)
def OverTime(self, x: Tensor) -> Tensor:
    """Mixes tokens by `how` (batch, tokens, width) -> the same."""
    return x + self.how(self.linear(x))


class Convolves(nn.Conv1d):
    def __init__(self) -> None:
        super().__init__(8, 8, 3, padding=2)
        nn.init.zeros_(self.weight)  # as layers begin that are to be the identity at first

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x.transpose(1, 2))[..., :-2].transpose(1, 2)


class Normed(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


@layer(seen=lambda: nn.Buffer(torch.zeros(())))
def Counts(self, x: Tensor) -> Tensor:
    """A buffer that every forward changes."""
    self.seen += 1
    return x


class _Centred(torch.autograd.Function):
    """The identity; its backward centres the gradients of the tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] - grads[0].mean(1, keepdim=True)


def _attention(x: Tensor, causal: bool) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, is_causal=causal)


def _state(x: Tensor) -> Tensor:
    states, state = [], torch.zeros_like(x[:, 0])
    for row in x.unbind(1):
        state = 0.5 * state + row
        states.append(state)
    return torch.stack(states, 1)


MIXING: dict[str, Callable[[], nn.Module]] = {
    "convolution": Convolves,
    "normed": lambda: Normed(8, track_running_stats=False),
    "both_ways": lambda: OverTime(lambda x: _attention(x, False)),
    "own_causal": lambda: OverTime(lambda x: _attention(x, True)),
    "pooled": lambda: OverTime(lambda x: x.mean(1, keepdim=True).expand_as(x)),
    "state": lambda: OverTime(_state),
    "recurrent": lambda: Recurrent(8, 8, batch_first=True),
    "counts": Counts,
    "noisy": lambda: OverTime(lambda x: x + torch.randn_like(x)),
    "backwards": lambda: OverTime(_Centred.apply),
}


def mixing(what: str, width: int = 8) -> list[nn.Module]:
    return [nn.Linear(width, width), Mixer(width), MIXING[what](), nn.Linear(width, width)]


def mixers(width: int = 8, count: int = 4, dropout: float = 0.0) -> list[nn.Module]:
    return [Mixer(width, dropout) for _ in range(count)]


def several(width: int = 8) -> list[nn.Module]:
    return [Begins(width, width), GoesOn(width), GoesOn(width), Ends()]


class Aside(nn.Linear):
    """The places of the tokens go on by themselves."""

    def forward(self, x: Tensor) -> Any:
        return zbc.alongside({"x": [super().forward(x)], "how": None}, places=zbc.positions(x))


class Nested(Mixer):
    def forward(self, given: dict[str, Any], places: Tensor) -> dict[str, Any]:
        return {**given, "x": [super().forward(given["x"][0] + places[:, None] / LENGTH)]}


Opened = layer_of(lambda m, given: torch.tanh(given["x"][0]), none=lambda: None)


def nested(width: int = 8) -> list[nn.Module]:
    return [Aside(width, width), Nested(width), Nested(width), Opened()]


def tokens(vocab: int = 61, width: int = 8, mixes: bool = False) -> list[nn.Module]:
    middle = OverTime(lambda x: x.cumsum(1) / 8) if mixes else Mixer(width)
    return [nn.Embedding(vocab, width), middle, Mixer(width), nn.Linear(width, vocab)]


def own_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def without_zeros(output: Tensor, target: Tensor) -> Tensor:
    """A mean over other targets than those that zbc counts."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0)


def sum_over_tokens(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def last_token(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, -1] - target[:, -1]).square().mean()
