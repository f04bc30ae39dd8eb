"""Timestamps of a rank, to be read later: on the host a number, on a GPU an event in the compute stream.

The offset of a rank's clock from that of rank 0 is measured by asking rank 0 for its time. A rank reads its clock,
asks, and reads it again when the answer has arrived: rank 0 read its own clock in between. The fastest of several tries
counts, and half of its time is the uncertainty. Ranks on one machine read the same clock, so their offset is 0 unless
the answer contradicts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from zbc.trace.line import ClockOffset
from zbc.training.launch.board import Board

_TRIES = 5


class Stamps:
    """Timestamps of one step; here of devices whose ops complete before the call returns."""

    def open(self) -> None:
        """A step begins; stamps of the previous one become invalid."""

    def stamp(self) -> Any:
        """A timestamp of now; cheap."""
        return time.perf_counter_ns()

    def read(self, stamps: Sequence[Any]) -> list[int]:
        """ns of stamps of this step, on the clock of `time.perf_counter_ns`."""
        return list(stamps)


class CudaStamps(Stamps):
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
    return CudaStamps(device) if device.type == "cuda" else Stamps()


# ---- clocks of several machines -------------------------------------------------------------------------------


_ASKED = 12
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # unique per boot of a machine; Linux


def compare_clocks(
    board: Board,
    name: str,
    limit: timedelta,
    *,
    now: Callable[[], int] = time.perf_counter_ns,
    machine: str | None = None,
) -> ClockOffset:
    """Compares the clock `now` (ns) with that of rank 0; all ranks call this together, once for each `name`.

    `machine` identifies the machine, by default with the kernel's boot id. Blocks for at most `limit`.
    """
    here = _machine() if machine is None else machine
    if board.rank == 0:
        for rank in range(1, board.ranks):
            for attempt in range(_ASKED):
                key = f"clock/{name}/{rank}/{attempt}"
                board.hear(f"{key}/ask", limit)
                board.tell(f"{key}/answer", f"{now()} {here}")
        return ClockOffset(now(), 0, 0)
    best: tuple[int, int, int] | None = None
    there = ""
    for attempt in range(_ASKED):
        key = f"clock/{name}/{board.rank}/{attempt}"
        asked = now()
        board.tell(f"{key}/ask", "")
        answer, _, there = board.hear(f"{key}/answer", limit).partition(" ")
        heard = now()
        if best is None or heard - asked < best[0]:
            best = heard - asked, (asked + heard) // 2, int(answer)
    took, at, theirs = best or (0, 0, 0)
    offset, uncertainty = theirs - at, (took + 1) // 2
    if here and here == there and abs(offset) <= uncertainty:
        return ClockOffset(at, 0, 0)
    return ClockOffset(at, offset, uncertainty)


def _machine() -> str:
    """The boot id of this machine; empty if there is none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
