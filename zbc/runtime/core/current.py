"""Thread-local current objects: the slot, the slice, the rows, the auxiliary losses of layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Current(threading.local, Generic[T]):
    """A value per thread; None at first."""

    value: T | None = None

    def swap(self, value: T | None) -> T | None:
        """Makes `value` current and returns the previous one: `using` without the cost of a generator."""
        before, self.value = self.value, value
        return before

    @contextmanager
    def using(self, value: T | None) -> Iterator[None]:
        before = self.swap(value)
        try:
            yield
        finally:
            self.swap(before)


SLICE = Current[Any]()  # of a microbatch, that a forward runs: with its `part` (features/slices/slicing.py)
ADDING = Current[Any]()  # where layers report (features/added.py); for a forward that runs again, that of its first run
