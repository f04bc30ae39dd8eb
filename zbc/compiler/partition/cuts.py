"""A cut of the model into stages with the stages that recompute, and the cuts around it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from random import Random
from typing import NamedTuple

from zbc.ir import Kind, Program


class Cut(NamedTuple):
    """Stage s holds the layers `points[s]` up to `points[s + 1]`; those in `again` recompute."""

    points: tuple[int, ...]
    again: frozenset[int] = frozenset()

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Stage -> indices of its layers."""
        return tuple(tuple(range(a, b)) for a, b in pairwise(self.points))


def of_stages(stages: Sequence[Sequence[int]], again: frozenset[int] = frozenset()) -> Cut:
    """The cut of layers listed by stage; every stage has one at least."""
    return Cut((*(part[0] for part in stages), stages[-1][-1] + 1), again)


def moved(points: Sequence[int], giver: int, taker: int) -> tuple[int, ...] | None:
    """One layer from a stage to another; the stages between shift by one. None if the giver has one only."""
    if points[giver + 1] - points[giver] < 2:
        return None
    shifted, step = list(points), -1 if taker > giver else 1
    for k in range(min(giver, taker) + 1, max(giver, taker) + 1):
        shifted[k] += step
    return tuple(shifted)


def neighbours(points: Sequence[int], rng: Random, far: int) -> list[tuple[int, ...]]:
    """Every boundary shifted by a layer either way, then up to `far` moves between stages further apart; shuffled."""
    stages = len(points) - 1
    near = [(a, b) for s in range(stages - 1) for a, b in ((s, s + 1), (s + 1, s))]
    rng.shuffle(near)
    if stages * stages <= 4 * far:
        distant = [(a, b) for a in range(stages) for b in range(stages) if abs(a - b) > 1]
        rng.shuffle(distant)
    else:
        distant = [(rng.randrange(stages), rng.randrange(stages)) for _ in range(far)]
        distant = [(a, b) for a, b in distant if abs(a - b) > 1]
    found = (moved(points, a, b) for a, b in [*near, *distant[:far]])
    return [cut for cut in found if cut is not None]


class Lightest:
    """Cuts by the work of their busiest rank, from prefix sums; `counts[r][s]` is how often rank r runs stage s."""

    def __init__(self, weights: Sequence[Sequence[float]], counts: Sequence[Sequence[float]]) -> None:
        self._sums = [list(accumulate(stage, initial=0.0)) for stage in weights]
        self._counts = counts
        self._ranks = [[(r, row[s]) for r, row in enumerate(counts) if row[s]] for s in range(len(weights))]

    def busiest(self, points: Sequence[int]) -> float:
        """The work of the busiest rank in a step: none is shorter."""
        return max(self.loads(points))

    def uneven(self, points: Sequence[int]) -> float:
        """The sum of the squares of the ranks' work."""
        return sum(load * load for load in self.loads(points))

    def loads(self, points: Sequence[int]) -> list[float]:
        """The work of each rank in a step."""
        loads = [0.0] * len(self._counts)
        for s, (a, b) in enumerate(pairwise(points)):
            size = self._sums[s][b] - self._sums[s][a]
            for r, count in self._ranks[s]:
                loads[r] += count * size
        return loads

    def within(self, most: float, limit: int) -> list[tuple[int, ...]] | None:
        """All cuts whose busiest rank works less than `most`, the lightest first; None if there are more than `limit`.

        Gives up as well after looking at twenty times as many beginnings of a cut.
        """
        stages, n = len(self._sums), len(self._sums[0]) - 1
        found: list[tuple[float, tuple[int, ...]]] = []
        loads, points, left = [0.0] * len(self._counts), [0] * (stages + 1), 20 * limit

        def place(stage: int) -> bool:
            nonlocal left
            left -= 1
            if left < 0 or len(found) > limit:
                return False
            if stage == stages:
                found.append((max(loads), tuple(points)))
                return True
            sums, start = self._sums[stage], points[stage]
            last = n - (stages - stage - 1)
            for end in range(last if stage == stages - 1 else start + 1, last + 1):
                size, holders = sums[end] - sums[start], self._ranks[stage]
                if any(loads[r] + count * size >= most for r, count in holders):
                    return True  # more layers only weigh more
                for r, count in holders:
                    loads[r] += count * size
                points[stage + 1] = end
                going = place(stage + 1)
                for r, count in holders:
                    loads[r] -= count * size
                if not going:
                    return False
            return True

        if not place(0) or len(found) > limit:
            return None
        return [points for _, points in sorted(found)]


def counts(program: Program) -> list[list[float]]:
    """[rank][stage] how often an order runs the stage there."""
    table = [[0.0] * program.placement.stages for _ in program.ranks]
    for row, ops in zip(table, program.ranks, strict=True):
        for op in ops:
            row[op.stage] += op.kind is Kind.F
    return table
