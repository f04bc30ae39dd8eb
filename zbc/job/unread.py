"""Keys that have no effect because of another key of their table: they are refused.

A default value is accepted, so that files that extend others, and --set, can return to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zbc.errors import ZbcError
from zbc.job.section import Section
from zbc.job.toml import Document


@dataclass(frozen=True, slots=True)
class Unread:
    """Keys of a table, the condition under which they have no effect, and the message; `{}` is the deciding value."""

    section: str
    keys: tuple[str, ...]
    decides: str
    unread: Callable[[Any], bool]  # takes the value of `decides`
    text: str
    hint: str
    code: str = "E110"


def reads_attention(activations: str | dict[str, str]) -> bool:
    """Whether `memory.attention` has an effect: a stage recomputes selectively, or may."""
    chosen = [activations] if isinstance(activations, str) else activations.values()
    return any(choice in ("auto", "selective", "selective+offload") for choice in chosen)


KINDS_OF_FILES = ("text", "tokens", "chat")


def _only(key: str, keys: str, *values: str, hint: str = "drop it", code: str = "E110") -> Unread:
    """Keys of a table that have an effect with these values of its `key` alone."""
    (section, decides), others = key.split("."), ", ".join(values[:-1])
    text = f"is for {others}{' and ' * bool(others)}{values[-1]}, {key} is {{!r}}"
    hint = f'{hint}, or use {decides} = "{values[0]}"'
    return Unread(section, tuple(keys.split()), decides, lambda value: value not in values, text, hint, code)


IDLE = (
    _only("optimizer.kind", "betas eps", "adam", "adamw", "muon"),
    _only("optimizer.kind", "momentum", "sgd", "muon", hint="drop it (betas are what adam has instead)"),
    _only("optimizer.kind", "scale", "muon"),
    _only("optimizer.sync", "every lookahead", "asynchronous"),
    _only("optimizer.sync", "feedback", "two-versions"),
    _only("model.dtype", "loss_scale", "float16"),
    _only("data.kind", "dtype", "tokens", code="E150"),
    _only("data.kind", "tokenizer", "chat", code="E150"),
    Unread(
        "optimizer",
        ("lr",),
        "split",
        bool,
        "is two rates, of matrices and of the rest, which are for muon, optimizer.kind is another",
        'write one, or use kind = "muon"',
    ),
    Unread(
        "optimizer",
        ("state",),
        "name",
        lambda name: name == "sgd, bfloat16",
        "is of moments, which sgd without momentum does not have",
        "drop it, or set momentum",
    ),
    Unread(
        "memory",
        ("attention",),
        "activations",
        lambda activations: not reads_attention(activations),
        "is of selective recompute, memory.activations is {!r}",
        'drop it, or use activations = "selective"',
    ),
    Unread(
        "adapter",
        ("alpha", "dropout", "targets"),
        "rank",
        lambda rank: not rank,
        "is of adapters, and with adapter.rank = {!r} there are none",
        "set adapter.rank, or drop it",
    ),
    Unread(
        "data",
        ("path",),
        "kind",
        lambda kind: kind not in KINDS_OF_FILES,
        "names files of text, tokens or chat, data.kind is {!r}",
        "drop it; what a factory of data needs goes into [data.args]",
        "E150",
    ),
    Unread(
        "data",
        ("items",),
        "kind",
        lambda kind: kind in (*KINDS_OF_FILES, "synthetic"),
        "is of a dataset of yours, data.kind is {!r}",
        'drop it, or set kind = "package.module:factory"',
        "E150",
    ),
    Unread(
        "data",
        ("validation",),
        "items",
        lambda items: items == "steps",
        "keeps samples, and with data.items = {!r} there are none",
        "drop it",
    ),
    Unread(
        "data",
        ("args",),
        "kind",
        lambda kind: kind in ("text", "tokens", "synthetic"),
        "belong to a factory or a chat template, data.kind is {!r}",
        'drop them, or set kind = "package.module:factory"',
        "E150",
    ),
)


def problems(sections: Mapping[str, Any], document: Document) -> Iterator[ZbcError]:
    """An error for each key that is set without effect: E110, E150."""
    for row in IDLE:
        section = sections.get(row.section)
        if section is None or not row.unread(getattr(section, row.decides)):
            continue
        for key in row.keys:
            if asks(section, key):
                text = f"config: {row.section}.{key} {row.text.format(getattr(section, row.decides))}"
                yield ZbcError(row.code, text, where=document.where((row.section, key)), hint=row.hint)


def asks(section: Section, key: str) -> bool:
    """Whether a table sets `key` to another value than its default."""
    plain = type(section).model_fields[key].get_default(call_default_factory=True, validated_data={})
    return key in section.model_fields_set and getattr(section, key) != plain
