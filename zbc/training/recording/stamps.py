"""Moments of a rank, to be read later: on the host a number at once, on a GPU an event in the stream that computes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

_TRIES = 5


class Stamps(Protocol):
    """Moments of one step, taken as it runs."""

    def open(self) -> None:
        """A step begins; stamps of the one before are void."""

    def stamp(self) -> Any:
        """Now; cheap."""

    def read(self, stamps: Sequence[Any]) -> list[int]:
        """ns of stamps of this step, on the clock of `time.perf_counter_ns`."""


class HostStamps:
    """For devices that compute while the call lasts."""

    stamp = staticmethod(time.perf_counter_ns)

    def open(self) -> None:
        return None

    def read(self, stamps: Sequence[Any]) -> list[int]:
        return list(stamps)


class CudaStamps:
    """For cuda, where a call only enqueues work.

    Events know how far they are apart, not when they were: at the beginning of a step one is recorded while the stream
    is empty, between two looks at the host's clock. Only that stream is waited for, not the device: what was sent may
    be on its way.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        self._anchor: torch.cuda.Event | None = None
        self._anchored_ns = 0

    def open(self) -> None:
        self._used = 0
        torch.cuda.current_stream(self._device).synchronize()
        best: int | None = None
        for _ in range(_TRIES):
            before = time.perf_counter_ns()
            event = self.stamp()
            event.synchronize()
            after = time.perf_counter_ns()
            if best is None or after - before < best:
                best, self._anchor, self._anchored_ns = after - before, event, (before + after) // 2

    def stamp(self) -> Any:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._used]
        event.record(torch.cuda.current_stream(self._device))
        self._used += 1
        return event

    def read(self, stamps: Sequence[Any]) -> list[int]:
        anchor = self._anchor
        if anchor is None or not stamps:
            return []
        stamps[-1].synchronize()  # the last one on the stream
        return [self._anchored_ns + round(1e6 * anchor.elapsed_time(event)) for event in stamps]


def stamps_for(device: torch.device) -> Stamps:
    """Those of a device: events on CUDA, else the host's time."""
    return CudaStamps(device) if device.type == "cuda" else HostStamps()
