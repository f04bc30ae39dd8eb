"""Raises the problems of a check: all of them counted, the first ones shown."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from zbc.errors import ZbcError, raise_all

SHOWN = 8


def raise_found(problems: Iterable[ZbcError]) -> None:
    """Raise nothing, the only problem, or the first eight and the number of the others."""
    rest = iter(problems)
    shown = list(islice(rest, SHOWN))
    count = sum(1 for _ in rest)
    if count:
        last = shown[-1]
        last.details = (*last.details, f"and {count} more problem{'s' if count > 1 else ''}")
    raise_all(shown)
