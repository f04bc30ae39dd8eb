"""A thread for calls that may block, so that the rank's own thread does not."""

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
    """Runs calls one after the other, in the order in which they were submitted; ends when it is closed or dropped."""

    def __init__(self, name: str) -> None:
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run_all, args=(self._todo,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._todo.put, None)

    def start(self, call: Callable[[], Value]) -> Future[Value]:
        """Submits a call, which runs without autograd; returns the future of its result."""
        future = Future[Value]()

        def run() -> None:
            try:
                with torch.no_grad():
                    future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self._todo.put(run)
        return future

    def close(self) -> None:
        """Blocks until all calls have completed."""
        self._end()
        self._thread.join()


def _run_all(todo: SimpleQueue[Callable[[], None] | None]) -> None:
    torch.set_num_threads(torch.get_num_threads())  # a new thread starts with OpenMP's default
    while (run := todo.get()) is not None:
        run()
        del run  # it holds tensors
