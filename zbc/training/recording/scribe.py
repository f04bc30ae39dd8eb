"""Writing beside the steps: a thread does, in order, what a rank would otherwise do between two of its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_MOST = 64  # pieces of work put off at a time; who has more waits until some are done


class Scribe:
    """Does work in a thread of its own, in the order in which it came.

    What a rank has added is done soon, while it waits or computes outside of Python; a process that is killed loses the
    few pieces that were not. One that ends by itself does them all: as Python exits, or with `close` before it ends
    without that, as a rank does that fails.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "zbc-scribe")
        self._left = deque[Future[None]]()
        self._failed = False

    def add(self, work: Callable[[], None]) -> None:
        """Have it done. Raises what went wrong with work added before; then nothing is done any more."""
        self._wait(_MOST - 1)
        self._left.append(self._thread.submit(self._do, work))

    def flush(self) -> None:
        """Block until all that was added is done. Raises as `add`."""
        self._wait(0)

    def close(self) -> None:
        """Do what is left and end; no further calls but this one."""
        self._thread.shutdown()

    def _wait(self, most: int) -> None:
        """Until at most so many pieces are left."""
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
