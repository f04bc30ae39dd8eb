"""Whether a message over gloo has come: its work objects say so only to who waits, so a thread does.

Used for messages that somebody asks about; those that are simply waited for never meet the thread.
"""

from __future__ import annotations

import queue
import threading

import torch.distributed as dist


class Coming:
    """One receive that the thread waits for; a `dist.Work` as far as waiting goes."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work
        self._over = threading.Event()
        self._error: RuntimeError | None = None

    def await_here(self) -> None:
        """In the thread."""
        try:
            self.work.wait()
        except RuntimeError as error:
            self._error = error
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        """Raises what the receive failed with."""
        self._over.wait()
        if self._error is not None:
            raise self._error


class Arrivals:
    """The thread of a rank; it starts with the first question."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Coming | None] | None = None

    def ask(self, work: dist.Work) -> Coming:
        if self._asked is None:
            self._asked = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._asked,), name="zbc-arrivals", daemon=True).start()
        coming = Coming(work)
        self._asked.put(coming)
        return coming

    def close(self) -> None:
        if self._asked is not None:
            self._asked.put(None)

    @staticmethod
    def _run(asked: queue.SimpleQueue[Coming | None]) -> None:
        while (coming := asked.get()) is not None:
            coming.await_here()
