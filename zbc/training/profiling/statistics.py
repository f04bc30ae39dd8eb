"""What many samples of one time come to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from zbc.job.profile import Measured, spread


def measured(values: Sequence[float], less: float = 0.0) -> Measured:
    """The median of `values`, of which `less` does not count; never below 0."""
    middle = statistics.median(values)
    rest = max(0.0, middle - less)
    return Measured(ms=rest, spread=spread(values) * middle / rest if rest > 0.05 * middle else 0.0)


def quick(values: Sequence[float]) -> float:
    """What a tenth of `values` is not above: a short call without the times at which something else got the core."""
    found = sorted(values)
    return found[len(found) // 10] if found else 0.0
