"""Work beside a rank's own: sends in flight, whose tensors are kept alive until delivered and freed soon after; calls
that may block, in a thread; and chains, in a thread or a side stream.

A chain is a collective, arithmetic on its result, another collective, overlapped with the rank's own compute. On gloo a
thread waits for the first collective and starts the second, chain by chain, in the order in which the rank starts them,
the same on all ranks. On CUDA a side stream waits, and no thread is needed.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zbc.errors import ZbcError

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


First = Callable[[], dist.Work]
Second = Callable[[Tensor], dist.Work]


class ThreadChains:
    """Runs chains in a thread; `first` starts in the rank's own, to keep its order among other collectives."""

    def __init__(self) -> None:
        self._background = Background("zbc-chains")

    def start(self, first: First, make: Callable[[], Tensor], second: Second) -> Chain:
        """Starts `first` now; when it has completed, calls `make`, and `second` with its result."""
        work = first()

        def rest() -> None:
            work.wait()
            second(make()).wait()

        return Threaded(self._background.start(rest))

    def close(self) -> None:
        self._background.close()


class Threaded:
    """Work of a thread, as a `dist.Work` or a `Pending`; its result may be an event of the device."""

    def __init__(self, found: Future[Any]) -> None:
        self._found = found

    def wait(self) -> None:
        if isinstance(event := self._found.result(), torch.cuda.Event):
            torch.cuda.current_stream().wait_event(event)

    def is_completed(self) -> bool:
        return self._found.done()

    ready = is_completed


class StreamChains:
    """Runs chains on a side stream, after the work enqueued on the current stream. Has not run on GPUs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, first: First, make: Callable[[], Tensor], second: Second) -> Chain:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            first().wait()  # makes the stream wait, not the host
            made = make()
            second(made).wait()
            return _Streamed(stream.record_event(), made)

    def close(self) -> None:
        self._stream.synchronize()


class _Streamed:
    def __init__(self, over: torch.cuda.Event, made: Tensor) -> None:
        self._over, self._made = over, made

    def wait(self) -> None:
        current = torch.cuda.current_stream()
        current.wait_event(self._over)
        self._made.record_stream(current)

    def is_completed(self) -> bool:
        return bool(self._over.query())  # type: ignore[no-untyped-call]


Chains = ThreadChains | StreamChains
Chain = Threaded | _Streamed


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
