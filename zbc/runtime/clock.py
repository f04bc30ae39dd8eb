"""How long a rank computed, without what it waited."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Clock(Protocol):
    """How long a rank computes."""

    def start(self) -> float:
        """Compute begins; its inputs are there. What this returns is for `stop`."""

    def stop(self, began: float) -> None:
        """Compute ends."""

    def read(self) -> float:
        """Seconds between starts and stops since the last read."""


class WallClock:
    """For devices that compute while the call lasts."""

    start = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._busy = 0.0

    def stop(self, began: float) -> None:
        self._busy += time.perf_counter() - began

    def read(self) -> float:
        busy, self._busy = self._busy, 0.0
        return busy


class CudaClock:
    """For cuda, where a call only enqueues work: events around it on the stream, read when the step is over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def start(self) -> float:
        self._record()
        return 0.0

    def stop(self, began: float) -> None:
        self._record()

    def read(self) -> float:
        torch.cuda.synchronize(self._device)
        used, self._used = self._used, 0
        pairs = zip(self._events[0:used:2], self._events[1:used:2], strict=True)
        return float(sum(begin.elapsed_time(end) for begin, end in pairs)) / 1e3

    def _record(self) -> None:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._events[self._used].record(torch.cuda.current_stream(self._device))
        self._used += 1


def clock_for(device: torch.device) -> Clock:
    """The clock of a device: events on CUDA, whose ops go on when a call returns, else the host's."""
    return CudaClock(device) if device.type == "cuda" else WallClock()
