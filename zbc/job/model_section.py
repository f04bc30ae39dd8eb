"""`[model]`: the built-in families and their sizes, factories of users, and the checks of both."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from zbc.excludes import TRANSFORMERS as TRANSFORMERS
from zbc.job import graph
from zbc.job.section import FACTORY, Count, NotNegative, Positive, Problem, Section, Width, key
from zbc.job.toml import Document
from zbc.job.unread import asks
from zbc.job.wording import did_you_mean

if TYPE_CHECKING:
    from zbc.job.job import Draft

BUILTIN = ("gpt", "llama")
Scale = Annotated[Positive, Field(ge=2.0**-126, lt=2.0**127)]
Group = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]  # a name in a graph
_TIE = re.compile(r"layers\.(\d{1,6})\.[\w.]+")
_OF_LOSS = ("loss_chunk", "z_loss", "label_smoothing")
_ONLY_LLAMA = ("head_size", "window")
_EXPERTS = ("experts", "top_k", "router", "expert_groups", "balance_loss", "imbalance")
_ONLY_BUILTIN = (
    *("pretrained", "hidden", "heads", "kv_heads", "ffn_hidden", *_EXPERTS, *_OF_LOSS),
    *("norm_eps", "rope_theta", "variant", *_ONLY_LLAMA),
)
# Keys whose defaults hold in other families too.
_PLAIN = ("variant", "router", "balance_loss", "imbalance", "z_loss", "label_smoothing")
_FOREIGN = {  # family -> keys it does not have; a factory has none of them
    "gpt": _ONLY_LLAMA,
    "llama": (),
    TRANSFORMERS: tuple(key for key in _ONLY_BUILTIN if key not in ("pretrained", "experts", "variant", *_OF_LOSS)),
}
OWN_NORMS = "own norms"
VARIANTS = {
    "gpt": ("plain", "gpt2", "rotary"),
    "llama": ("plain", "qwen2", "qwen3"),
    TRANSFORMERS: ("plain", OWN_NORMS),
}


class Model(Section):
    """`[model]`: the model that is split into stages."""

    family: str = key("gpt", '"gpt", "llama", or "package.module:factory", a callable that returns the layers')
    layers: Count = key(..., "blocks of a family (embedding and head are extra), or layers of the factory")
    hidden: Width | None = key(None, "width of the residual stream")
    heads: Width | None = key(None, "attention heads")
    kv_heads: Width | None = key(None, "heads of keys and values; default heads")
    head_size: Width | None = key(None, "llama: width of a head; default hidden / heads")
    variant: Annotated[
        Literal["plain", "gpt2", "rotary", "qwen2", "qwen3", "own norms"],
        BeforeValidator(lambda given: "plain" if given == "llama" else given),
    ] = key(
        "plain",
        "gpt: gpt2 has GELU by tanh, rotary rotary positions; llama: qwen2 has biases of queries, keys and "
        "values, qwen3 norms of their heads; of transformers: own norms keeps its RMSNorms, in place of torch's",
    )
    window: Width | None = key(None, "llama: tokens that one sees, itself included; default all before")
    ffn_hidden: Width | Annotated[tuple[Width, Width], Field(strict=False)] | None = key(
        None,
        "width inside the MLP, or each expert; two: also of an expert that all tokens meet; default gpt 4 "
        "hidden, llama 8/3 hidden up to a multiple of 256",
    )
    experts: Width | None = key(None, "MLPs per block, each token meets top_k of them")
    top_k: Width | None = key(None, "experts that a token meets; default 2")
    router: Literal["softmax", "sigmoid", "softmax of all"] = key(
        "softmax",
        "what makes the scores of experts, by which they are chosen and weighed; the weights of a token's "
        'experts, if several, add up to 1, but for "softmax of all"',
    )
    expert_groups: tuple[Width, Width] | None = key(
        None,
        "equal groups of experts, and how many a token's experts are in: by the two largest scores of each",
        strict=False,
    )
    balance_loss: NotNegative | Annotated[tuple[NotNegative, NotNegative], Field(strict=False)] = key(
        0.0,
        "coefficient of the loss that evens the experts' loads, of each block; two: also by how much a "
        "step moves an expert's bias in its router towards even loads",
    )
    imbalance: Annotated[float, Field(ge=1, allow_inf_nan=False)] = key(
        1.0, "parallel.ep: rows of the rank with most, over the mean; for plans, see expert_load of a run"
    )
    vocab: Width | None = key(None, "size of the vocabulary")
    seq_len: Width | None = key(None, "tokens per sequence")
    norm_eps: Positive = key(1e-5, "added to the variance in norms")
    rope_theta: Positive = key(10000.0, "base of rotary positions")
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] = key(
        "float32",
        "what layers compute in, bfloat16 by autocast, float16 with a loss scale; fp8, for plans alone: "
        "bfloat16, whose linear layers in blocks multiply in it",
    )
    loss_scale: Scale | Annotated[tuple[Scale, Count], Field(strict=False)] = key(
        65536.0,
        "float16: factor of the loss in the first step; an overflow skips the step and halves it; two: "
        "also the steps in a row without an overflow that double it, default 2000",
    )
    parameters: Literal["float32", "bfloat16", "bfloat16 alone"] = key(
        "float32",
        "what forward reads; bfloat16, which needs dtype bfloat16, keeps float32 master weights and "
        "gradients, alone: no masters, steps round the weights themselves",
    )
    compile: bool = key(False, "torch.compile for the blocks of a family, or all layers of a factory; tried out first")
    config: str | None = key(
        None, "a config.json: the model as transformers builds it, without weights; in place of family"
    )
    pretrained: str | None = key(
        None, "a Hugging Face folder to take the weights from; without family: the model of transformers"
    )
    loss_chunk: Annotated[Count | None, BeforeValidator(lambda given: None if given == "auto" else given)] = key(
        None,
        'cross_entropy: tokens whose logits there are at once; "auto" (default): all of a microbatch, or '
        "1024 where a plan would not fit otherwise",
    )
    z_loss: NotNegative | Annotated[tuple[NotNegative, NotNegative], Field(strict=False)] = key(
        0.0,
        "cross_entropy: coefficient of the mean of log(sum of exp of logits)^2, which keeps them small; "
        "two: also of that of routers' logits",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = key(
        0.0, "cross_entropy: the share of a target's weight that all words have"
    )
    loss: str = key("cross_entropy", '"cross_entropy", "mse", or "package.module:function"')
    args: dict[str, Any] = key({}, "keyword arguments of the factory")
    ties: bool | dict[str, str] = key(
        {},
        "true: one matrix for embedding and head; a factory: parameters of other layers, in quotes: "
        '"layers.7.weight" = "layers.0.weight"',
    )
    graph: dict[Group, list[Count | Group]] = key(
        {}, "a factory that returns a dict: its groups of layers, each with their number and the groups that it reads"
    )

    @property
    def builtin(self) -> bool:
        """Whether layers and sizes are known before the model is built."""
        return self.family in BUILTIN

    @property
    def causal(self) -> bool:
        """Whether its layers are known: the last makes the logits of words, and those that draw do so each time."""
        return self.builtin or self.family == TRANSFORMERS

    @property
    def tie_embeddings(self) -> bool:
        """Whether embedding and head of a built-in family are one matrix."""
        return self.ties is True

    @property
    def tied(self) -> dict[str, str]:
        """The parameters of a factory's layers that are those of others."""
        return self.ties if isinstance(self.ties, dict) else {}

    @property
    def balances(self) -> tuple[float, float]:
        return self.balance_loss if isinstance(self.balance_loss, tuple) else (self.balance_loss, 0.0)

    @property
    def z_losses(self) -> tuple[float, float]:
        return self.z_loss if isinstance(self.z_loss, tuple) else (self.z_loss, 0.0)

    @property
    def lowered(self) -> bool:
        """Whether forward reads bfloat16 parameters."""
        return self.parameters != "float32"

    @property
    def master(self) -> bool:
        """Whether lowered parameters have float32 masters."""
        return self.parameters != "bfloat16 alone"

    @property
    def reads(self) -> dict[str, list[str]]:
        """The groups that each group of a graph reads."""
        return {name: [one for one in of if isinstance(one, str)] for name, of in self.graph.items()}

    @property
    def groups(self) -> dict[str, int]:
        """The layers of each group."""
        return {name: sum(one for one in of if isinstance(one, int)) for name, of in self.graph.items()}

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of its factory."""
        return self.args if self.loss_chunk is None else {**self.args, "chunk": self.loss_chunk}

    @property
    def tied_layers(self) -> set[int]:
        """The layers of a factory that share a parameter with another layer."""
        return {int(name.split(".")[1]) for pair in self.tied.items() for name in pair}

    @property
    def rotary(self) -> bool:
        return self.family == "llama" or self.variant == "rotary"

    @property
    def routed(self) -> range:
        """The layers with experts, counted with the embedding: of a factory all, since they are not known."""
        if not self.builtin:
            return range(self.layers)
        return range(1, self.layers + 1 if self.experts else 0)

    @property
    def head_width(self) -> int:
        """Features of one attention head of a built-in family."""
        return self.head_size or (self.hidden or 0) // (self.heads or 1)

    @property
    def kv_width(self) -> int:
        """Features of all keys, and of all values, of a built-in family."""
        return (self.kv_heads or self.heads or 0) * self.head_width

    @property
    def mlp_width(self) -> int:
        """Features inside the MLP, or each expert."""
        hidden, given = self.hidden or 0, self.ffn_hidden
        own = given[0] if isinstance(given, tuple) else given
        return own or (4 * hidden if self.family == "gpt" else 256 * -(-8 * hidden // (3 * 256)))

    @property
    def shared_hidden(self) -> int:
        """Features inside the expert that all tokens meet; 0 without one."""
        return self.ffn_hidden[1] if isinstance(self.ffn_hidden, tuple) else 0

    @property
    def met(self) -> int:
        """Experts per token; 0 in a model without experts."""
        return (self.top_k or min(2, self.experts)) if self.experts else 0

    @property
    def normed(self) -> bool:
        """Whether the weights of a token's experts are divided by their sum."""
        return self.met > 1 and self.router != "softmax of all"


def problems(model: Model, draft: Draft) -> Iterator[Problem]:
    """Problems of a section that could be parsed: E103, E105, E110."""
    if model.builtin:
        for name in ("hidden", "heads", "vocab", "seq_len"):
            if getattr(model, name) is None:
                text = f"model.{name} is missing (family {model.family} needs it)"
                yield "E105", "[model]", text, f"add {name} = ... ({Model.model_fields[name].description})"
        yield from _sizes(model)
    elif not FACTORY.fullmatch(model.family):
        hint = did_you_mean(model.family, BUILTIN) or 'use "gpt", "llama" or "package.module:factory"'
        yield "E103", "model.family", f"unknown model.family {model.family!r}", hint
    yield from _misplaced(model, draft.document)
    if model.lowered and model.dtype not in ("bfloat16", "fp8"):
        text = f'model.parameters = "{model.parameters}" computes in bfloat16, model.dtype is "{model.dtype}"'
        yield "E110", "model.parameters", text, 'set model.dtype = "bfloat16"'
    if model.dtype == "fp8" and not model.builtin:
        yield "E110", "model.dtype", 'model.dtype = "fp8" is for built-in models', 'set model.dtype = "bfloat16"'
    if model.builtin:
        yield from _experts(model)
    yield from _ties(model)
    yield from graph.problems(model)
    if model.loss not in ("cross_entropy", "mse") and not FACTORY.fullmatch(model.loss):
        hint = 'use "cross_entropy", "mse" or "package.module:function"'
        yield "E103", "model.loss", f"unknown model.loss {model.loss!r}", hint
    for name in _OF_LOSS if model.causal and model.loss != "cross_entropy" else ():
        if asks(model, name):
            text = f"model.{name} is for cross_entropy, model.loss is {model.loss!r}"
            yield "E110", f"model.{name}", text, "drop it, or model.loss"


def _ties(model: Model) -> Iterator[Problem]:
    """Problems of `ties` that show before the layers are known."""
    if model.tied if model.builtin else model.tie_embeddings:
        text = f"model.ties names parameters of a factory's layers, or is true; family is {model.family}"
        hint = "set ties = true for embedding and head, or drop it" if model.builtin else "name them, or drop it"
        yield "E110", "model.ties", text, hint
    for name, owner in model.tied.items():
        key, text = ("model", "ties", name), f"model.ties has {name!r} = {owner!r}"
        layers = [int(match[1]) for match in map(_TIE.fullmatch, (name, owner)) if match]
        if len(layers) < 2 or max(layers) >= model.layers:
            yield "E110", key, text, f'write "layers.N.name" = "layers.M.name", layers 0 to {model.layers - 1}'
        elif layers[0] == layers[1] or owner in model.tied:
            why = "is in the same layer" if layers[0] == layers[1] else f"is itself tied ({owner})"
            yield "E110", key, f"{text}, which {why}", "name one owner in another layer for all that share a weight"


def _experts(model: Model) -> Iterator[Problem]:
    for name in _EXPERTS[1:]:
        if model.experts is None and asks(model, name):
            text = f"model.{name} is for models with experts, model.experts is not set"
            yield "E110", f"model.{name}", text, "set model.experts, or drop it"
    if model.experts and model.top_k and model.top_k > model.experts:
        text = f"model.top_k = {model.top_k} is more than model.experts = {model.experts}"
        yield "E110", "model.top_k", text, f"use top_k = {model.experts} or less"
    yield from _groups(model)
    for name, there in (("ffn_hidden", model.shared_hidden), ("z_loss", model.z_losses[1])):
        if there and model.experts is None:
            text = f"the second number of model.{name} is for models with experts, model.experts is not set"
            yield "E110", f"model.{name}", text, "set model.experts, or give one"


def _groups(model: Model) -> Iterator[Problem]:
    experts = model.experts
    if experts is None or model.expert_groups is None:
        return
    key, (groups, limit) = "model.expert_groups", model.expert_groups
    if experts % groups:
        text = f"{key} has {groups} groups, which does not divide model.experts = {experts}"
        yield "E110", key, text, "use a divisor, such as the number of nodes that have the experts of a block"
    elif limit > groups:
        yield "E110", key, f"{key} has {limit} of {groups} groups", f"use [{groups}, {groups}], or fewer of them"
    elif model.met > limit * experts // groups:
        text = f"{key} leaves a token {limit * experts // groups} experts, and it meets model.top_k = {model.met}"
        yield "E110", key, text, f"use [{groups}, {-(-model.met * groups // experts)}], or more of them"


def foreign(model: Model) -> tuple[str, ...]:
    """The keys of [model] that its family does not have."""
    return _FOREIGN.get(model.family, _ONLY_BUILTIN)


def _misplaced(model: Model, document: Document) -> Iterator[Problem]:
    """E110 for keys of another family, which are refused rather than ignored."""
    if not model.builtin and not FACTORY.fullmatch(model.family):  # another rule rejects the family
        return
    for name in foreign(model):
        if document.has(("model", name)) and (name not in _PLAIN or asks(model, name)):
            hint = "drop it, or choose another family" if model.builtin else "drop it; a factory takes [model.args]"
            yield "E110", f"model.{name}", f"model.{name} is not for family {model.family}", hint
    known = VARIANTS.get(model.family, (model.variant,))
    if model.variant not in known:
        text = f'model.variant = "{model.variant}" is not for family {model.family}'
        yield "E110", "model.variant", text, f"use {' or '.join(map(json.dumps, known[1:]))}, or drop it"
    if model.args and model.builtin:
        text = f"model.args belongs to a factory, family is {model.family}"
        yield "E110", "model.args", text, 'drop it, or set family = "package.module:factory"'


def _sizes(model: Model) -> Iterator[Problem]:
    hidden, heads = model.hidden, model.heads
    if not hidden or not heads:
        return
    if model.head_size is None and hidden % heads:
        text = f"model.heads = {heads} does not divide model.hidden = {hidden}"
        yield "E110", "model.heads", text, f"use heads = {_divisors_near(hidden, heads)}"
    elif model.rotary and model.head_width % 2:
        text = f"rotary positions need an even head size, it is {model.head_width}"
        fix = "drop variant, or use other heads" if model.family == "gpt" else "use other heads or head_size"
        yield "E110", "model.variant" if model.family == "gpt" else "model.heads", text, fix
    if model.kv_heads is not None and heads % model.kv_heads:
        text = f"model.kv_heads = {model.kv_heads} does not divide model.heads = {heads}"
        yield "E110", "model.kv_heads", text, f"use kv_heads = {_divisors_near(heads, model.kv_heads)}"
    if not model.rotary and asks(model, "rope_theta"):
        text = "model.rope_theta needs rotary positions"
        yield "E110", "model.rope_theta", text, 'set variant = "rotary", or drop it'


def _divisors_near(whole: int, number: int) -> str:
    """The divisors of `whole` next to `number`, as `4 or 8`; searched within 10,000, as numbers may be huge."""
    reach = 10_000
    below = next((d for d in range(number, max(0, number - reach), -1) if whole % d == 0), 1)
    above = next((d for d in range(number + 1, number + reach) if whole % d == 0), whole)
    return f"{below} or {above}" if below != above else str(below)
