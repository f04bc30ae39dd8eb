"""Limits for which orders are made beside the given one: a fixed grid, so that more memory only ever adds candidates.

In activation units, up to 1F1B's peak (p); beyond, each doubling of the limit doubles the steps: 1/4 for up to 2 ranks,
1/2 for up to 5, else 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log2

SLACK = 1e-6  # limits this close are equal, as in every comparison of memory


def whole(limits: Sequence[float], needs: Sequence[float]) -> list[tuple[float, ...]]:
    """Limits rounded down to rungs if the ranks' needs allow, and all smaller such limits, largest first."""
    p, found = len(limits), list[tuple[float, ...]]()
    rung = _floor(p, max(limits))
    while not found or any(limit > need for limit, need in zip(found[-1], needs, strict=True)):
        lowered = [min(limit, max(need, rung)) for limit, need in zip(limits, needs, strict=True)]
        found.append(tuple(lowered))
        rung = _floor(p, rung - max(2 * SLACK, 1e-9 * rung))  # relative, as SLACK would be lost in rounding a large one
    return found


def _floor(p: int, limit: float) -> float:
    """The largest rung not above `limit`."""
    doublings = max(0, ceil(log2(limit / p) - SLACK)) if limit > 0 else 0
    base = p * 2.0 ** (doublings - 1) if doublings else 0.0
    step = (0.25 if p <= 2 else 0.5 if p <= 5 else 1.0) * 2.0**doublings
    return round(base + floor((limit - base + SLACK) / step) * step, 9)
