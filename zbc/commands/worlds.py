"""The choice of pp and dp, as `plan` and `compare` show it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zbc.commands.console import indented, labelled, table
from zbc.text import GIB, aligned

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.job.world import Weighed


def best_of(weighed: Sequence[Weighed]) -> Weighed:
    """The fastest shape per sample that fits."""
    return min((row for row in weighed if row.error is None and row.sample_ms), key=lambda row: row.sample_ms or 0.0)


def chosen_of(weighed: Sequence[Weighed]) -> str:
    """`pp 4, dp 2, the fastest of 8 ranks`."""
    shape = best_of(weighed).shape
    return f"{shape}, the fastest of {shape.ranks} ranks"


def of_world(weighed: Sequence[Weighed]) -> Iterator[RenderableType]:
    """The candidate shapes, with the time of each."""
    yield labelled("world", f"{chosen_of(weighed)}, each planned by the fast search")
    best = best_of(weighed)
    planned = [row for row in weighed if row.sample_ms is not None]
    times = iter(aligned([row.sample_ms or 0.0 for row in planned], 3))
    sized = all(row.peak_bytes is not None for row in planned)
    held = iter(aligned([(row.peak_bytes or 0) / GIB for row in planned], 3) if sized else [""] * len(planned))
    axes = [axis for axis in ("cp", "tp", "ep") if any(getattr(row.shape, axis) > 1 for row in weighed)]
    rows = []
    for row in weighed:
        pp, dp, microbatches, *_ = row.shape
        cells = ["", ""] if row.sample_ms is None else ["> " * row.at_least + next(times), next(held)]
        mark = "<" if row is best else "" if row.error is None else row.error.code
        note = "no plan" if row.shape.why else mark
        shares = [str(getattr(row.shape, axis)) for axis in axes]
        rows.append([str(pp), str(dp), *shares, str(microbatches or ""), *(cells if sized else cells[:1]), note])
    heads = ["pp", "dp", *axes, "microbatches", "ms/sample", *(["GiB"] if sized else []), ""]
    yield indented(table(heads, rows, left=0, most=None))
    if any(row.at_least for row in weighed):
        yield indented("> at least: the others are faster, so it was not planned with all of its microbatches")
    for text in dict.fromkeys(_reason(row) for row in weighed if _reason(row)):
        yield indented(text)


def _reason(row: Weighed) -> str:
    """Why a shape was not planned, or must not be chosen; "" if it may be."""
    if row.error is not None:
        return f"{row.shape}: [{row.error.code}] {row.error.message}"
    return f"{row.shape}: {row.shape.why}" if row.shape.why else ""
