"""Samples of a user's dataset, in one of several formats, as pairs (input, target) of tensors.

    (x, y)                                     tensors, numpy arrays, numbers or lists of numbers
    {"input": x, "target": y}                  the same
    {"input_ids": x, "labels": y, ..}          as in Hugging Face: the target of a token is the label of the next one
    {"image": x, "mask": m, "boxes": y, ..}    entries for the layers of a user and the loss, by the names of their
                                               parameters; in a graph of layers by groups. A dataclass is the same

x and y of a pair may be mappings, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.job import spec, userobject
from zbc.job.model_section import TRANSFORMERS
from zbc.runtime.core.tensors import IGNORED
from zbc.training.data.chat import CHAT
from zbc.training.models.model import LOSSES

HINT = "set model.vocab to that of the tokenizer and plan again; -100 marks targets that do not count"
_NAMES = (("input", "target"), ("inputs", "targets"), ("x", "y"))
_TOKENS, _LABELS, _MASK = "input_ids", "labels", "attention_mask"
_ELSE = frozenset({"token_type_ids", "special_tokens_mask", "length"})  # keys that tokenizers add


class Samples(Protocol):
    """A map-style dataset that returns whole microbatches. Numbers continue after the last sample: in epoch `e` sample
    `i` has the number i + e x len."""

    def __len__(self) -> int: ...
    def rows(self, indices: Sequence[int], which: int) -> Any:
        """The inputs (`which` = 0) or the targets (1) of these samples, stacked along a new first dimension."""

    def inputs(self, indices: Sequence[int]) -> Any:
        return self.rows(indices, 0)

    def targets(self, indices: Sequence[int]) -> Any:
        return self.rows(indices, 1)

    def digest(self) -> int:
        """A digest of a few samples, 40 bits, which ranks compare. Raises E505 if two reads of one sample differ. 0 for
        data that depend only on files and the seed, which are not compared."""
        return 0


class UnfitError(Exception):
    """The reason why a sample is not a pair."""


class Targets(NamedTuple):
    """The entries of a sample that the loss takes: parameters after the output, the first one the target of a pair;
    `needed` ones without a default; `free`: it takes any. A loss of zbc takes the first that there is, `alone`."""

    names: tuple[str, ...]
    needed: frozenset[str] = frozenset()
    alone: bool = False
    free: bool = False

    @classmethod
    def of(cls, model: spec.Model) -> Targets | None:
        """None for models of zbc and of transformers, whose samples are pairs."""
        if model.builtin or model.family == TRANSFORMERS:
            return None
        function = None if model.loss in LOSSES else userobject.load(model.loss, "model.loss")
        if function is None or inspect.isbuiltin(function):  # nobody knows the parameters of a function in C
            return cls(("target", "targets", "label", "labels", "y"), alone=True)
        _, *found = inspect.signature(getattr(function, "forward", function)).parameters.values()
        named = [p for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        needed = frozenset(p.name for p in named if p.default is p.empty)
        return cls(tuple(p.name for p in named), needed, free=any(p.kind is p.VAR_KEYWORD for p in found))

    def among(self, entries: Mapping[str, Tensor]) -> Any:
        """The targets in the entries of a sample. Raises UnfitError."""
        found = {name: entries[name] for name in self.names if name in entries}
        missing = self.needed - found.keys()
        if missing or not (found or self.free):
            wants = ", ".join(sorted(missing)) or " or ".join(self.names)
            raise UnfitError(f"has {', '.join(entries) or 'nothing'}, and model.loss takes {wants}")
        return next(iter(found.values())) if self.alone else {**entries} if self.free else found


class Words(NamedTuple):
    """The ids that a user's samples may have, 0 to `vocab` in inputs and with `targets` in targets that count; and the
    entries `named` by the loss, if they may have several."""

    vocab: int | None = None  # None: any ids
    targets: bool = False
    named: Targets | None = None

    @classmethod
    def of(cls, model: spec.Model, data: spec.Data | None = None) -> Words:
        """Those of a built-in model, and of a chat's tokens: where ranks share words, or in a loss by chunks, no kernel
        would notice."""
        known = model.builtin or (data is not None and data.kind == CHAT)
        return cls(model.vocab if known else None, model.loss == "cross_entropy", Targets.of(model))

    def checked(self, whole: Tensor, which: int, name: Callable[[int], str]) -> Tensor:
        """Returns inputs (`which` = 0) or targets (1), (rows, ..), called `name(row)`. Raises E505 for other ids."""
        floats = whole.is_floating_point() or whole.is_complex() or whole.dtype == torch.bool
        if self.vocab is None or floats or not whole.numel() or (which and not self.targets):
            return whole
        low, high = (int(end) for end in whole.long().aminmax())
        if low >= 0 and high < self.vocab:
            return whole
        wrong = (whole < 0) | (whole >= self.vocab)
        if which:
            wrong &= whole != IGNORED
        if wrong.any():
            row = int(wrong.nonzero()[0][0]) if whole.dim() else 0
            what, text = ("input", "target")[which], f"{int(whole[wrong][0])}, model.vocab is {self.vocab}"
            raise ZbcError("E505", f"data: the {what} of {name(row)} has the id {text}", hint=HINT)
        return whole


ANY = Words()


def pair_of(sample: Any, wanted: Targets | None = None) -> tuple[Any, Any]:
    """(input, target), each a tensor or with `wanted` several by name. Raises UnfitError."""
    if is_dataclass(sample):
        sample = {field.name: getattr(sample, field.name) for field in fields(sample)}
    if isinstance(sample, Mapping):
        names = next((names for names in _NAMES if {*names} == {*sample}), None)
        if names is not None:
            sample = tuple(sample[name] for name in names)
        elif _TOKENS in sample and (wanted is None or _is_causal(sample)):
            return _shifted(sample)
        elif wanted is None:
            raise UnfitError(f"is a mapping of {', '.join(map(str, sample)) or 'nothing'}")
        else:
            sample = _entries(sample, "entry")
            return sample, wanted.among(sample)
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise UnfitError("is not a pair (input, target)")
    x, target = _entries(sample[0], "input"), _entries(sample[1], "target")
    if wanted is None:
        if isinstance(target, Mapping):
            raise UnfitError(f"has targets called {', '.join(target)}")
        return x, target
    others = x if isinstance(x, Mapping) and not wanted.alone else {}
    if isinstance(target, Tensor):
        return x, wanted.among({**others, wanted.names[0]: target}) if others and wanted.names else target
    if (unnamed := target.keys() - wanted.names) and not wanted.free:
        raise UnfitError(f"has a target called {min(unnamed)}, which model.loss does not take")
    return x, wanted.among({**others, **target})


def _entries(value: Any, what: str) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _tensor(one, f"{what} for {name}") for name, one in value.items()}
    return _tensor(value, what)


def _is_causal(sample: Mapping[str, Any]) -> bool:
    """Whether a mapping with tokens has the columns of a language model alone."""
    if {*sample} - {_TOKENS, _LABELS, _MASK} - _ELSE or _LABELS not in sample:
        return False
    tokens, labels = (_tensor(sample[name], name) for name in (_TOKENS, _LABELS))
    return tokens.shape == labels.shape and tokens.dim() == 1


def _tensor(value: Any, what: str) -> Tensor:
    """The value as a tensor, by torch.as_tensor: Python floats get torch's default type."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise UnfitError(f"has an {what} of type {type(value).__name__}, which is no tensor") from None


def _shifted(sample: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """All tokens but the last, and the labels from the second on. Labels of padding after the tokens are ignored."""
    more = {*sample} - {_TOKENS, _LABELS, _MASK} - _ELSE
    if more or _LABELS not in sample:
        raise UnfitError(f"has {_TOKENS} and {', '.join(sorted(more)) or 'no ' + _LABELS}")
    tokens, labels = (_tensor(sample[name], name) for name in (_TOKENS, _LABELS))
    if tokens.shape != labels.shape or tokens.dim() != 1:
        raise UnfitError(f"has {_TOKENS} {[*tokens.shape]} and {_LABELS} {[*labels.shape]}, not one row of each")
    mask = _tensor(sample.get(_MASK, torch.ones_like(tokens)), _MASK).bool()
    if mask.shape != tokens.shape or (mask[1:] & ~mask[:-1]).any() or (labels[~mask] != IGNORED).any():
        raise UnfitError(f"has an {_MASK} that is not of padding behind the tokens, with labels of {IGNORED}")
    return tokens[:-1], labels[1:]
