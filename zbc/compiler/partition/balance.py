"""Finds the partition whose busiest rank is least loaded, and the loads of the ranks under any other.

A partition is a list of points: stage s holds the layers from `points[s]` up to `points[s + 1]`. With one stage per
rank the best is exact, by a dynamic programme. With more, the sum of a rank's stages has to be even. If there are few
partitions, all are tried. Otherwise layers move between stages until no move helps, and a depth-first search looks for
a lighter partition, or proves that there is none, within a fixed number of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, combinations, pairwise
from math import comb
from operator import mul

from zbc.ir import Placement

FEW = 1500  # number of partitions up to which all are tried
NODES = 10_000  # nodes of the search for a lighter partition, for up to eight ranks; fewer for more
SAME = 1e-9  # loads this close are equal

Weights = Sequence[Sequence[float]]  # [stage][layer]
Points = tuple[int, ...]


def moved(points: Sequence[int], giver: int, taker: int) -> Points | None:
    """One layer from a stage to another; the stages between shift by one. None if the giver has one only."""
    if giver == taker or points[giver + 1] - points[giver] < 2:
        return None
    shifted, step = list(points), -1 if taker > giver else 1
    for k in range(min(giver, taker) + 1, max(giver, taker) + 1):
        shifted[k] += step
    return tuple(shifted)


class Loads:
    """Loads of partitions on each rank; `counts[r][s]` is how often rank r runs stage s."""

    def __init__(self, weights: Weights, counts: Sequence[Sequence[float]]) -> None:
        self.sums = [list(accumulate(stage, initial=0.0)) for stage in weights]
        self.ranks = len(counts)
        self.holders = [[(r, row[s]) for r, row in enumerate(counts) if row[s]] for s in range(len(weights))]
        self.often = [sum(count for _, count in holders) for holders in self.holders]
        least = [min(map(mul, self.often, column)) for column in zip(*weights, strict=True)]
        self.rest = list(accumulate(reversed(least), initial=0.0))[::-1]  # the layers from i on, on the cheapest stages

    def stages(self, points: Sequence[int]) -> list[float]:
        """The load of each stage."""
        return [sums[b] - sums[a] for sums, (a, b) in zip(self.sums, pairwise(points), strict=True)]

    def of(self, points: Sequence[int]) -> list[float]:
        """The load of each rank."""
        loads = [0.0] * self.ranks
        for holders, size in zip(self.holders, self.stages(points), strict=True):
            for r, count in holders:
                loads[r] += count * size
        return loads

    def busiest(self, points: Sequence[int]) -> float:
        """The load of the busiest rank."""
        return max(self.of(points))

    def below(self, most: float, *, count: int, nodes: int) -> tuple[list[Points], bool]:
        """Partitions whose busiest rank has less than `most`, lightest first; whether these are all there are. Depth
        first, the largest stages first. Stops at more than `count` of them, or after `nodes` nodes."""
        stages, n, left = len(self.sums), len(self.sums[0]) - 1, nodes
        partitions: list[tuple[float, Points]] = []
        loads, points = [0.0] * self.ranks, [0] * (stages + 1)
        rounded = [0.0] * self.ranks  # loads that differ in their last bits are one state
        barren = set[tuple[float, ...]]()

        def place(stage: int, room: float) -> bool:
            """Whether to go on; `room` is what all ranks together may still take."""
            nonlocal left
            left -= 1
            if left < 0 or len(partitions) > count:
                return False
            if stage == stages:
                partitions.append((max(loads), tuple(points)))
                return True
            start, before = points[stage], len(partitions)
            if room < self.rest[start] - SAME or (state := (stage, start, *rounded)) in barren:
                return True
            sums, holders, last = self.sums[stage], self.holders[stage], n - (stages - stage - 1)
            top, first = last, sums[start]
            for r, k in holders:  # a separate loop for each: all the time is spent here
                load, end = loads[r], start
                while end < top and load + k * (sums[end + 1] - first) < most:
                    end += 1
                top = end
            kept = [(r, k, loads[r], rounded[r]) for r, k in holders]  # exact, unlike a subtraction
            for end in range(top, (last if stage == stages - 1 else start + 1) - 1, -1):
                points[stage + 1] = end
                size = sums[end] - first
                for r, k, load, _ in kept:
                    loads[r] = load + k * size
                    rounded[r] = round(loads[r], 9)
                if not place(stage + 1, room - self.often[stage] * size):
                    return False
            for r, _, load, near in kept:
                loads[r], rounded[r] = load, near
            if len(partitions) == before:
                barren.add(state)
            return True

        whole = place(0, most * self.ranks) and len(partitions) <= count
        return [points for _, points in sorted(partitions)], whole


def even(weights: Weights, placement: Placement, *, exact: bool = True) -> Points:
    """Points with the least load of the busiest rank, then the most even ranks, then the most even stages. The first is
    exact if `balance` suffices, if there are few partitions, or if the search ends; the other two for few partitions,
    and for one stage per rank. Without `exact` there is no such search."""
    return _even(tuple(map(tuple, weights)), placement, exact)


@lru_cache(maxsize=64)  # `auto` repeats the same placements
def _even(weights: Weights, placement: Placement, exact: bool) -> Points:
    stages, n = placement.stages, len(weights[0])
    if placement.ranks == stages:
        return balance(weights)
    loads = of_ranks(weights, placement)
    if comb(n - 1, stages - 1) <= FEW:
        every = ((0, *inner, n) for inner in combinations(range(1, n), stages - 1))
        return min(every, key=lambda points: (_unevenness(loads, points), points))
    points, least = _improved(loads, balance(weights), placement), _unavoidable(weights, placement)
    while exact and (most := loads.busiest(points)) > least + SAME * max(1.0, most):
        nodes = NODES * 8 // max(8, placement.ranks)
        lighter, _ = loads.below(most - SAME * max(1.0, most), count=0, nodes=nodes)
        if not lighter:
            break
        points = _improved(loads, lighter[0], placement)
    return points


def of_ranks(weights: Weights, placement: Placement) -> Loads:
    """The loads of each rank's stages together."""
    held = [[0.0] * placement.stages for _ in range(placement.ranks)]
    for stage in range(placement.stages):
        for rank in placement.holders(stage):
            held[rank][stage] += 1.0
    return Loads(weights, held)


def balance(weights: Weights) -> Points:
    """Points of the partition with the smallest largest stage, and of those the most even one. Exact: the smallest
    largest stage by a dynamic programme over (stages, prefix), then the least sum of squares among partitions that keep
    to it. No stage is empty."""
    parts, n = len(weights), len(weights[0])
    prefixes = [list(accumulate(stage, initial=0.0)) for stage in weights]
    bound = _smallest_largest(prefixes) * (1 + 1e-12) + 1e-12
    far, near = [0], [n]  # the furthest end of the first k stages, and the first start from which the others fit
    for prefix in prefixes:
        end = far[-1]
        while end < n and prefix[end + 1] - prefix[far[-1]] <= bound:
            end += 1
        far.append(end)
    for prefix in reversed(prefixes):
        start = near[-1]
        while start > 0 and prefix[near[-1]] - prefix[start - 1] <= bound:
            start -= 1
        near.append(start)
    near.reverse()
    infinity = float("inf")
    best = [0.0] + [infinity] * n
    choice: list[list[int]] = []
    for part in range(parts):
        row, pick, prefix = [infinity] * (n + 1), [0] * (n + 1), prefixes[part]
        for end in range(max(part + 1, near[part + 1]), min(n - (parts - part - 1), far[part + 1]) + 1):
            start = min(end - 1, far[part])
            while start >= max(part, near[part]) and (size := prefix[end] - prefix[start]) <= bound:
                value = best[start] + size * size
                if value < row[end]:
                    row[end], pick[end] = value, start
                start -= 1
        best = row
        choice.append(pick)
    points = [n]
    for pick in reversed(choice):
        points.append(pick[points[-1]])
    return tuple(points[::-1])


def _smallest_largest(prefixes: Sequence[list[float]]) -> float:
    """The least possible largest stage."""
    parts, n = len(prefixes), len(prefixes[0]) - 1
    row = list(prefixes[0])
    for part in range(1, parts):
        prefix = prefixes[part]
        fresh = [float("inf")] * (n + 1)
        start = part
        for end in range(part + 1, n - (parts - part - 1) + 1):
            # As `end` grows the best start never moves left: row grows with its index, the last stage shrinks.
            start = max(start, part)
            while start < end - 1 and _worse(row, prefix, start, end) >= _worse(row, prefix, start + 1, end):
                start += 1
            fresh[end] = _worse(row, prefix, start, end)
        row = fresh
    return row[n]


def _worse(row: list[float], prefix: list[float], start: int, end: int) -> float:
    return max(row[start], prefix[end] - prefix[start])


def _improved(loads: Loads, points: Points, placement: Placement) -> Points:
    """Moves layers away from the busiest rank while that makes the ranks, then the stages, more even."""
    best = _unevenness(loads, points)
    while True:
        ms = loads.of(points)
        fullest = max(range(placement.ranks), key=lambda r: ms[r])
        pairs = ((giver, taker) for giver in placement.stages_of(fullest) for taker in range(placement.stages))
        near = [trial for giver, taker in pairs if (trial := moved(points, giver, taker)) is not None]
        score, trial = min(((_unevenness(loads, partition), partition) for partition in near), default=(best, points))
        if score >= best:
            return points
        best, points = score, trial


def _unevenness(loads: Loads, points: Points) -> tuple[float, ...]:
    """Busiest rank, ranks, stages. Rounded, so that sums that differ in their last bits keep no search going."""
    ranks = loads.of(points)
    return tuple(round(x, 9) for x in (max(ranks), _squares(ranks), _squares(loads.stages(points))))


def _squares(sizes: Sequence[float]) -> float:
    return sum(size * size for size in sizes)


def _unavoidable(weights: Weights, placement: Placement) -> float:
    """A lower bound of the busiest rank: an equal share, or a heavy layer and the lightest in its other stages; or the
    lightest k + 1 of the heaviest k * ranks + 1 layers, since some rank has as many of these."""
    lightest: list[float] = [min(column) for column in zip(*weights, strict=True)]
    ranks, few = placement.ranks, min(len(placement.stages_of(r)) for r in range(placement.ranks))
    heaviest = sorted(lightest * len(placement.pipes), reverse=True)
    sums = [0.0, *accumulate(heaviest)]
    many = (sums[last + 1] - sums[last - last // ranks] for last in range(0, len(heaviest), ranks))
    return max(sum(heaviest) / ranks, heaviest[0] + (few - 1) * heaviest[-1], *many)
