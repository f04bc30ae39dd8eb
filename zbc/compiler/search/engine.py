"""The kernels, compiled where numba is installed (`pip install zbc[fast]`), plain Python elsewhere; same results."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from zbc.compiler.search import anneal, listing

_HELPERS = ("_next", "_exp", "_mean_span", "_shift", "_fits", "evaluate", "list_schedule", "anneal")


class Engine:
    """Calls to the kernels. `numbers` makes what they read and write: a list, or an array for compiled ones."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        names: dict[str, Any] = {**vars(listing), **vars(anneal)}
        if compiled:
            import numba
            import numpy

            self._numpy = numpy
            names = _compile(numba)
        self.list_schedule: Callable[..., tuple[int, float, float]] = names["list_schedule"]
        self.evaluate: Callable[..., tuple[int, float, float]] = names["evaluate"]
        self.anneal: Callable[..., tuple[float, int]] = names["anneal"]

    def numbers(self, values: Sequence[int] | Sequence[float]) -> Any:
        if not self.compiled:
            return list(values)
        kind = self._numpy.float64 if values and isinstance(values[0], float) else self._numpy.int64
        return self._numpy.array(values, dtype=kind)


def _compile(numba: Any) -> dict[str, Any]:
    """The kernels jitted in a namespace of their own, so that they call one another compiled."""
    names: dict[str, Any] = {**vars(listing), **vars(anneal)}
    for name in _HELPERS:
        function = names[name]
        copy = type(function)(function.__code__, names, name, function.__defaults__)
        names[name] = numba.njit(copy, cache=True)
    return names


def available() -> bool:
    return importlib.util.find_spec("numba") is not None
