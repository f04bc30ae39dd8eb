"""Compute time of a rank, without its waits; on a GPU also its current op, and how far its host may run ahead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from zbc.runtime.core.progress import Progress

Busy = Callable[[], float]  # seconds; waits until the compute has ended


class Clock(Protocol):
    """Measures the compute time of a rank."""

    def start(self) -> float:
        """Compute begins; its inputs have arrived. Returns a time to be passed to `stop`."""

    def stop(self, began: float) -> None:
        """Compute ends."""

    def read(self) -> Busy:
        """Seconds between starts and stops since the last read, as a function to call when they are needed."""


class WallClock:
    """For devices whose ops complete before the call returns."""

    start = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._busy = 0.0

    def stop(self, began: float) -> None:
        self._busy += time.perf_counter() - began

    def read(self) -> Busy:
        busy, self._busy = self._busy, 0.0
        return lambda: busy


class Begins:
    """A `Clock` that calls `begun` when an op begins to compute."""

    def __init__(self, inner: Clock, begun: Callable[[], object]) -> None:
        self._start, self._begun = inner.start, begun
        self.stop, self.read = inner.stop, inner.read

    def start(self) -> float:
        self._begun()
        return self._start()


def clock_for(device: torch.device, progress: Progress) -> Clock:
    """The clock of a device: events on CUDA, whose ops run asynchronously, otherwise the host's clock."""
    if device.type != "cuda":
        return WallClock()
    from zbc.runtime.cuda import CudaClock

    return CudaClock(device, progress)
