"""How far the clocks of two ranks are apart, found by asking rank 0 for its time.

A rank looks at its clock, asks, and looks again when the answer is there: rank 0 looked at its own somewhere in
between. Of several tries the quickest counts, and half of what it took is the uncertainty. Where both run on one
machine they read the same clock, which the answer has to agree with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from zbc.trace.recording import ClockOffset
from zbc.training.launch.board import Board

_TRIES = 12
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # of this machine since it was started; Linux


def compare_clocks(
    board: Board,
    name: str,
    limit: timedelta,
    *,
    now: Callable[[], int] = time.perf_counter_ns,
    machine: str | None = None,
) -> ClockOffset:
    """Compare the clock `now` (ns) with that of rank 0; all ranks do so together, once for each `name`.

    `machine` tells machines apart; by default what the kernel says. Blocks for as long as `limit`.
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
    """Empty where that cannot be told."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
