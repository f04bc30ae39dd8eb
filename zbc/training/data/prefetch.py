"""Batches prepared by a background thread, so that a stage that reads data does not wait for them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from zbc.plan.phases import Phases
from zbc.runtime.core.state import BatchSource
from zbc.training.data.data import Batches

CPU = torch.device("cpu")
AHEAD = 4  # tensors prepared in advance

Want = tuple[str, int]  # "inputs" or "targets", and the microbatch


class Prefetched(BatchSource):
    """Prefetched batches: `wants` has the requests of a step of every phase, in order.

    Requests in another order are served synchronously. An error in the thread is raised when its tensor is requested.
    Tensors for a GPU, `device`, are pinned, so that their copy does not block.
    """

    def __init__(self, batches: Batches, wants: Sequence[Sequence[Want]], device: torch.device = CPU) -> None:
        self._batches, self._wants, self._device = batches, [tuple(step) for step in wants], device
        self._ready: dict[tuple[str, int, int], _Coming] = {}
        self.open()

    def open(self) -> None:
        self._batches.open()
        self._places = [{want: place for place, want in enumerate(step)} for step in self._wants]
        self._asked: SimpleQueue[_Coming | None] = SimpleQueue()
        self._thread: threading.Thread | None = None  # from the first request on

    @property
    def count(self) -> int:
        return self._batches.count

    def inputs(self, step: int, mb: int, group: str = "") -> Tensor:
        return self._take("inputs", step, mb)

    def targets(self, step: int, mb: int) -> Tensor:
        return self._take("targets", step, mb)

    def digest(self) -> int:
        return self._batches.digest()

    def follow(self, phases: Phases) -> None:
        """Starts the steps from the position of `phases`; the number of phases is unchanged."""
        self._forget()
        self._batches.follow(phases)

    def close(self) -> None:
        """The thread ends after its current read."""
        self._forget()
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join()
        self._places.clear()
        self._batches.close()

    def _forget(self) -> None:
        for waiting in self._ready.values():
            waiting.cancel()
        self._ready.clear()

    def _take(self, kind: str, step: int, mb: int) -> Tensor:
        ready = self._ready.pop((kind, step, mb), None)
        place = self._places[self._batches.phases.index(step)].get((kind, mb)) if self._places else None
        if place is not None:
            self._order(step, place + 1)
        made = None if ready is None else ready.result()
        return self._make(kind, step, mb) if made is None else made

    def _order(self, step: int, place: int) -> None:
        """Requests the next tensors from the thread; cancels those that are no longer next."""
        coming: list[tuple[str, int, int]] = []
        while len(coming) < AHEAD:
            wants = self._wants[self._batches.phases.index(step)]
            coming += [(kind, step, mb) for kind, mb in wants[place : place + AHEAD - len(coming)]]
            step, place = step + 1, 0
        for key in self._ready.keys() - set(coming):
            self._ready.pop(key).cancel()
        if self._thread is None:
            self._thread = self._start()
        for key in coming:
            if key not in self._ready:
                self._ready[key] = wanted = _Coming(self._make, key)
                self._asked.put(wanted)

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=_make_all, args=(self._asked, self._device), name="zbc-data", daemon=True)
        thread.start()
        weakref.finalize(self, self._asked.put, None)  # it ends also without `close`
        return thread

    def _make(self, kind: str, step: int, mb: int) -> Tensor:
        tensor = self._batches.inputs(step, mb) if kind == "inputs" else self._batches.targets(step, mb)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


class _Coming:
    """A tensor that the thread makes: a future with a quarter of the overhead, since every microbatch has one."""

    __slots__ = ("_call", "_done", "_error", "_key", "_value")

    def __init__(self, call: Callable[[str, int, int], Tensor], key: tuple[str, int, int]) -> None:
        self._call: Callable[[str, int, int], Tensor] | None = call
        self._key, self._done = key, threading.Lock()
        self._value: Tensor | None = None
        self._error: BaseException | None = None
        self._done.acquire()

    def cancel(self) -> None:
        """Cancels it: it is no longer needed."""
        self._call = None

    def make(self) -> None:
        """Makes the tensor, in the thread."""
        call, self._call = self._call, None  # drops a reference cycle
        try:
            self._value = None if call is None else call(*self._key)
        except BaseException as error:
            self._error = error
        self._done.release()

    def result(self) -> Tensor | None:
        """Waits for the tensor. Raises the thread's error; None if it was cancelled."""
        with self._done:
            if self._error is not None:
                raise self._error
            return self._value


def _make_all(asked: SimpleQueue[_Coming | None], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the current device is per thread
    while (coming := asked.get()) is not None:
        coming.make()
        del coming
