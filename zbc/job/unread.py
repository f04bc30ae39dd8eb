"""Keys that have no effect because of another key of their table: they are refused.

A default value is accepted, so that files that extend others, and --set, can return to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zbc.job.section import Problem, Section

KINDS_OF_FILES = ("text", "tokens", "chat")
# Keys of a table, the key that decides whether they are read, and its values with which they are.
ONLY: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("optimizer.betas eps", "kind", ("adam", "adamw", "muon")),
    ("optimizer.momentum", "kind", ("sgd", "muon")),
    ("optimizer.scale", "kind", ("muon",)),
    ("optimizer.every lookahead", "sync", ("asynchronous",)),
    ("optimizer.feedback", "sync", ("two-versions",)),
    ("model.loss_scale", "dtype", ("float16",)),
    ("data.dtype", "kind", ("tokens",)),
    ("data.tokenizer", "kind", ("chat",)),
)


def problems(sections: Mapping[str, Any]) -> Iterator[Problem]:
    """An error for each key of ONLY that is set without effect: E110, of data E150."""
    for keys, decides, values in ONLY:
        table, _, names = keys.partition(".")
        section, others = sections.get(table), ", ".join(values[:-1])
        if section is None or getattr(section, decides) in values:
            continue
        for name in names.split():
            if asks(section, name):
                code, of = "E150" if table == "data" else "E110", f"{others}{' and ' * bool(others)}{values[-1]}"
                text = f"{table}.{name} is for {of}, {table}.{decides} is {getattr(section, decides)!r}"
                hint = "drop it" + " (betas are what adam has instead)" * (name == "momentum")
                yield code, f"{table}.{name}", text, f'{hint}, or use {decides} = "{values[0]}"'


def reads_attention(activations: str | dict[str, str]) -> bool:
    """Whether `memory.attention` has an effect: a stage recomputes selectively, or may."""
    chosen = [activations] if isinstance(activations, str) else activations.values()
    return any(choice in ("auto", "selective", "selective+offload") for choice in chosen)


def asks(section: Section, key: str) -> bool:
    """Whether a table sets `key` to another value than its default."""
    plain = type(section).model_fields[key].get_default(call_default_factory=True, validated_data={})
    return key in section.model_fields_set and getattr(section, key) != plain
