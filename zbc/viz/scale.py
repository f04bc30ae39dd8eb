"""Round times for axes."""

from __future__ import annotations

import math


def ticks(begin: float, end: float, least: float) -> list[tuple[float, str]]:
    """The multiples of a round number of ms from `begin` to `end`, at least `least` ms apart, with their texts."""
    power = 10.0 ** math.floor(math.log10(least))
    every = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    decimals = max(0, -math.floor(math.log10(every) + 1e-9))
    first, last = math.ceil(begin / every - 1e-9), math.floor(end / every + 1e-9)
    return [(number * every, f"{number * every:.{decimals}f}") for number in range(first, last + 1)]
