"""Work beside a rank's own: sends in flight, whose tensors are kept alive until delivered and freed soon after; calls
that may block, in a thread; and chains, in a thread or a side stream.

A chain is a collective, arithmetic on its result, another collective, overlapped with the rank's own compute. On gloo a
thread waits for the first collective and starts the second, chain by chain, in the order in which the rank starts them,
the same on all ranks. On CUDA a side stream waits, and no thread is needed.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

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


class ThreadChains(Background):
    """Runs chains in a thread; `first` starts in the rank's own, to keep its order among other collectives."""

    def chain(self, first: First, make: Callable[[], Tensor], second: Second) -> Chain:
        """Starts `first` now; when it has completed, calls `make`, and `second` with its result."""
        work = first()

        def rest() -> None:
            work.wait()
            second(make()).wait()

        return Threaded(self.start(rest))


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

    def chain(self, first: First, make: Callable[[], Tensor], second: Second) -> Chain:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            first().wait()  # makes the stream wait, not the host
            made = make()
            second(made).wait()
            return _Streamed(stream.record_event(), made)

    def close(self) -> None:
        self._stream.synchronize()


class _Streamed(NamedTuple):
    over: torch.cuda.Event
    made: Tensor

    def wait(self) -> None:
        current = torch.cuda.current_stream()
        current.wait_event(self.over)
        self.made.record_stream(current)

    def is_completed(self) -> bool:
        return bool(self.over.query())  # type: ignore[no-untyped-call]


Chains = ThreadChains | StreamChains
Chain = Threaded | _Streamed


_LOOK_S = 0.005  # the interval in which the thread looks for new sends


_Send = tuple[dist.Work, Tensor, Callable[[BaseException], ZbcError]]  # the last makes the error of its failure


class EventSends:
    """For NCCL, whose work objects can be polled: the sends to one rank, which complete in order. NCCL never raises: a
    failed send is completed, too, and returns its exception on request. `drain` does not block the host; it makes the
    compute stream wait, so that the memory is reused after the send only."""

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
        self._under_way.clear()


def _check(send: _Send) -> None:
    """Raises the error that `lost` makes, if a completed send has failed."""
    work, _, lost = send
    error = work.exception()
    if error is not None:
        raise lost(error if isinstance(error, BaseException) else RuntimeError(str(error)))


class ThreadSends:
    """For gloo, whose work objects complete only in a call of `wait`: a thread calls it. Waking a thread costs the rank
    more than starting a send, so the thread looks for new sends, two hundred times a second, and delivered tensors are
    kept that much longer: with ops of a millisecond, a few tensors."""

    def __init__(self) -> None:
        self._under_way: deque[_Send] = deque()
        self._failure: ZbcError | None = None
        self._waiting, self._closed = threading.Lock(), threading.Event()  # the lock: of whoever waits for sends
        threading.Thread(target=self._reap, name="zbc-sends", daemon=True).start()

    def add(self, work: dist.Work, tensor: Tensor, lost: Callable[[BaseException], ZbcError]) -> None:
        if self._failure is not None:
            raise self._failure
        self._under_way.append((work, tensor, lost))

    def drain(self) -> None:
        """After the collective at a step's end all sends are delivered: asking is faster than waking the thread."""
        self._wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._closed.set()

    def _reap(self) -> None:
        while not self._closed.wait(_LOOK_S):
            self._wait()

    def _wait(self) -> None:
        """Waits for all sends, each referenced by this frame only, up to the first failure."""
        with self._waiting:
            while self._under_way and self._failure is None:
                work, _, lost = self._under_way.popleft()
                try:
                    work.wait()
                except RuntimeError as error:
                    self._failure = lost(error)
                del work, _


Sends = EventSends | ThreadSends
