"""Tensors under way: kept alive until they are delivered, dropped soon after, never waited for in between."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from zbc.errors import ZbcError

_LOOK_S = 0.005  # how often the thread looks for sends that follow each other closely
_CLOSELY = 500  # sends per second: from here on it is not woken for each


_Send = tuple[dist.Work, Tensor, Callable[[BaseException], ZbcError]]  # and what makes the error of its failure


class Sends(Protocol):
    """Started sends until they are delivered."""

    def add(self, work: dist.Work, tensor: Tensor, lost: Callable[[BaseException], ZbcError]) -> None:
        """Keep a started send; `lost` makes the error of its failure."""

    def drain(self) -> None:
        """Block until all are delivered. Raises what `lost` made of the first that failed."""

    def close(self) -> None:
        """Let go."""


class EventSends:
    """For NCCL, whose work objects know without waiting whether they are done: those to one rank, which arrive in
    order.

    NCCL never raises: a send that failed is done, too, and says so when it is asked. `drain` does not block the host
    either; it has the stream that computes wait, so that what reuses the memory comes after the send.
    """

    def __init__(self) -> None:
        self._under_way: deque[_Send] = deque()

    def add(self, work: dist.Work, tensor: Tensor, lost: Callable[[BaseException], ZbcError]) -> None:
        under_way = self._under_way
        while under_way and under_way[0][0].is_completed():
            _check(under_way.popleft())
        under_way.append((work, tensor, lost))

    def drain(self) -> None:
        while self._under_way:
            send = self._under_way.popleft()
            try:
                send[0].wait()
            except RuntimeError as error:
                raise send[2](error) from error
            if send[0].is_completed():
                _check(send)

    def close(self) -> None:
        self._under_way.clear()


def _check(send: _Send) -> None:
    """Raise what `lost` makes of a failure, if a send that is done has failed."""
    work, _, lost = send
    error = work.exception()
    if error is not None:
        raise lost(error if isinstance(error, BaseException) else RuntimeError(str(error)))


class ThreadSends:
    """For gloo, whose work objects do not know before somebody waits: a thread does.

    Waking a thread costs the rank more than starting a send. So where sends follow each other closely the thread looks
    for new ones by itself, two hundred times a second, and what was delivered meanwhile is kept that much longer: with
    ops of a millisecond, a few tensors. Where they do not, each wakes it, and stays until it is delivered.
    """

    def __init__(self) -> None:
        self._under_way: deque[_Send] = deque()
        self._begun = self._asked = self._ended = 0  # the last is written by the thread only, the others by the rank's
        self._failure: ZbcError | None = None
        self._asleep = self._draining = self._closed = self._close = False
        self._counted, self._since = 0, time.monotonic()  # of those that ended, how many had by then
        self._wake, self._changed = threading.Event(), threading.Condition()
        threading.Thread(target=self._reap, name="zbc-sends", daemon=True).start()

    def add(self, work: dist.Work, tensor: Tensor, lost: Callable[[BaseException], ZbcError]) -> None:
        if self._failure is not None:
            raise self._failure
        self._begun += 1
        self._under_way.append((work, tensor, lost))
        if self._asleep:
            self._wake.set()

    def drain(self) -> None:
        """Where a step ends with what all ranks do all is delivered: to ask is quicker than to wake the thread."""
        failure = self._ask()
        if not self._over() and self._failure is None:  # the thread has one in its hands
            self._draining = True
            with self._changed:
                self._changed.wait_for(lambda: self._over() or self._failure is not None)
            self._draining = False
        if failure is not None and self._failure is None:
            self._failure = failure
        if self._failure is not None:
            raise self._failure

    def _over(self) -> bool:
        return self._ended + self._asked == self._begun

    def _ask(self) -> ZbcError | None:
        """Wait here for what the thread has not come to; the error of the first that failed, after which none is."""
        while self._under_way and self._failure is None:
            try:
                work, _, lost = self._under_way.popleft()
            except IndexError:  # the thread was quicker
                return None
            self._asked += 1
            try:
                work.wait()
            except RuntimeError as error:
                return lost(error)
        return None

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def _reap(self) -> None:
        while not self._closed:
            try:
                send = self._under_way.popleft()  # held by this frame alone, and by none before the next
            except IndexError:
                self._rest()
                continue
            failure = None
            try:
                send[0].wait()
            except RuntimeError as error:
                failure = send[2](error)
            del send
            self._failure = self._failure or failure
            self._ended += 1
            if self._draining:
                with self._changed:
                    self._changed.notify_all()

    def _rest(self) -> None:
        """Return when there is something to do."""
        if self._closely():
            self._wake.wait(_LOOK_S)
            self._wake.clear()
            return
        self._wake.clear()
        self._asleep = True  # set before the last look: what `add` appends after that look finds it set
        if not self._under_way and not self._closed:
            self._wake.wait()
        self._asleep = False

    def _closely(self) -> bool:
        """Whether sends followed each other closely when last counted: at every look, or as soon as they do."""
        now = time.monotonic()
        passed, ended = now - self._since, self._ended + self._asked
        close = ended - self._counted > _CLOSELY * max(passed, _LOOK_S)
        if close or passed >= _LOOK_S:
            self._close, self._counted, self._since = close, ended, now
        return self._close
