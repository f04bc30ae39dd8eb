"""Timestamps of a rank, to be read later: on the host a number, on a GPU an event in the compute stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

_TRIES = 5


class Stamps(Protocol):
    """Timestamps of one step."""

    def open(self) -> None:
        """A step begins; stamps of the previous one become invalid."""

    def stamp(self) -> Any:
        """A timestamp of now; cheap."""

    def read(self, stamps: Sequence[Any]) -> list[int]:
        """ns of stamps of this step, on the clock of `time.perf_counter_ns`."""


class HostStamps:
    """For devices whose ops complete before the call returns."""

    stamp = staticmethod(time.perf_counter_ns)

    def open(self) -> None:
        return None

    def read(self, stamps: Sequence[Any]) -> list[int]:
        return list(stamps)


class CudaStamps:
    """For cuda, where a call only enqueues work.

    Events measure differences, not absolute times: at the beginning of a step one is recorded while the stream is
    empty, between two reads of the host's clock. It waits for that stream only, not for the device: sends may be in
    flight.
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
    """The timestamps of a device: events on CUDA, otherwise the host's time."""
    return CudaStamps(device) if device.type == "cuda" else HostStamps()
