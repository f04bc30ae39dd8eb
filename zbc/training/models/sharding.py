"""Sharding of the built-in layers over a tensor parallel group.

    embed    rows of the token table, by words                           leave after the look-up
    blocks   heads of attention, columns of the MLP                      enter after each norm, leave after proj, down
    experts  columns of each, as in the MLP                              enter with weights, leave after their sum;
                                                                         the router's logits of all tokens are whole
             folded: of the shared one                                   around it; others run on a share of the tokens
    head     rows of the projection, by words                            enter after the norm

Norms, learned positions and biases after an all-reduce are not sharded: only the first rank has the biases of proj and
down, and adds them. Norms of queries and keys are not sharded either, but each rank has the gradient of its own heads
only: `partial` gradients are summed once per step. So are those of unsharded adapters, `down` of column parallel and
`up` of row parallel layers; and, with sequence parallelism, those of all unsharded parameters.

A user's layer has a method `shard(group)` that returns the parameters to shard and their dimensions:
{"up.weight": 0, "down.weight": 1}, or (dimension, sizes of blocks) if each block is sharded separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job import userobject
from zbc.runtime.core.feature import Site
from zbc.runtime.core.split import GroupedLinear
from zbc.runtime.features.context_parallel import Spread
from zbc.runtime.features.experts import expert_parallel
from zbc.runtime.features.tensor_parallel import Cut, Group, Shared, look_up
from zbc.training.models.adapters import WithAdapters
from zbc.training.models.experts import Expert, Experts
from zbc.training.models.gpt import Block, Embed, GptHead
from zbc.training.models.model import by_words
from zbc.training.models.parts import Rotary, same
from zbc.training.models.shared_words import Tables


class Shares(NamedTuple):
    """Parameters of a layer, by names inside of it: `cuts` of sharded ones, and those with `partial` gradients."""

    cuts: Mapping[str, Cut]
    partial: frozenset[str] = frozenset()


def shard(name: str, layer: nn.Module, group: Group, *, joined: bool) -> Shares:
    """Reduces a layer to this rank's shard, in place. `joined`: the head gathers all logits, for a loss that needs
    whole ones. Raises E119 for layers without `shard`."""
    if isinstance(layer, Embed | Block | GptHead):
        if isinstance(layer, Embed):
            found = _embed(layer, group)
        else:
            found = _head(layer, group, joined) if isinstance(layer, GptHead) else _block(layer, group)
        trained = [name for name, p in layer.named_parameters() if p.requires_grad and not name.endswith(_ADDED)]
        terms, apart = (_OF_HEADS + _OF_TOKENS, _APART) if group.folded else (_OF_HEADS, ())
        whole = [n for n in trained if n not in found and not n.startswith(apart)]
        return Shares(found, frozenset(n for n in whole if group.sequence or n.startswith(terms) or ".lora." in n))
    if callable(told := getattr(layer, "shares", None)):
        made: Shares = told(group, joined)
        return made
    if callable(getattr(layer, "shard", None)):
        return Shares(_by_its_user(name, layer, group))
    text = f"model: layer {name} ({type(layer).__name__}) cannot be shared by {group.size} tensor-parallel ranks"
    raise ZbcError("E119", text, hint="give it a method shard(group) (docs/tensor_parallel.md), or set parallel.tp = 1")


_OF_HEADS = ("norm_q.", "norm_k.")
_OF_TOKENS, _APART = ("mlp.router.",), ("mlp.experts.",)  # with whole experts
_ADDED = ("proj.bias", "down.bias")  # after an all-reduce: the first rank's only


def _by_its_user(name: str, layer: nn.Module, group: Group) -> dict[str, Cut]:
    told = userobject.call(lambda: dict(cast(Any, layer).shard(group)), {}, name, "model layer")
    found, parameters = {}, dict(layer.named_parameters())
    for local, way in told.items():
        dim, blocks = way if isinstance(way, tuple) else (way, None)
        whole = parameters.get(local)
        if whole is None or not (isinstance(dim, int) and 0 <= dim < whole.dim()):
            text = f"model: shard of {name} cuts {local!r} along {dim!r}, which it has not"
            raise ZbcError("E119", text, hint="return names of named_parameters(), each with a dimension from 0 on")
        path, _, key = local.rpartition(".")
        found[local] = keep(layer.get_submodule(path), key, dim, list(blocks or [whole.shape[dim]]), group)
    return found


def share_out(
    site: Site, shared: Shared, tables: Tables | None, tokens: Tensor | None
) -> Callable[[str, nn.Module], None]:
    """A function that cuts a layer to this rank's shard, and records the cuts in `shared`; `tokens`: the positions of
    this rank's, if ranks share them."""
    joined, manifest = not by_words(site.settings.model), site.manifest

    def share(name: str, layer: nn.Module) -> None:
        if tables is not None:
            tables.cut(name, layer)
        if shared.group is not None:
            found = shard(name, layer, shared.group, joined=joined)
            shared.cuts.update({f"{name}.{local}": cut for local, cut in found.cuts.items()})
            shared.partial.update(f"{name}.{local}" for local in found.partial)
        if shared.tokens is not None and tokens is not None:
            spread(layer, Spread(shared.tokens), tokens, unequal=manifest.balance is not None or bool(manifest.tokens))
        if shared.swaps is not None:
            shared.experts.extend(expert_parallel.share(name, layer, shared.swaps))

    return share


def spread(layer: nn.Module, tokens: Spread, rows: Tensor, *, unequal: bool = False) -> None:
    """Makes a layer run on this rank's tokens, at the positions `rows` of their sequence (context parallel); `unequal`:
    sequences have several samples, or are of several lengths."""
    for module in layer.modules():
        if isinstance(module, Embed | Rotary) and unequal:
            module.own = tokens.positions
        elif isinstance(module, Embed):
            module.index = module.index[rows]
        elif isinstance(module, Rotary):
            module.cos, module.sin = module.cos[rows], module.sin[rows]
        elif isinstance(module, Block):
            module.attend = tokens.attention
        elif isinstance(module, Experts):
            module.tokens = (*module.tokens, tokens.group)
        elif callable(told := getattr(module, "spread", None)):
            told(tokens, None if unequal else rows)


def _embed(layer: Embed, group: Group) -> dict[str, Cut]:
    layer.place = group.place if group.sequence else 0
    if layer.tokens is None:  # the vocabulary is parallel: see shared_words.py
        layer.look_up = group.leave
        return {}
    cut, first, count = keep_words(layer.tokens, group)
    layer.look_up = look_up(group, layer.tokens, first, count)
    return {"tokens.weight": cut}


def keep_words(table: nn.Embedding, group: Group) -> tuple[Cut, int, int]:
    """Cuts an embedding by words; also returns the first of this rank's and their number."""
    words, padding = table.num_embeddings, table.padding_idx
    first, stop = group.bounds(words)
    cut = keep(table, "weight", 0, [words], group)
    table.num_embeddings = stop - first
    table.padding_idx = None if padding is None or not first <= padding < stop else padding - first
    return cut, first, stop - first


def _head(layer: GptHead, group: Group, joined: bool) -> dict[str, Cut]:
    layer.enter = group.enter
    if not isinstance(layer.logits, nn.Linear):  # the vocabulary is parallel
        return {}
    words = layer.logits.out_features
    if joined:
        layer.join = lambda x: group.join(x, words)
    return columns(layer, "logits", [words], group)


def _block(layer: Block, group: Group) -> dict[str, Cut]:
    """Shards a block. Rows of qkv are all queries, keys, values; of gate_up the gate, then up. Heads are not split."""
    parts = [heads * layer.size for heads in (layer.heads, layer.kv_heads, layer.kv_heads)]
    layer.heads, layer.kv_heads = layer.heads // group.size, layer.kv_heads // group.size
    found = columns(layer, "qkv", parts, group) | rows(layer, "proj", parts[:1], group)
    experts = _folded if group.folded else _experts
    found |= experts(layer.mlp, group) if isinstance(layer.mlp, Experts) else _mlp(layer, group)
    layer.enter, layer.leave = group.enter, group.leave
    return found


def _experts(layer: Experts, group: Group) -> dict[str, Cut]:
    layer.enter, layer.leave = group.enter, group.leave
    layer.meet = group._replace(sequence=False).enter
    if group.sequence:
        layer.whole, layer.rows = group.whole, same
    inside = {path: module for path, module in layer.named_modules() if isinstance(module, Expert)}
    return {f"mlp.{path}.{n}": cut for path, expert in inside.items() for n, cut in _mlp(expert, group).items()}


def _folded(layer: Experts, group: Group) -> dict[str, Cut]:
    """Shards only the shared expert; each rank routes a share of the tokens to whole experts."""
    layer.fold, layer.tokens = group, (*layer.tokens, group)
    if layer.shared is None:
        return {}
    layer.shared.enter, layer.shared.leave, layer.rows = group.enter, group.leave, same
    return {f"mlp.shared.{name}": cut for name, cut in _mlp(layer.shared, group).items()}


def _mlp(layer: nn.Module, group: Group) -> dict[str, Cut]:
    gated = hasattr(layer, "gate_up")
    name = "gate_up" if gated else "up"
    width = _linear(layer, "down").in_features
    return columns(layer, name, [width] * (2 if gated else 1), group) | rows(layer, "down", [width], group)


def columns(layer: nn.Module, name: str, parts: list[int], group: Group) -> dict[str, Cut]:
    """Shards a linear layer by its outputs, each of its `parts` separately (column parallel)."""
    linear = _linear(layer, name)
    dims = {key: dim for key, dim in (("weight", -2), ("bias", -1)) if getattr(linear, key) is not None}
    found = {f"{name}.{key}": keep(linear, key, dim, parts, group) for key, dim in dims.items()}
    linear.out_features = linear.weight.shape[-2]
    return found | dict(_adapters(linear, name, parts, group))


def _adapters(linear: nn.Module, name: str, parts: list[int], group: Group) -> Iterator[tuple[str, Cut]]:
    """Shards the adapters of a column parallel layer: `down` is whole on each rank, `up` has its outputs only."""
    if isinstance(linear, WithAdapters):
        starts = [*accumulate(parts, initial=0)]
        for key, start, stop in linear.spans:
            up = linear.pair(key).up
            inside = [part for part, at in zip(parts, starts, strict=False) if start <= at < stop]
            yield f"{name}.lora.{key}.up.weight", keep(up, "weight", -2, inside, group)
            up.out_features = up.weight.shape[-2]
        own = [*accumulate((high - low for low, high in map(group.bounds, parts)), initial=0)]
        linear.spans = tuple((key, own[starts.index(a)], own[starts.index(b)]) for key, a, b in linear.spans)


def rows(layer: nn.Module, name: str, parts: list[int], group: Group) -> dict[str, Cut]:
    """Shards a linear layer by its inputs, each of its `parts` separately (row parallel). Its bias is added once, by
    the first rank."""
    linear = _linear(layer, name)
    cut = keep(linear, "weight", -1, parts, group)
    linear.in_features = linear.weight.shape[-1]
    if group.place:
        linear.register_parameter("bias", None)
    found = {f"{name}.weight": cut}
    if isinstance(linear, WithAdapters):
        for key, *_ in linear.spans:
            down = linear.pair(key).down
            found[f"{name}.lora.{key}.down.weight"] = keep(down, "weight", -1, parts, group)
            down.in_features = down.weight.shape[-1]
    return found


def _linear(layer: nn.Module, name: str) -> nn.Linear | GroupedLinear:
    found = layer.get_submodule(name)
    assert isinstance(found, nn.Linear | GroupedLinear)
    return found


def keep(module: nn.Module, key: str, dim: int, blocks: list[int], group: Group) -> Cut:
    whole: nn.Parameter = getattr(module, key)
    cut = Cut(tuple(whole.shape), dim % whole.dim(), tuple(blocks), group.size, group.place)
    setattr(module, key, nn.Parameter(cut.of(whole.detach()), whole.requires_grad))
    return cut
