"""How long a rank computed, without what it waited; on a GPU also where it is, and how far its host may be ahead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from zbc.runtime.core.progress import Progress

Busy = Callable[[], float]  # seconds, known once compute has ended: waits for that


class Clock(Protocol):
    """How long a rank computes."""

    def start(self) -> float:
        """Compute begins; its inputs are there. What this returns is for `stop`."""

    def stop(self, began: float) -> None:
        """Compute ends."""

    def read(self) -> Busy:
        """Seconds between starts and stops since the last read, to be asked for when they are needed."""


class WallClock:
    """For devices that compute while the call lasts."""

    start = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._busy = 0.0

    def stop(self, began: float) -> None:
        self._busy += time.perf_counter() - began

    def read(self) -> Busy:
        busy, self._busy = self._busy, 0.0
        return lambda: busy


def clock_for(device: torch.device, progress: Progress) -> Clock:
    """The clock of a device: events on CUDA, whose ops go on when a call returns, else the host's."""
    if device.type != "cuda":
        return WallClock()
    from zbc.runtime.cuda import CudaClock

    return CudaClock(device, progress)
