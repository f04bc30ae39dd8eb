"""Words in a model of transformers: the layer that makes its logits, and tables that ranks can share. Sharding of its
layers over a tensor parallel group, by the model's own plan.

`base_model_tp_plan` has a style for a module or a parameter; others are whole on each rank. Embedding and head are cut
by words, as those of built-in models, whatever it says.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.runtime.core.private import real_tensors
from zbc.runtime.features.tensor_parallel import Cut, Group, look_up
from zbc.runtime.features.words.words import Shaped
from zbc.training.models.registered import Stack
from zbc.training.models.sharding import Shares, columns, keep, keep_words, rows
from zbc.training.models.shared_words import Ends
from zbc.training.probing.probe import graph

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_UNEQUAL = ("apertus", "doge", "inkling_text")  # whose plans lack sums, or cut what is whole (bench/models.py)


class Entered:
    """`Group.enter`, once for all modules that read the same tensor; `rotary`: features that have the positions."""

    _last: tuple[Any, Any] = None, None

    def __init__(self, group: Group, rotary: int) -> None:
        self.group, self.rotary = group, rotary

    def __call__(self, x: Any, *others: Any) -> tuple[Any, ...]:
        if self._last[0] is not x:
            self._last = x, self.group.enter(x)
        return self._last[1], *others

    def forget(self) -> None:
        self._last = None, None


class Style(NamedTuple):
    """How ranks share a module: `cut` by its outputs, its inputs or not at all, in `halves`; `before` makes its
    arguments, `after` its output; `terms`: each rank has a term of its gradients."""

    cut: Callable[..., dict[str, Cut]] | None = None
    before: Callable[..., tuple[Any, ...]] | None = None
    after: Callable[..., Any] | None = None
    halves: int = 1
    terms: bool = False


def _enter_all(met: Entered, _: Any, x: Tensor, *others: Tensor) -> tuple[Any, ...]:
    """Of experts also the weights of their outputs."""
    return *met(x), *(met.group.enter(other) if other.is_floating_point() else other for other in others)


def _enter_rotary(met: Entered, _: Any, y: Tensor) -> Tensor:
    rest = y.shape[-1] - met.rotary
    return torch.cat([y[..., :rest], met.group.enter(y[..., rest:])], -1)


_COLUMNS = Style(columns, lambda met, _, *x: met(*x))
_ROWS = Style(rows, None, lambda met, _, y: met.group.leave(y))
_ALL_COLUMNS = _COLUMNS._replace(after=lambda met, linear, y: met.group.join(y, linear.out_features * met.group.size))
_OF_ALL_ROWS = _ROWS._replace(before=lambda met, _, x: (met.group.split(x),))
STYLES = {
    "colwise": _COLUMNS,
    "packed_colwise": _COLUMNS._replace(halves=2),
    "colwise_gather_output": _ALL_COLUMNS,
    "colwise_rep": _ALL_COLUMNS,
    "rowwise": _ROWS,
    "packed_rowwise": _ROWS._replace(halves=2),
    "rowwise_split_input": _OF_ALL_ROWS,
    "rowwise_rep": _OF_ALL_ROWS,
    "moe_tp_experts": Style(None, _enter_all, _ROWS.after),
    "moe_identity_expert": Style(None, lambda met, _, x, *others: (x / met.group.size, *others)),
    "mla_kv_a_proj": Style(None, None, _enter_rotary),
    "all_reduce": Style(None, None, _ROWS.after),
    "replicated_with_grad_allreduce": Style(terms=True),
    **dict.fromkeys(("local_params", "replicate"), Style()),
}


class _Meets(nn.Module):
    """Beside the class of a module: it meets the other ranks around its forward."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        style, met = self.__dict__["meets"]
        y = super().__call__(*(given if style.before is None else style.before(met, self, *given)), **named)
        return y if style.after is None else style.after(met, self, y)


class _OwnWords(nn.Module):
    """Beside the class of an embedding of which a rank has the words `meets`."""

    def __call__(self, ids: Tensor) -> Any:
        group, first, count = self.__dict__["meets"]
        return look_up(group, super().__call__, first, count)(ids)


def _become(module: nn.Module, beside: type[nn.Module], meets: Any) -> None:
    module.__class__ = type(type(module).__name__, (beside, type(module)), {})
    module.__dict__["meets"] = meets


def shard(part: nn.Module, inside: str, prefix: str, root: Any, met: Entered) -> Shares:
    """Reduces a decoder layer, `inside` of a part, to this rank's shard, in place; `prefix`: its name in the model
    `root`, with a dot. Raises E119 for a style that is not known, or parts that ranks cannot share equally."""
    cuts, terms, plan, kind = dict[str, Cut](), set[str](), root.tp_plan, root.config.model_type
    told = [getattr(root.config.get_text_config(), f"num_{of}_heads", 0) for of in ("attention", "key_value")]
    heads = {key: count for key, count in zip(("q_proj", "k_proj", "v_proj"), (*told, told[1]), strict=True) if count}

    def theirs(name: str) -> str:
        return prefix + name.removeprefix(inside).removeprefix(".")

    def style_of(name: str) -> Style:
        said = plan.get(_NUMBER.sub("*", theirs(name)), "replicate")
        if said not in STYLES:
            raise _refused(f"the tensor parallelism of {theirs(name)} of {kind} is {said!r}, which zbc does not have")
        return STYLES[said]

    layer = part.get_submodule(inside)
    for name, module in [*layer.named_modules(prefix=inside)]:
        style, (path, _, leaf) = style_of(name), name.rpartition(".")
        if style.cut is not None:
            turned = isinstance(module, Stack) and module.transposed
            cut = {columns: rows, rows: columns}[style.cut] if turned else style.cut
            width = module.out_features if cut is columns else module.in_features
            parts = heads.get(leaf, width) if style is _COLUMNS else width // style.halves
            if parts % met.group.size:
                text = f"{theirs(name)} of {kind} has {parts} parts, which {met.group.size} ranks cannot share equally"
                raise _refused(text)
            found = cut(part.get_submodule(path), leaf, [width // style.halves] * style.halves, met.group)
            cuts |= {f"{path}.{local}": cut for local, cut in found.items()}
        trained = {local for local, p in module.named_parameters(prefix=name) if p.requires_grad}
        if style.terms or style.cut is not None:
            terms |= {local for local in trained - cuts.keys() if style.terms or ".lora." in local}
        if (style.before or style.after) and not isinstance(module, Stack):
            _become(module, _Meets, (style, met))
    for name, whole in [*layer.named_parameters(prefix=inside)]:  # that are no module's weight
        if name not in cuts and (style := style_of(name)).cut is not None:
            path, _, leaf = name.rpartition(".")
            dim = -1 if whole.dim() == 1 or style.cut is rows else -2
            halves = [whole.shape[dim] // style.halves] * style.halves
            cuts[name] = keep(part.get_submodule(path), leaf, dim, halves, met.group)
    return Shares(cuts, frozenset(terms))


def by_words(end: nn.Module, module: Any, met: Entered, *, meets: bool) -> dict[str, Cut]:
    """Cuts the embedding or the head, a linear layer, `module` of an `end` of a model, by words; with `meets` the
    head's input is entered."""
    (name,) = (name for name, one in end.named_modules() if one is module)
    if not isinstance(module, nn.Linear):
        cut, *own = keep_words(module, met.group)
        _become(module, _OwnWords, (met.group, *own))
        return {f"{name}.weight": cut}
    path, _, leaf = name.rpartition(".")
    found = columns(end.get_submodule(path), leaf, [module.out_features], met.group)
    if meets:
        _become(module, _Meets, (_COLUMNS, met))
    return {f"{path}.{local}".lstrip("."): cut for local, cut in found.items()}


def check(model: Any, found: Sequence[Shares]) -> None:
    """Raises E119 for a model none of whose decoder layers are cut, or by a plan that is not right."""
    kind = model.root.config.model_type
    if kind in _UNEQUAL or not any(one.cuts for one in found):
        raise _refused(f"{kind} of transformers has no plan of tensor parallelism that is right")


def _refused(text: str) -> ZbcError:
    return ZbcError("E119", f"model: {text}", hint="set parallel.tp = 1")


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
