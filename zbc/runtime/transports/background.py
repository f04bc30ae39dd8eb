"""A thread that does what may have to wait, so that the rank's own thread need not."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

import torch

Value = TypeVar("Value")


class Background:
    """Runs calls one after the other, in the order in which they were given; ends when it is closed or dropped."""

    def __init__(self, name: str) -> None:
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run_all, args=(self._todo,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._todo.put, None)

    def start(self, call: Callable[[], Value]) -> Future[Value]:
        """What the call will return or raise; it runs without autograd."""
        found = Future[Value]()

        def run() -> None:
            try:
                with torch.no_grad():
                    found.set_result(call())
            except BaseException as error:
                found.set_exception(error)

        self._todo.put(run)
        return found

    def close(self) -> None:
        """Block until all calls are over."""
        self._end()
        self._thread.join()


def _run_all(todo: SimpleQueue[Callable[[], None] | None]) -> None:
    torch.set_num_threads(torch.get_num_threads())  # a new thread has OpenMP's own idea of it
    while (run := todo.get()) is not None:
        run()
        del run  # which holds tensors
