"""Steps whose microbatches have rows of the lengths that stand in the plan."""

from __future__ import annotations

from collections.abc import Sequence

from zbc.runtime.core.state import Work
from zbc.runtime.core.tensors import Length


class Fixed(Work):
    """`lengths`: tokens of the rows of each microbatch of a replica, of `whole` at most; `rows`: rows with one of these
    numbers, over all replicas; `every`: microbatches whose mean is one loss."""

    def __init__(self, lengths: Sequence[int], whole: int, rows: int, every: int) -> None:
        self._lengths = [Length(tokens, whole) for tokens in lengths]
        self._sum, means = rows * sum(lengths), list[float]()
        for start in range(0, len(lengths), every):
            means += [sum(lengths[start : start + every]) / every] * every
        self._weights = [tokens / mean for tokens, mean in zip(lengths, means, strict=False)]

    def length(self, step: int, number: int) -> Length:
        return self._lengths[number % len(self._lengths)]

    def tokens(self, step: int) -> int:
        return self._sum

    def weight(self, step: int, number: int) -> float:
        return self._weights[number % len(self._weights)]
