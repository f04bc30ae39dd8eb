"""The numbers of processor cores and threads that a process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """The number of cores that this process is bound to, or of all cores if that cannot be asked."""
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(usable(0)) if usable is not None else os.cpu_count() or 1


def threads_of(ranks: int) -> int:
    """The number of threads for a rank's kernels: OMP_NUM_THREADS, or its share of the cores of `ranks`."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else max(1, cores() // ranks)
