"""Sends in flight: their tensors are kept alive until delivered and freed soon after, without blocking the rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from zbc.errors import ZbcError

_LOOK_S = 0.005  # the interval in which the thread polls for sends at high rates
_CLOSELY = 500  # sends per second: above this rate it is not woken for each


_Send = tuple[dist.Work, Tensor, Callable[[BaseException], ZbcError]]  # the last makes the error of its failure


class EventSends:
    """For NCCL, whose work objects can be polled: the sends to one rank, which complete in order.

    NCCL never raises: a failed send is completed, too, and returns its exception on request. `drain` does not block the
    host; it makes the compute stream wait, so that the memory is reused after the send only.
    """

    def __init__(self) -> None:
        self._under_way: deque[_Send] = deque()

    def add(self, work: dist.Work, tensor: Tensor, lost: Callable[[BaseException], ZbcError]) -> None:
        """Keeps a started send until it is delivered; `lost` makes the error of its failure."""
        under_way = self._under_way
        while under_way and under_way[0][0].is_completed():
            _check(under_way.popleft())
        under_way.append((work, tensor, lost))

    def drain(self) -> None:
        """Waits until all are delivered. Raises the error that `lost` makes for the first failure."""
        while self._under_way:
            send = self._under_way.popleft()
            try:
                send[0].wait()
            except RuntimeError as error:
                raise send[2](error) from error
            if send[0].is_completed():
                _check(send)

    def close(self) -> None:
        """Releases all sends."""
        self._under_way.clear()


def _check(send: _Send) -> None:
    """Raises the error that `lost` makes, if a completed send has failed."""
    work, _, lost = send
    error = work.exception()
    if error is not None:
        raise lost(error if isinstance(error, BaseException) else RuntimeError(str(error)))


class ThreadSends:
    """For gloo, whose work objects complete only in a call of `wait`: a thread calls it.

    Waking a thread costs the rank more than starting a send. So at high rates the thread polls for new sends, two
    hundred times a second, and tensors delivered meanwhile are kept that much longer: with ops of a millisecond, a few
    tensors. At low rates each send wakes the thread, and its tensor is freed as soon as it is delivered.
    """

    def __init__(self) -> None:
        self._under_way: deque[_Send] = deque()
        self._begun = self._asked = self._ended = 0  # the last is written by the thread only, the others by the rank's
        self._failure: ZbcError | None = None
        self._asleep = self._draining = self._closed = self._close = False
        self._counted, self._since = 0, time.monotonic()  # sends that had ended at that time
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
        """After the collective at a step's end all sends are delivered: asking is faster than waking the thread."""
        failure = self._ask()
        if not self._over() and self._failure is None:  # the thread is waiting for a send
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
        """Waits here for the sends that the thread has not taken; stops at the first failure and returns its error."""
        while self._under_way and self._failure is None:
            try:
                work, _, lost = self._under_way.popleft()
            except IndexError:  # the thread has taken it
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
                send = self._under_way.popleft()  # referenced by this frame only, until the next one
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
        """Waits until there is work."""
        if self._closely():
            self._wake.wait(_LOOK_S)
            self._wake.clear()
            return
        self._wake.clear()
        self._asleep = True  # before the last check, so that an `add` after it sees the flag
        if not self._under_way and not self._closed:
            self._wake.wait()
        self._asleep = False

    def _closely(self) -> bool:
        """Whether the rate of sends is high, measured every `_LOOK_S` seconds, or earlier as soon as it is."""
        now = time.monotonic()
        passed, ended = now - self._since, self._ended + self._asked
        close = ended - self._counted > _CLOSELY * max(passed, _LOOK_S)
        if close or passed >= _LOOK_S:
            self._close, self._counted, self._since = close, ended, now
        return self._close


Sends = EventSends | ThreadSends
