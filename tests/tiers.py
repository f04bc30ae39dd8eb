"""Marks the tests that only repeat others with `repeats`; all other tests always run.

They add names, sizes and seeds, or are whole runs whose parts other tests cover: of processes from their start to their
end, of the commands of a page, of searches that take seconds.
Continuous integration runs an eighth of them, another one for each commit.

The orders of `SIX` cover every pattern a rank can meet: one stage and a backward in one piece, backwards in halves,
stages that come back in a V and in loops, two pipes with a sum of their gradients, and microbatches that meet. Their
losses and gradients are always compared with those of one process; most other tests always run two or three of them
that differ most. tests/runtime/test_tiers.py checks that the six run every kind of op.
"""

import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import pytest

SIX = ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "chimera-zb", "dualpipe")
_MARKED = type(pytest.param())  # the type of a case with marks for `parametrize`


def few(cases: Iterable[Any], always: int | Container[Any] | Callable[[Any], bool] = SIX) -> list[Any]:
    """Values for `parametrize`; those that `always` does not choose are marked `repeats`.

    `always`: a collection of values (for tuples, all or their first elements), a predicate, or the number of first
    values. Marks of `dealt` are kept.
    """
    found: list[Any] = []
    for case in cases:
        if isinstance(always, int):
            chosen = len(found) < always
        elif callable(always):
            chosen = always(_whole(case))
        else:
            chosen = _values(case)[0] in always or _whole(case) in always
        found.append(case if chosen else _repeat(case))
    return found


def dealt(rows: Iterable[Any], columns: Sequence[Any], always: Container[Any] = ()) -> list[Any]:
    """Every row with every column, for `parametrize`; all but one column of each row, in turn, are marked `repeats`.

    Columns in `always` are not. A row, or column, that is a tuple stands for several arguments.
    """
    found = []
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            case = (*_values(row), *_values(column))
            found.append(case if j == i % len(columns) or column in always else _repeat(case))
    return found


def slowness() -> float:
    """How many times as long as on the machine that limits of time are for a computation takes now, at least 1."""
    before, total = time.thread_time(), 0
    for number in range(1_000_000):
        total += number
    return max(1.0, (time.thread_time() - before) / 0.02)


def _repeat(case: Any) -> Any:
    return pytest.param(*_values(case), marks=pytest.mark.repeats)


def _values(case: Any) -> tuple[Any, ...]:
    """The arguments of a case, whether or not it is marked."""
    if isinstance(case, _MARKED):
        return tuple(case.values)
    return case if isinstance(case, tuple) else (case,)


def _whole(case: Any) -> Any:
    return tuple(case.values) if isinstance(case, _MARKED) else case
