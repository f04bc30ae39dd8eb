"""How many processor cores a process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """The processor cores this process may use: those it is bound to, where that can be asked."""
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(usable(0)) if usable is not None else os.cpu_count() or 1
