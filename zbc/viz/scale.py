"""Round times for axes."""

from __future__ import annotations

import math


def ticks(begin: float, end: float, least: float) -> list[tuple[float, str]]:
    """The multiples of a round number of ms from `begin` to `end`, at least `least` ms apart, with their texts."""
    every = round_up(least)
    decimals = max(0, -math.floor(math.log10(every) + 1e-9))
    first, last = math.ceil(begin / every - 1e-9), math.floor(end / every + 1e-9)
    return [(number * every, f"{number * every:.{decimals}f}") for number in range(first, last + 1)]


def round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value * (1 - 1e-9))
