"""Layer factories and datasets, named by tests as by users."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zbc
from tests.runtime.zoo import LINEAR, layer, layer_of, ready, these
from zbc.runtime.core.slot import accumulate, current_slot


def of(kind):
    """A factory of `count` layers of a kind."""
    return lambda width=8, count=4: [partial(kind, width)] * count


class Vectors:
    """Random vectors and a fixed linear map of them."""

    def __init__(self, width: int = 8, count: int = 64) -> None:
        self.x = torch.randn(count, width)
        self.y = self.x @ torch.randn(width, width)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def sum_of_errors(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().sum()


def no_reduction(output: Tensor, target: Tensor) -> Tensor:
    return output - target


class Residual(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def residual(width: int = 8, count: int = 4, dropout: float = 0.0):
    return [lambda: Residual(width, dropout) for _ in range(count)]


def ready_made(width: int = 8, count: int = 4):
    return nn.Sequential(*(Residual(width) for _ in range(count)))


class Shared(nn.Module):
    """The layer of docs/tensor_parallel.md, with dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.enter = self.leave = lambda x: x

    def shard(self, group):
        self.enter, self.leave = group.enter, group.leave
        if group.place:
            self.down.bias = None
        blocks = [2 * self.down.out_features] * 2
        return {"up.weight": (0, blocks), "up.bias": (0, blocks), "down.weight": (1, blocks)}

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.leave(self.down(torch.relu(self.up(self.enter(x)))))
        return functional.dropout(y, self.dropout) if self.dropout else y


def shared(width: int = 8, count: int = 4, dropout: float = 0.0):
    return [partial(Shared, width, dropout)] * count


def checkpointing(reentrant: bool) -> type[Residual]:
    """Residual layers whose backward runs the forward again; reentrant, and a backward inside of the first one."""

    class Checkpointed(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    return Checkpointed


checkpointed = of(checkpointing(False))


def reentrant(width: int = 8, count: int = 4):
    return [partial(Residual, width), *[partial(checkpointing(True), width)] * (count - 1)]


@layer(linear=lambda width: nn.Linear(width, width))
def Twice(self, x: Tensor) -> Tensor:
    """One linear layer used two times in one forward."""
    return self.linear(torch.tanh(self.linear(x)))


twice = of(Twice)


def frozen(width: int = 8, which: tuple[int, ...] = (0,), count: int = 4, bias_only: bool = False):
    """Residual layers of which some do not train (with `bias_only`: only their biases do)."""
    made = [Residual(width) for _ in range(count)]
    for index in which:
        for name, parameter in made[index].named_parameters():
            parameter.requires_grad_(bias_only and name.endswith("bias"))
    return made


def without_parameters(width: int = 8):
    return [nn.Linear(width, width), nn.GELU(), nn.Identity(), nn.Linear(width, width)]


class OwnSplit(torch.autograd.Function):
    """x * scale, with the gradient of the scale deferred by hand."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        ctx.slot = current_slot()
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = (t.detach() for t in ctx.saved_tensors)
        leaf = ctx.saved_tensors[1]
        ctx.slot.defer(lambda: accumulate(leaf, (grad * x).sum(0)))
        return grad * scale, None


@layer(scale=lambda width: nn.Parameter(torch.linspace(0.5, 1.5, width)))
def Scale(self, x: Tensor) -> Tensor:
    return OwnSplit.apply(x, self.scale) if current_slot() is not None else x * self.scale


scales = of(Scale)


@layer(rate=lambda width: torch.linspace(0, 1, 3)[1].item(), linear=lambda width: nn.Linear(width, width))
def Recording(self, x: Tensor) -> Tensor:
    """Looks at values, so it cannot run on the meta device; and its constructor cannot either."""
    return self.linear(x) * (2.0 if x.abs().max().item() > 1e9 else 1.0)


value_dependent = of(Recording)


def mixed(width: int = 8):
    """A linear, a normalising, a convolutional and a transposing layer in a row."""
    return [
        lambda: nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)),
        lambda: nn.Sequential(nn.Unflatten(1, (2, width // 2)), nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular")),
        lambda: nn.Flatten(),
        lambda: nn.Linear(width, width),
    ]


def convolving(width: int = 8, count: int = 4):
    """Layers that keep a graph of their own for W, which looks at their weights."""
    return [
        lambda: nn.Sequential(nn.Unflatten(1, (2, width // 2)), nn.Conv1d(2, 2, 3, padding=1), nn.Flatten())
        for _ in range(count)
    ]


def tied():
    shared = nn.Linear(8, 8)
    return [shared, nn.ReLU(), nn.Sequential(shared), nn.ReLU()]


narrow = ready(LINEAR, partial(nn.Linear, 9, 8), nn.ReLU, nn.ReLU)


@layer(linear=lambda good: nn.Linear(8, 8), left=lambda good: good)
def FailsLater(self, x: Tensor) -> Tensor:
    """Works for the first microbatches, then fails."""
    if not x.is_meta:
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError("out of luck")
    return self.linear(x)


def fails_later(good: int = 2):
    return [LINEAR, partial(FailsLater, good), LINEAR, LINEAR]


# Returns a shorter tensor in training than on the meta device.
Shrinks = layer_of(lambda m, x: x if x.is_meta else x[:1], none=lambda: None)
shrinks = ready(LINEAR, Shrinks, LINEAR, LINEAR)


def raises(text: str = "no such luck"):
    raise ValueError(text)


def three_numbers():
    return [1, 2, 3, 4]


def one_module():
    return nn.Linear(8, 8)


bad_builders = these(lambda: "not a module")


class FSDPModule(nn.Linear):
    """A fake of torch's class: without importing FSDP it is known by its name only."""


wrapped = these(LINEAR, lambda: nn.Sequential(FSDPModule(8, 8)), nn.ReLU, nn.ReLU)


NOT_CALLABLE = 3


class NoLength:
    pass


class Singles(Vectors):
    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]


@layer(state=lambda width: nn.Linear(width, width), encoding=lambda width: nn.Linear(width, width))
def Encode(self, x: Tensor) -> tuple[Tensor, ...]:
    """(B, W) -> a state, an encoding that lies transposed in memory, a mask, whole numbers, and a number of 64 bits."""
    encoding = self.encoding(x).t().contiguous().t()
    return self.state(x), encoding, x > 0, torch.arange(x.shape[-1], device=x.device), encoding.double().mean()


class Decode(nn.Module):
    """Uses all of them and passes them on, the mask inverted; the last one returns the state alone."""

    def __init__(self, width: int, last: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.last, self.drop = last, nn.Dropout(dropout)
        self.norm, self.mix, self.places = nn.LayerNorm(width), nn.Linear(width, width), nn.Embedding(width, 1)

    def forward(self, state: Tensor, encoding: Tensor, mask: Tensor, places: Tensor, scale: Tensor):
        assert encoding.dtype != torch.float32 or encoding.stride() == (1, len(encoding)), "as it lies in one process"
        shown = torch.where(mask, encoding, encoding.tanh() * scale.to(encoding.dtype))
        state = state + self.drop(self.mix(self.norm(state + shown)) + self.places(places).squeeze(-1))
        return state if self.last else (state, encoding, ~mask, places, scale)


def several(width: int = 8, count: int = 4, dropout: float = 0.0):
    return [
        lambda: Encode(width),
        *(lambda last=i == count - 2: Decode(width, last, dropout) for i in range(count - 1)),
    ]


# Two tensors without gradients: layers before it do not train.
MaskOnly = layer_of(lambda m, x: (x.detach().clone(), x > 0), none=lambda: None)
masks = ready(LINEAR, MaskOnly, layer_of(lambda m, x, mask: m.linear(x) * mask), LINEAR)


@layer(what=lambda what: what, linear=lambda what: nn.Linear(8, 8))
def Returns(self, x: Tensor, *more: Tensor):
    """Returns a value that no layer can take."""
    y = self.linear(x)
    made = {"dict": {"a": y}, "object": (y, {"a": object()}), "none": (y, None), "nothing": {"a": 1}}
    made |= {"pair": (y, y)}
    return {**made, "sparse": (y, torch.eye(8).to_sparse())}[self.what]


class Names(NamedTuple):
    states: Tensor
    shift: float | None


@layer(down=lambda width: nn.Linear(width, width))
def Opens(self, x: Tensor) -> dict[str, Any]:
    """Tensors in a dict, a list and a tuple with names, with constants of all kinds beside them."""
    y = self.down(x)
    named = [Names(y, 0.5), (y.tanh(), True)]
    return {"named": named, "mask": None, "count": 2, "mode": "sum", "many": {"a": x > 0, "nan": float("nan")}}


@layer(down=lambda width, last: nn.Linear(width, width), last=lambda width, last: last)
def Middle(self, given: dict[str, Any]) -> Any:
    """Uses what is in there, and gives the same on with one more of `count`, the tensors changed."""
    names, (other, adds) = given["named"]
    assert type(names) is Names and given["mask"] is None and given["mode"] == "sum" and adds is True
    mixed = torch.where(given["many"]["a"], other, other * given["count"])
    y = names.states + self.down(mixed) + names.shift
    changed = {"named": [Names(y, names.shift), (mixed, adds)], "count": given["count"] + 1}
    return y if self.last else {**given, **changed}


def structured(width: int = 8, count: int = 4):
    made = [lambda last=i == count - 2: Middle(width, last) for i in range(count - 1)]
    return [lambda: Opens(width), *made]


# A number beside its output that no trial shows.
Wavers = layer_of(lambda m, x: {"y": [m.linear(x)], "count": int(not x.is_meta)})
wavers = ready(LINEAR, Wavers, layer_of(lambda m, given: m.linear(given["y"][0])), LINEAR)


class Tokens(nn.Module):
    """What a transformers model does before its decoder layers."""

    def __init__(self, config: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        super().__init__()
        self.tokens, self.rotary = nn.Embedding(config.vocab_size, config.hidden_size), LlamaRotaryEmbedding(config)

    def forward(self, ids: Tensor) -> Any:
        x = self.tokens(ids)
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        return zbc.alongside(x, attention_mask=None, position_embeddings=self.rotary(x, places), use_cache=False)


def llama_config() -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaConfig(vocab_size=32, num_hidden_layers=2, attn_implementation="sdpa", **sizes)


def transformers_llama():
    """Decoder layers, norm and head as they come from transformers, nothing around them."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

    config = llama_config()
    layers = [partial(LlamaDecoderLayer, config, i) for i in range(config.num_hidden_layers)]
    norm, head = partial(LlamaRMSNorm, 16), partial(nn.Linear, 16, 32, bias=False)
    return [partial(Tokens, config), *layers, norm, head]


@layer(one=lambda named: LINEAR(), other=lambda named: nn.Linear(8, 4), named=lambda named: named)
def Both(self, x: Tensor) -> Any:
    """Two heads."""
    one, other = self.one(x), self.other(x)
    return {"one": one, "rest": [other, None]} if self.named else (one, other)


def two_heads(named: bool = False):
    return [LINEAR, partial(Residual, 8), partial(Residual, 8), partial(Both, named)]


def both_errors(outputs: Any, target: Tensor) -> Tensor:
    one, other = (outputs["one"], outputs["rest"][0]) if isinstance(outputs, dict) else outputs
    return functional.mse_loss(one, target) + functional.mse_loss(other, target[:, :4])


def returning(what: str, last: bool = False):
    return [nn.Linear(8, 8), Returns(what), nn.Linear(8, 8), nn.Linear(8, 8)]


ends_in_two = ready(LINEAR, LINEAR, LINEAR, partial(Returns, "pair"))


def sharing(width: int = 8, count: int = 8, together: bool = False):
    """Residual layers; `together`: `down.weight` of the first, the fifth and the last is already one object."""
    made = [Residual(width) for _ in range(count)]
    if together:
        for index in (4, count - 1):
            made[index].down.weight = made[0].down.weight
    return made


@layer(down=lambda dtype: nn.Linear(8, 8, dtype=dtype))
def Sum(self, x: Tensor) -> Tensor:
    return x + torch.tanh(self.down(x.to(self.down.weight.dtype))).to(x.dtype)


def sums_in(dtype: str, frozen: bool):
    """Four layers of a custom type; the first weight may be frozen."""

    def first() -> nn.Module:
        layer = Sum(getattr(torch, dtype))
        layer.down.weight.requires_grad = not frozen
        return layer

    return [first, *(lambda: Sum(getattr(torch, dtype)) for _ in range(3))]
