"""What is current on a thread: the slot, the slice, the rows, what layers add to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Current(threading.local, Generic[T]):
    """One on each thread; None at first."""

    value: T | None = None

    def swap(self, value: T | None) -> T | None:
        """Make this current and return what was before: `using` without the cost of a generator."""
        before, self.value = self.value, value
        return before

    @contextmanager
    def using(self, value: T | None) -> Iterator[None]:
        """Make this current in here."""
        before = self.swap(value)
        try:
            yield
        finally:
            self.swap(before)
