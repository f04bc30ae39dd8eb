"""Times of F, B and W of a block for a slice of a sequence, fitted to a profile's times of a few slices.

A slice of `rows` tokens after `past` others takes floor + linear rows + attend rows (past + rows/2): the start of its
kernels, its products, and the keys that its tokens see. The three numbers are a least-squares fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbc.job.profile import Profile, SliceTime

LEAST = 3  # slices of which times are needed


@dataclass(frozen=True, slots=True)
class SliceTimes:
    """ms of F, B and W by the boundaries of a slice: `fits` has floor, linear and attend of each."""

    fits: tuple[tuple[float, float, float], ...]

    @classmethod
    def of(cls, profile: Profile | None) -> SliceTimes | None:
        """The fit for the blocks of a built-in family; None if the profile has times of too few slices."""
        block = None if profile is None else profile.layers.get("block")
        if block is None or len(block.slices) < LEAST:
            return None
        return cls(tuple(_fit(block.slices, name) for name in ("f", "b", "w")))

    def each(self, begin: int, end: int) -> tuple[float, float, float]:
        """ms of F, B and W of one slice."""
        shape = _shape(end - begin, begin)
        f, b, w = (sum(map(float.__mul__, fit, shape)) for fit in self.fits)
        return f, b, w

    @property
    def rates(self) -> tuple[float, float]:
        """Linear and attend of F, B and W together."""
        _, linear, attend = map(sum, zip(*self.fits, strict=True))
        return linear, attend


def _shape(rows: int, past: int) -> tuple[float, float, float]:
    return 1.0, float(rows), rows * (past + rows / 2)


def _fit(slices: Sequence[SliceTime], name: str) -> tuple[float, float, float]:
    """Floor, linear and attend by least squares; a number that would be negative is fixed at 0."""
    kept = [0, 1, 2]
    while True:
        solution = _solved(
            [[_shape(time.rows, time.past)[i] for i in kept] for time in slices],
            [getattr(time, name) for time in slices],
        )
        low = min(range(len(kept)), key=solution.__getitem__)
        if solution[low] >= 0 or len(kept) == 1:
            numbers = dict(zip(kept, solution, strict=True))
            return max(0.0, numbers.get(0, 0.0)), max(0.0, numbers.get(1, 0.0)), max(0.0, numbers.get(2, 0.0))
        del kept[low]


def _solved(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The least-squares solution x of rows x = values; columns are scaled, since tokens squared are large."""
    count = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(count)]
    table = [[row[i] / scale[i] for i in range(count)] for row in rows]
    left = [[sum(row[i] * row[j] for row in table) for j in range(count)] for i in range(count)]
    right = [sum(row[i] * value for row, value in zip(table, values, strict=True)) for i in range(count)]
    for i in range(count):
        pivot = max(range(i, count), key=lambda r: abs(left[r][i]))
        left[i], left[pivot], right[i], right[pivot] = left[pivot], left[i], right[pivot], right[i]
        if abs(left[i][i]) < 1e-12:
            continue
        for r in range(count):
            if r != i:
                factor = left[r][i] / left[i][i]
                left[r] = [a - factor * b for a, b in zip(left[r], left[i], strict=True)]
                right[r] -= factor * right[i]
    return [right[i] / left[i][i] / scale[i] if abs(left[i][i]) >= 1e-12 else 0.0 for i in range(count)]
