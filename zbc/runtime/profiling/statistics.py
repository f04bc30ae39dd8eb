"""Medians and how far apart the quartiles are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from zbc.profile import Measured


def spread(values: Sequence[float]) -> float:
    """The distance of the quartiles as a share of the median; 0 for fewer than two values or a median of 0."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / abs(middle) if middle else 0.0


def measured(values: Sequence[float], less: float = 0.0) -> Measured:
    """The median of `values`, of which `less` does not count; never below 0."""
    middle = statistics.median(values)
    rest = max(0.0, middle - less)
    return Measured(ms=rest, spread=spread(values) * middle / rest if rest > 0.05 * middle else 0.0)
