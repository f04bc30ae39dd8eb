"""Statistics of the samples of a time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from zbc.job.profile import Measured, spread


def measured(values: Sequence[float], less: float = 0.0) -> Measured:
    """The median of `values` minus `less`; never below 0."""
    middle = statistics.median(values)
    rest = max(0.0, middle - less)
    return Measured(ms=rest, spread=spread(values) * middle / rest if rest > 0.05 * middle else 0.0)


def quick(values: Sequence[float]) -> float:
    """The first decile of `values`: the time of a short call without interruptions by other threads."""
    found = sorted(values)
    return found[len(found) // 10] if found else 0.0
