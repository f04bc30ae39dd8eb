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
IDLE = (
    Unread(
        "optimizer",
        ("betas", "eps"),
        "kind",
        lambda kind: kind == "sgd",
        "is for adam, adamw and muon, optimizer.kind is {!r}",
        'drop it, or use kind = "adamw"',
    ),
    Unread(
        "optimizer",
        ("momentum",),
        "kind",
        lambda kind: kind not in ("sgd", "muon"),
        "is for sgd and muon, optimizer.kind is {!r}",
        'drop it (betas are what adam has instead), or use kind = "sgd"',
    ),
    Unread(
        "optimizer",
        ("adamw_lr", "scale"),
        "kind",
        lambda kind: kind != "muon",
        "is for muon, optimizer.kind is {!r}",
        'drop it, or use kind = "muon"',
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
        "model",
        ("master",),
        "parameters",
        lambda parameters: parameters != "bfloat16",
        "is of masters of bfloat16 weights, model.parameters is {!r}",
        'drop it, or use parameters = "bfloat16"',
    ),
    Unread(
        "model",
        ("loss_scale",),
        "dtype",
        lambda dtype: dtype != "float16",
        "is for float16, model.dtype is {!r}",
        'drop it, or use dtype = "float16"',
    ),
    Unread(
        "freeze",
        ("after",),
        "most",
        lambda most: not most,
        "says when freezing begins, and with freeze.most = {!r} nothing is frozen",
        "set freeze.most, or drop it",
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
        ("tokenizer",),
        "kind",
        lambda kind: kind != "chat",
        "is of chat, data.kind is {!r}",
        'drop it, or set kind = "chat"',
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
        ("validation", "validation_path"),
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
