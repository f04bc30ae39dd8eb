"""Rows of tables that compare measured with predicted numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from zbc.text import aligned, fixed, percent

if TYPE_CHECKING:
    from zbc.compiler.recorded.report import Quantity

QUANTITY = ("", "predicted", "measured", "", "")  # heads after the name of a row
_ROWS = {
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_rank": "tokens/s per rank",
    "mfu": "MFU",
}


def times(one: Quantity, unit: str = " ms") -> list[str]:
    middle, low, high = aligned([one.measured, one.low, one.high])
    predicted = "-" if one.predicted is None else f"{fixed(one.predicted)}{unit}"
    change = "" if one.change is None else f"{100 * one.change:+.1f}%"
    return [predicted, f"{middle}{unit}", "" if one.low == one.high else f"{low}-{high}", change]


def rates(one: Quantity) -> list[str]:
    predicted = "-" if one.predicted is None else percent(one.predicted)
    change = "" if one.predicted is None else f"{100 * (one.measured - one.predicted):+.1f} points"
    spread = "" if one.low == one.high else f"{100 * one.low:.1f}-{percent(one.high)}"
    return [predicted, percent(one.measured), spread, change]


def throughput(known: Mapping[str, Quantity]) -> Iterator[Sequence[str]]:
    """A row for each known rate; samples only if tokens are not known."""
    for key, name in _ROWS.items():
        rate = known.get(key)
        if rate is None or (key == "samples_per_s" and "tokens_per_s" in known):
            continue
        yield name, *(rates(rate) if key == "mfu" else times(rate, unit=""))
