"""What the replicas of a stage take from, and lay into, each other's memory: nobody meets, and nothing is sent.

Each of them has a window, memory that all see:

    row      the weights that it steps, as a GATHER takes them
    slots    one for each replica: what that one adds to the sum of these weights' gradients
    marks    the step that the row is for, and that after the last one for which its gradients are in the slots of all

    GATHER    wait until the rows of all are for this step, and copy them
    SCATTER   gradients go into the slots that their owners have for this rank; those that follow add up
    REDUCE    the same, then the mark
    VALIDATE  wait for the marks of all, and add the slots in the order of the ranks: bits do not depend on timing
    STEP      the new weights go into the row, then the mark

A replica has taken its last weights of a step before it marks its gradients, and each waits for these marks before it
steps: nobody reads a row that changes. A row of the next step says that the owner has added its slots: they may be
written again. Only steps wait for each other, so replicas may gather in any order, and as often as their own plans say
(arXiv 2601.19362).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch
from torch import Tensor

from zbc.runtime.flat import ALIGNED
from zbc.runtime.transport import Transport

_SHORTEST, _LONGEST = 2e-5, 1e-3  # seconds between two looks at marks
_MARK = 8  # bytes: an int64
_CPU = torch.device("cpu")


class Window:
    """This rank's, and its view of those of all `ranks`, which open theirs together.

    `row`: bytes; `slot`: elements of type `kind`, which the gradients of one owner's weights take.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: tuple[int, ...],
        row: int,
        slot: int,
        kind: torch.dtype,
        device: torch.device,
        beside: Beside,
    ) -> None:
        self._mine, self._beside = ranks.index(transport.rank), beside
        start, width = _aligned(row), _aligned(slot * kind.itemsize)
        marks = transport.share(2 * _MARK, ranks, _CPU)
        memory = transport.share(start + len(ranks) * width, ranks, device)
        self._marks = [one.view(torch.int64) for one in marks.tensors]
        self._alive = marks.alive
        self._rows = [one[:row] for one in memory.tensors]
        self._slots = [one[start:].view(len(ranks), width).view(kind)[:, :slot] for one in memory.tensors]
        self._version = 1  # of marks that are 0 at first
        self.bytes = start + len(ranks) * width

    @property
    def row(self) -> Tensor:
        """What others take from this rank, to be followed by `publish`."""
        return self._rows[self._mine]

    @property
    def laid(self) -> list[Tensor]:
        """Where this rank lays its gradients: a slot of each owner, to be followed by `give`."""
        return [slots[self._mine] for slots in self._slots]

    def publish(self) -> None:
        """The row is there for the step to come."""
        self._mark(0, self._version)

    def take(self, copy: Callable[[list[Tensor]], None]) -> Begun:
        """Have `copy` called with the rows of all once they are there, beside the ops that follow."""
        version = self._version

        def run() -> None:
            self._wait(0, version)
            copy(self._rows)

        return self._beside.start(run)

    def give(self) -> Given:
        """All of this rank's gradients of the step are in the slots."""
        self._version += 1
        self._mark(1, self._version)
        return Given(self, self._version)

    def given(self, version: int) -> bool:
        """Whether those of all are in the slots."""
        return all(int(one[1]) >= version for one in self._marks)

    def summed(self, version: int) -> Tensor:
        """The sum of this rank's slots, in the first of them."""
        self._wait(1, version)
        slots = self._slots[self._mine]
        for other in slots[1:]:
            slots[0].add_(other)
        return slots[0]

    def _mark(self, which: int, version: int) -> None:
        def mark() -> None:
            fence()
            self._marks[self._mine][which] = version

        self._beside.after(mark)

    def _wait(self, which: int, version: int) -> None:
        pause = _SHORTEST
        while not all(int(one[which]) >= version for one in self._marks):
            self._alive()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        fence()


class Given:
    """A sum of gradients in a window, as a `Pending`."""

    def __init__(self, window: Window, version: int) -> None:
        self._window, self._version = window, version
        self.total: Tensor  # once it was waited for

    def wait(self) -> None:
        self.total = self._window.summed(self._version)

    def ready(self) -> bool:
        return self._window.given(self._version)


class Beside:
    """A thread that does what may wait, in the order in which it is asked to; on CUDA in a stream of its own, behind
    what the current one had been given. Has not run on GPUs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._todo,), name="zbc-windows", daemon=True).start()
        weakref.finalize(self, self._todo.put, None)

    def start(self, run: Callable[[], None]) -> Begun:
        stream, found = self._stream, Future[torch.cuda.Event | None]()
        before = None if stream is None else torch.cuda.current_stream().record_event()

        def work() -> None:
            try:
                with torch.no_grad():
                    if stream is None or before is None:
                        run()
                        found.set_result(None)
                        return
                    before.synchronize()
                    with torch.cuda.stream(stream):
                        run()
                        found.set_result(stream.record_event())
            except BaseException as error:
                found.set_exception(error)

        self._todo.put(work)
        return Begun(found)

    def after(self, mark: Callable[[], None]) -> None:
        """Mark what is done by then: on a CPU that is now."""
        if self._stream is None:
            mark()
        else:
            self.start(mark)


class Begun:
    """What such a thread has begun, as a `Pending`."""

    def __init__(self, found: Future[torch.cuda.Event | None]) -> None:
        self._found = found

    def wait(self) -> None:
        event = self._found.result()
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def ready(self) -> bool:
        return self._found.done()


def _work(todo: SimpleQueue[Callable[[], None] | None]) -> None:
    torch.set_num_threads(torch.get_num_threads())  # a new thread has OpenMP's own idea of it
    while (run := todo.get()) is not None:
        run()
        del run  # which holds the weights that it wrote


_turn = threading.Lock()


def fence() -> None:
    """What this thread wrote before is seen by others before what it writes next, and likewise for what it reads:
    a lock that is given back and taken again is a barrier, also where memory is not ordered as on x86."""
    for _ in range(2):
        _turn.acquire()
        _turn.release()


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
