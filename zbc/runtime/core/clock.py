"""How long a rank computed, without what it waited; on a GPU also where it is, and how far its host may be ahead."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from zbc.runtime.core.progress import Progress

# How many compute ops the host of a GPU may have started that have not ended. While one runs the next one is launched.
# Driver queues hold a thousand launches, many ops: with that lead sent tensors would stay, and nobody could tell where
# a rank hangs.
LEAD = 2

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


@dataclass(slots=True)
class _Sum:
    """Of the times of ops between two reads."""

    seconds: float = 0.0
    open: int = 0  # ops that have not ended, as far as the host knows


@dataclass(slots=True)
class _Mark:
    """A compute op that the host has started: events on the stream where its inputs are there and where it ends."""

    place: Progress
    sum: _Sum
    begin: torch.cuda.Event
    end: torch.cuda.Event
    ended: bool = False  # whether `end` is on the stream


class CudaClock:
    """For cuda, where a call only enqueues work: events around it on the stream.

    Waits for events of the stream that computes only, never for the whole device: posted receives would have to end
    first. `start` waits for the op `LEAD` ops before to end; a proven plan allows that, since a rank's compute ops end
    one after the other there.
    """

    def __init__(self, device: torch.device, progress: Progress) -> None:
        self._device, self._progress = device, progress
        self._marks: deque[_Mark] = deque()  # those that have not ended, as far as the host knows
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._sum = _Sum()
        self._seen: tuple[_Mark | None, bool] = (None, False)  # by `behind` the last time
        self._since = 0.0  # when it saw that first
        progress.behind = self.behind

    def start(self) -> float:
        while len(self._marks) >= LEAD:
            self._settle()
        begin, end = self._free.pop() if self._free else (_event(), _event())
        begin.record(torch.cuda.current_stream(self._device))
        self._sum.open += 1
        self._marks.append(_Mark(replace(self._progress, behind=None), self._sum, begin, end))
        return 0.0

    def stop(self, began: float) -> None:
        mark = self._marks[-1]
        mark.end.record(torch.cuda.current_stream(self._device))
        mark.ended = True

    def read(self) -> Busy:
        found, self._sum = self._sum, _Sum()

        def busy() -> float:
            while found.open:
                self._settle()
            return found.seconds

        return busy

    def _settle(self) -> None:
        """Wait until the oldest op has ended, and count it."""
        mark = self._marks[0]
        mark.end.synchronize()
        mark.sum.seconds += mark.begin.elapsed_time(mark.end) / 1e3
        mark.sum.open -= 1
        self._marks.popleft()
        self._free.append((mark.begin, mark.end))

    def behind(self, now: float) -> Progress:
        """The op the device is in, seen from the watchdog's thread; it waits until what the op needs is there.

        Where the device has done all that it was told to: where the host is.
        """
        torch.cuda.set_device(self._device)
        try:
            mark = next((mark for mark in tuple(self._marks) if not (mark.ended and _passed(mark.end))), None)
            begun = mark is not None and _passed(mark.begin)
        except RuntimeError:  # the device has failed, which the rank's own thread will find
            return self._progress
        if self._seen[0] is not mark or self._seen[1] is not begun:
            self._seen, self._since = (mark, begun), now
        if mark is None:
            return replace(self._progress, since=max(self._progress.since, self._since))
        return replace(mark.place, waiting=not begun, since=self._since)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def clock_for(device: torch.device, progress: Progress) -> Clock:
    """The clock of a device: events on CUDA, whose ops go on when a call returns, else the host's."""
    return CudaClock(device, progress) if device.type == "cuda" else WallClock()
