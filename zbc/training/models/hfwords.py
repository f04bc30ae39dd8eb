"""Words in a model of transformers: the layer that makes its logits, and tables that ranks can share."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from zbc.runtime.core.private import real_tensors
from zbc.runtime.features.words.words import Shaped
from zbc.training.models.shared_words import Ends
from zbc.training.probing.probe import graph

UNLIKE = "its logits are not products of a linear layer without a bias, maybe scaled, or capped at 35 or less"
_LITTLE, _MUCH, _CAP = 2.0**-13, 2.0**13, 35  # of logits: where caps are not seen, where they are all; exp(-2 _CAP) > 0


def read(y: Tensor) -> set[int]:
    """The ids of the leaves that a tensor is computed from."""
    return {id(node.variable) for node in graph([y]) if hasattr(node, "variable")}


@lru_cache(8)
def output(model: Any) -> tuple[str, Shaped] | None:
    """The name of the linear layer whose products make the logits, and how: maybe scaled or capped. None if there
    is no such layer."""
    own = model.root.get_output_embeddings()
    with real_tensors(), contextlib.suppress(Exception):  # of its own code
        (name,) = (name for name, one in model.root.named_children() if one is own and type(own) is nn.Linear)
        x = torch.linspace(-8, 8, 8, device="cpu").view(1, 1, -1)
        scale, most = (model.head_of(name, x * by).abs().max().item() / (8 * by) for by in (_LITTLE, _MUCH))
        shaped = Shaped(scale) if most > scale / 2 else Shaped(float(f"{scale:.6g}"), most * 8 * _MUCH)
        same = torch.allclose(shaped.logits(x.clone()), model.head_of(name, x).float(), rtol=1e-6, atol=0)
        if own.bias is None and same and shaped.cap <= _CAP:
            return str(name), shaped
    return None


@lru_cache(8)
def ends_by_words(model: Any) -> tuple[bool, bool]:
    """Whether ranks can share the embedding and the head of a model by words: each word's logits are its own."""
    table, head = model.root.get_input_embeddings(), model.root.get_output_embeddings()
    rows_apart, apart = isinstance(table, nn.Embedding) and table.max_norm is None, output(model) is not None
    tied = head is not None and table.weight is head.weight
    return (rows_apart and apart,) * 2 if tied else (rows_apart, apart)


@lru_cache(8)
def tables(model: Any) -> Ends | str:
    """The tables of which ranks can have the rows of some words; a text that says why they cannot."""
    table, made, found = model.root.get_input_embeddings(), output(model), list[set[int]]()
    if made is None:
        return UNLIKE
    if not ends_by_words(model)[0] or model.words != table.num_embeddings:
        return "its embedding is not a table of words"
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
    given = {"input_ids": ids}, {"inputs_embeds": torch.empty(1, 8, table.embedding_dim, device="meta")}
    with real_tensors(), contextlib.suppress(Exception):  # of its own code
        found += (read(model.stubbed(model.root, model.path, 0, **inputs)[0]) for inputs in given)
    if len(found) < 2 or found[0] - found[1] != {id(table.weight)}:
        return "its forward reads words beside its embedding"
    parts = (0, table), (len(model.stack) + 1, model.root.get_submodule(made[0]))
    named = {id(one): path for path, one in model.root.named_modules()}
    names = [f"layers.{place}.root.{named[id(one)]}.weight" for place, one in parts]
    if model.ties and model.ties != {names[1]: names[0]}:
        return "it ties other weights than its embedding and its head"
    shapes = {name: (model.words, one.weight.shape[1]) for name, (_, one) in zip(names, parts, strict=True)}
    return Ends({k: size for k, size in shapes.items() if k not in model.ties}, made[1], table.padding_idx)
