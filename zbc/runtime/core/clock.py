"""Compute time of a rank, without its waits; on a GPU also its current op, and how far its host may run ahead."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from zbc.runtime.core.progress import Progress

Busy = Callable[[], float]  # seconds; waits until the compute has ended


class Clock:
    """Measures the compute time of a rank: here for devices whose ops complete before the call returns."""

    # Compute begins; its inputs have arrived. Returns a time to be passed to `stop`.
    start: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._busy = 0.0

    def stop(self, began: float) -> None:
        """Compute ends."""
        self._busy += time.perf_counter() - began

    def read(self) -> Busy:
        """Seconds between starts and stops since the last read, as a function to call when they are needed."""
        busy, self._busy = self._busy, 0.0
        return lambda: busy


class Begins(Clock):
    """A `Clock` that calls `begun` when an op begins to compute."""

    def __init__(self, inner: Clock, begun: Callable[[], object]) -> None:
        self._start, self._begun = inner.start, begun
        self.stop, self.read = inner.stop, inner.read  # type: ignore[method-assign]

    def start(self) -> float:
        self._begun()
        return self._start()


def clock_for(device: torch.device, progress: Progress) -> Clock:
    """The clock of a device: events on CUDA, whose ops run asynchronously, otherwise the host's clock."""
    if device.type != "cuda":
        return Clock()
    from zbc.runtime.cuda import CudaClock

    return CudaClock(device, progress)
