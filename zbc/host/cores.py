"""The number of processor cores that a process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """The number of cores that this process is bound to, or of all cores if that cannot be asked."""
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(usable(0)) if usable is not None else os.cpu_count() or 1
