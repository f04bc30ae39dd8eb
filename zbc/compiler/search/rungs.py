"""The memory limits that are searched for a given limit: a fixed grid, so that more memory only ever adds candidates.

A search under a limit is a heuristic; under a larger one it may do a little worse. The best of all grid limits up to
the given one cannot: a larger limit includes all of them. The grid is the same for all limits of a problem. Its coarse
rungs are searched, its fine ones only try recipes that did well on the coarse rung below. In activation units, up to
1F1B's peak (p); beyond, each doubling of the limit doubles the steps:

    ranks      coarse   fine
    1 and 2    1/4      1/40
    3 to 5     1/2      1/20
    6 and up   1        1/10

With microbatches in k slices the steps are a k-th of these. If ranks have limits of their own, a rung subtracts the
same from each of them, down to the least it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log2

from zbc.compiler.search.feasible import least
from zbc.compiler.search.problem import Problem

FINE = 10  # fine rungs for a coarse one
SLACK = 1e-6  # limits this close are equal, as in every comparison of memory


@dataclass(frozen=True, slots=True)
class Grid:
    """The rungs of one problem. A rung is named by the limit of the rank with the largest."""

    problem: Problem
    least: tuple[float, ...]
    below: tuple[float, ...]  # each rank's limit below the largest
    top: float  # the limit itself, at most `everything`
    everything: float  # a rung of its own: all microbatches fit at once
    unit: float  # the memory of each op if all are equal: only its multiples matter; else 0

    @classmethod
    def of(cls, problem: Problem) -> Grid:
        largest = max(problem.limit)
        below = tuple(round(largest - limit, 9) for limit in problem.limit)
        most = [0.0] * problem.p
        for s, rank in enumerate(problem.rank):
            most[rank] += problem.m * max(problem.keep_b[s], problem.keep_w[s])
        everything = max(a + b for a, b in zip(most, below, strict=True))
        units = {*problem.keep_b, *problem.keep_w}
        same = all(len({*change}) == 1 for mine in problem.exact for _, change in mine)
        unit = units.pop() if len(units) == 1 and same else 0.0
        return cls(problem, tuple(least(problem)), below, min(largest, everything), everything, unit)

    def at(self, rung: float) -> Problem:
        """The problem under the limits of a rung; at most its own, at least those for which an order exists."""
        limits = []
        for rank, (need, below) in enumerate(zip(self.least, self.below, strict=True)):
            limit = max(need, rung - below)
            if self.unit > 0:
                limit = max(need, floor(limit / self.unit + SLACK) * self.unit)
            limits.append(min(limit, self.problem.limit[rank]))
        return replace(self.problem, limit=limits)

    def coarse(self) -> Iterator[float]:
        """Yields coarse rungs from the largest within the limits down to one at which ranks have only their need."""
        rung = self.top if self.top >= self.everything else _floor(self.problem.p, self.top, self.problem.slices)
        lowest = min(need + below for need, below in zip(self.least, self.below, strict=True))
        while True:
            yield rung
            if rung <= lowest:
                return
            rung = _below(self.problem.p, rung, self.problem.slices)

    def fine(self, low: float, high: float) -> Iterator[float]:
        """Yields the fine rungs above `low`, up to and including `high`, from the largest down."""
        parts = FINE * self.problem.slices
        rung = _floor(self.problem.p, high, parts)
        while rung > low + SLACK:
            yield rung
            rung = _below(self.problem.p, rung, parts)


def whole(limits: Sequence[float], needs: Sequence[float]) -> list[tuple[float, ...]]:
    """Limits rounded down to coarse rungs if the ranks' needs allow, and all smaller such limits, largest first."""
    p, found = len(limits), list[tuple[float, ...]]()
    rung = _floor(p, max(limits), 1)
    while not found or any(limit > need for limit, need in zip(found[-1], needs, strict=True)):
        lowered = [min(limit, max(need, rung)) for limit, need in zip(limits, needs, strict=True)]
        found.append(tuple(lowered))
        rung = _below(p, rung, 1)
    return found


def _below(p: int, rung: float, parts: int) -> float:
    """The next smaller rung; at large limits a relative step, since a step of SLACK would be lost in rounding."""
    return _floor(p, rung - max(2 * SLACK, 1e-9 * rung), parts)


def _floor(p: int, limit: float, parts: int) -> float:
    """The largest rung not above `limit`, of a grid with `parts` rungs for each coarse one."""
    doublings = max(0, ceil(log2(limit / p) - SLACK)) if limit > 0 else 0
    base = p * 2.0 ** (doublings - 1) if doublings else 0.0
    step = (0.25 if p <= 2 else 0.5 if p <= 5 else 1.0) * 2.0**doublings / parts
    return round(base + floor((limit - base + SLACK) / step) * step, 9)
