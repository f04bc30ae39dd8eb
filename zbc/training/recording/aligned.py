"""The offset of a rank's clock from that of rank 0, measured by asking rank 0 for its time.

A rank reads its clock, asks, and reads it again when the answer has arrived: rank 0 read its own clock in between. The
fastest of several tries counts, and half of its time is the uncertainty. Ranks on one machine read the same clock, so
their offset is 0 unless the answer contradicts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from zbc.trace.recording import ClockOffset
from zbc.training.launch.board import Board

_TRIES = 12
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
            for attempt in range(_TRIES):
                key = f"clock/{name}/{rank}/{attempt}"
                board.hear(f"{key}/ask", limit)
                board.tell(f"{key}/answer", f"{now()} {here}")
        return ClockOffset(now(), 0, 0)
    best: tuple[int, int, int] | None = None
    there = ""
    for attempt in range(_TRIES):
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
