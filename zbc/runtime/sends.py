"""Tensors under way: kept alive until they are delivered, dropped soon after, never waited for in between."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from zbc.errors import ZbcError


class _Send(NamedTuple):
    work: dist.Work
    tensor: Tensor
    lost: Callable[[BaseException], ZbcError]


class Sends(Protocol):
    def add(self, work: dist.Work, tensor: Tensor, lost: Callable[[BaseException], ZbcError]) -> None:
        """Keep a started send; `lost` makes the error of its failure."""

    def drain(self) -> None:
        """Block until all are delivered. Raises what `lost` made of the first that failed."""

    def close(self) -> None:
        """Let go."""


class EventSends:
    """For NCCL, whose work objects know without waiting whether they are done."""

    def __init__(self) -> None:
        self._under_way: deque[_Send] = deque()

    def add(self, work: dist.Work, tensor: Tensor, lost: Callable[[BaseException], ZbcError]) -> None:
        while self._under_way and self._under_way[0].work.is_completed():
            self._under_way.popleft()
        self._under_way.append(_Send(work, tensor, lost))

    def drain(self) -> None:
        while self._under_way:
            send = self._under_way.popleft()
            try:
                send.work.wait()
            except RuntimeError as error:
                raise send.lost(error) from error

    def close(self) -> None:
        self._under_way.clear()


class ThreadSends:
    """For gloo, whose work objects do not know before somebody waits: a thread does."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Send | None] = SimpleQueue()
        self._count = 0
        self._failure: ZbcError | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._reap, name="zbc-sends", daemon=True).start()

    def add(self, work: dist.Work, tensor: Tensor, lost: Callable[[BaseException], ZbcError]) -> None:
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._count += 1
        self._queue.put(_Send(work, tensor, lost))

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0 or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        self._queue.put(None)

    def _reap(self) -> None:
        while True:
            send = self._queue.get()  # held by this frame alone while it is under way, and by none before the next
            if send is None:
                return
            failure = None
            try:
                send.work.wait()
            except RuntimeError as error:
                failure = send.lost(error)
            del send
            with self._changed:
                self._count -= 1
                self._failure = self._failure or failure
                self._changed.notify_all()
