"""Background writing: a thread runs, in order, work that a rank would otherwise do between two of its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_MOST = 64  # maximum number of pending pieces of work; `add` waits beyond it


class Scribe:
    """Runs work in a thread of its own, in the order in which it was added.

    Work runs soon, while the rank waits or computes outside of Python; a process that is killed loses the few pending
    pieces. A process that ends by itself runs them all: when Python exits, or in `close`, if it ends without that, like
    a rank that fails.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "zbc-scribe")
        self._left = deque[Future[None]]()
        self._failed = False

    def add(self, work: Callable[[], None]) -> None:
        """Adds a piece of work. Raises the error of earlier work, after which no more work is done."""
        self._wait(_MOST - 1)
        self._left.append(self._thread.submit(self._do, work))

    def flush(self) -> None:
        """Blocks until all work is done. Raises as `add`."""
        self._wait(0)

    def close(self) -> None:
        """Runs the pending work and ends; no further calls except this one."""
        self._thread.shutdown()

    def _wait(self, most: int) -> None:
        """Waits until at most `most` pieces are pending."""
        while self._left and (len(self._left) > most or self._left[0].done()):
            self._left[0].result()
            self._left.popleft()

    def _do(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except Exception:
            self._failed = True
            raise
