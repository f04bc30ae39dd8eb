"""Lists of numbers on the command line."""

from __future__ import annotations

import re

import typer

_MOST = 1_000_000


def listed(text: str, option: str, *, least: int = 0) -> tuple[int, ...]:
    """`0-3,5` as (0, 1, 2, 3, 5), in the order given, each once; `option` is named where the text is no such list."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if match is None:
            raise typer.BadParameter(f"cannot read {text!r}; write {option} {least}-3,5", param_hint=option)
        first, last = int(match[1]), int(match[2] or match[1])
        if first < least or last < first or last - first >= _MOST:
            raise typer.BadParameter(f"{text!r} names nothing from {least} on", param_hint=option)
        found += range(first, last + 1)
    return tuple(dict.fromkeys(found))
