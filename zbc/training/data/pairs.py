"""Samples of a user's dataset, in one of several formats, as pairs (input, target) of tensors.

    (x, y)                                     tensors, numpy arrays, numbers or lists of numbers
    {"input": x, "target": y}                  the same
    {"input_ids": x, "labels": y, ..}          as in Hugging Face: the target of a token is the label of the next one

A mapping for x has an input for each group of layers (`model.graph`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.job import spec
from zbc.runtime.core.tensors import IGNORED
from zbc.training.data.chat import CHAT

HINT = "set model.vocab to that of the tokenizer and plan again; -100 marks targets that do not count"
_NAMES = (("input", "target"), ("inputs", "targets"), ("x", "y"))
_TOKENS, _LABELS, _MASK = "input_ids", "labels", "attention_mask"
_ELSE = frozenset({"token_type_ids", "special_tokens_mask", "length"})  # keys that tokenizers add


class Samples(Protocol):
    """A map-style dataset that returns whole microbatches.

    Numbers continue after the last sample: in epoch `e` sample `i` has the number i + e x len.
    """

    def __len__(self) -> int: ...

    def inputs(self, indices: Sequence[int], group: str = "") -> Tensor:
        """The inputs of these samples, stacked along a new first dimension; `group` selects the inputs of a group of
        layers if samples have several."""

    def targets(self, indices: Sequence[int]) -> Tensor:
        """Their targets, stacked."""

    def expect(self, indices: Sequence[int]) -> None:
        """Samples that are about to be read, in this order."""
        return

    def digest(self) -> int:
        """A digest of a few samples, 40 bits, which ranks compare. Raises E505 if two reads of one sample differ.

        0 for data that depend only on files and the seed, which are not compared.
        """
        return 0


class UnfitError(Exception):
    """The reason why a sample is not a pair."""


class Words(NamedTuple):
    """The ids that a user's samples may have: 0 to `vocab` in inputs, and with `targets` in targets that count."""

    vocab: int | None = None  # None: any ids
    targets: bool = False

    @classmethod
    def of(cls, model: spec.Model, data: spec.Data | None = None) -> Words:
        """Those of a built-in model, and of a chat's tokens: where ranks share words, or in a loss by chunks, no kernel
        would notice."""
        known = model.builtin or (data is not None and data.kind == CHAT)
        return cls(model.vocab if known else None, model.loss == "cross_entropy")

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


def pair_of(sample: Any) -> tuple[Any, Tensor]:
    """(input, target); the input may be a mapping of tensors. Raises UnfitError."""
    if isinstance(sample, Mapping):
        if _TOKENS in sample:
            return _shifted(sample)
        names = next((names for names in _NAMES if {*names} == {*sample}), None)
        if names is None:
            raise UnfitError(f"is a mapping of {', '.join(map(str, sample)) or 'nothing'}")
        sample = tuple(sample[name] for name in names)
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise UnfitError("is not a pair (input, target)")
    x, target = sample
    if isinstance(x, Mapping):
        return {name: _tensor(value, f"input for {name}") for name, value in x.items()}, _tensor(target, "target")
    return _tensor(x, "input"), _tensor(target, "target")


def copied(pair: tuple[Any, Tensor]) -> tuple[Any, Tensor]:
    """A copy, which stays if its dataset uses the memory of one sample for the next."""
    x, target = pair
    return {name: t.clone() for name, t in x.items()} if isinstance(x, Mapping) else x.clone(), target.clone()


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
