"""Writing beside the steps: a thread does, in order, what a rank would otherwise do between two of its steps."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from queue import SimpleQueue

_MOST = 64  # pieces of work put off at a time; who has more waits until they are done


class Scribe:
    """Does work in a thread of its own, in the order in which it came.

    What a rank has added is done soon, while it waits or computes outside of Python; a process that is killed loses the
    few pieces that were not. One that ends by itself does them all: as Python exits, or with `close` before it ends
    without that, as a rank does that fails.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | threading.Event | None] = SimpleQueue()
        self._added = self._done = 0  # the first is written by the rank's thread only, the second by the other
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="zbc-scribe", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, work: Callable[[], None]) -> None:
        """Have it done. Raises what went wrong with work added before; then nothing is done any more."""
        if self._failure is not None:
            raise self._failure
        if self._added - self._done >= _MOST:
            self.flush()
        self._added += 1
        self._work.put(work)

    def flush(self) -> None:
        """Block until all that was added is done. Raises as `add`."""
        done = threading.Event()
        self._work.put(done)
        done.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Do what is left and end; no further calls but this one."""
        atexit.unregister(self.close)
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if isinstance(work, threading.Event):
                work.set()
                continue
            try:
                if self._failure is None:
                    work()
            except Exception as error:
                self._failure = error
            self._done += 1
            del work  # with all it holds, before the next one comes
