"""Which tests run always, and which only add names, sizes and seeds to what others have shown: those are `repeats`.

The orders of `SIX` cover every pattern a rank can meet: one stage and one backward, split backwards, stages that come
back in a V and in loops, two pipes, and groups of ops that overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

SIX = ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "chimera-zb", "dualpipe")


def few(cases: Iterable[Any], always: Callable[[Any], bool] | Sequence[Any] = SIX) -> list[Any]:
    """Values for `parametrize`: those that are not in `always` are marked `repeats`."""
    chosen = always if callable(always) else always.__contains__
    return [case if chosen(case) else pytest.param(*_values(case), marks=pytest.mark.repeats) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
