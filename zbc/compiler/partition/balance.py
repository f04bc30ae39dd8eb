"""The contiguous cut of weighted layers whose fullest part, or fullest rank, is as light as can be.

With one stage per rank the cut is exact, by a dynamic programme. With more, what has to be even is the sum of a rank's
stages: every cut is tried where there are few. Elsewhere the cut that is best by stages is improved by moving layers
between stages until no move helps, and then a depth-first search looks for a lighter one, or proves that there is
none, within a fixed number of nodes. (Few legs aside, the question contains that of sharing out numbers evenly, which
no known algorithm answers fast.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, combinations, pairwise
from math import comb

from zbc.ir import Placement

FEW = 1500  # cuts that are all tried
NODES = 10_000  # of the search for a lighter one, for up to eight ranks; fewer for more
SAME = 1e-9  # loads this close are one

Weights = Sequence[Sequence[float]]  # [stage][layer]


def even(weights: Weights, placement: Placement, *, exact: bool = True) -> list[int]:
    """Cut points with the least load of the fullest rank, then the most even ranks, then the most even stages.

    The first is exact where `balance` is enough, where there are few cuts, and where the search comes to an end; the
    other two for few cuts, and for one stage per rank. Without `exact` there is no such search.
    """
    return list(_even(tuple(map(tuple, weights)), placement, exact))


@lru_cache(maxsize=64)  # `auto` asks for the same placements again and again
def _even(weights: Weights, placement: Placement, exact: bool) -> list[int]:
    stages, n = placement.stages, len(weights[0])
    if placement.ranks == stages:
        return balance(weights)
    prefixes = _prefixes(weights)
    if comb(n - 1, stages - 1) <= FEW:
        cuts = ([0, *inner, n] for inner in combinations(range(1, n), stages - 1))
        return min(cuts, key=lambda cut: (_score(prefixes, cut, placement), cut))
    cut = even_ranks(weights, balance(weights), placement)
    while exact and (lighter := _lighter(weights, cut, placement)) is not None:
        cut = even_ranks(weights, lighter, placement)
    return cut


def largest(weights: Weights, cuts: Sequence[int], placement: Placement) -> float:
    """The load of the fullest rank."""
    return max(_loads(_prefixes(weights), cuts, placement))


def balance(weights: Weights) -> list[int]:
    """Cut points of the contiguous split with the smallest largest part, and of those the most even one.

    `weights[k]` is what every item weighs in part k. Returns parts + 1 indices from 0 to the number of items; no part
    is empty. Exact: the smallest largest part by a dynamic programme over (parts, prefix), then the least sum of
    squares among splits that keep to it.
    """
    parts, n = len(weights), len(weights[0])
    prefixes = _prefixes(weights)
    bound = _smallest_largest(prefixes) * (1 + 1e-12) + 1e-12
    infinity = float("inf")
    best = [0.0] + [infinity] * n
    choice: list[list[int]] = []
    for part in range(parts):
        row, pick, prefix = [infinity] * (n + 1), [0] * (n + 1), prefixes[part]
        for end in range(part + 1, n - (parts - part - 1) + 1):
            start = end - 1
            while start >= part and (size := prefix[end] - prefix[start]) <= bound:
                value = best[start] + size * size
                if value < row[end]:
                    row[end], pick[end] = value, start
                start -= 1
        best = row
        choice.append(pick)
    cuts = [n]
    for pick in reversed(choice):
        cuts.append(pick[cuts[-1]])
    return cuts[::-1]


def _prefixes(weights: Weights) -> list[list[float]]:
    return [[0.0, *accumulate(part)] for part in weights]


def even_ranks(weights: Weights, cuts: list[int], placement: Placement) -> list[int]:
    """Move layers between stages while that lowers the largest load of a rank, or evens out ranks, then stages.

    `weights[s]` is what every layer weighs in stage s. A move takes one layer from one stage and gives one to another;
    the stages between shift by a layer.
    """
    if placement.ranks == placement.stages:
        return cuts
    prefixes = _prefixes(weights)
    best = _score(prefixes, cuts, placement)
    while True:
        candidates = [(_score(prefixes, moved, placement), moved) for moved in _moves(prefixes, cuts, placement)]
        score, moved = min(candidates, default=(best, cuts))
        if score >= best:
            return cuts
        best, cuts = score, moved


def _moves(prefixes: Sequence[Sequence[float]], cuts: list[int], placement: Placement) -> Iterator[list[int]]:
    """Cuts with one layer fewer on a stage of a most loaded rank."""
    loads = _loads(prefixes, cuts, placement)
    fullest = max(range(len(loads)), key=lambda r: loads[r])
    for giver in placement.stages_of(fullest):
        for taker in range(placement.stages):
            step = -1 if taker > giver else 1
            moved = list(cuts)
            for k in range(min(giver, taker) + 1, max(giver, taker) + 1):
                moved[k] += step
            if giver != taker and all(a < b for a, b in pairwise(moved)):
                yield moved


def _score(
    prefixes: Sequence[Sequence[float]], cuts: Sequence[int], placement: Placement
) -> tuple[float, float, float]:
    loads = _loads(prefixes, cuts, placement)
    stages = [prefixes[s][b] - prefixes[s][a] for s, (a, b) in enumerate(pairwise(cuts))]
    # Rounded, so that sums that differ in their last bits do not keep the search going.
    return tuple(round(x, 9) for x in (max(loads), sum(x * x for x in loads), sum(x * x for x in stages)))  # type: ignore[return-value]


def _loads(prefixes: Sequence[Sequence[float]], cuts: Sequence[int], placement: Placement) -> list[float]:
    """Work per rank; a stage held by several ranks counts for each."""
    loads = [0.0] * placement.ranks
    for stage, (a, b) in enumerate(pairwise(cuts)):
        for rank in placement.holders(stage):
            loads[rank] += prefixes[stage][b] - prefixes[stage][a]
    return loads


def _smallest_largest(prefixes: Sequence[list[float]]) -> float:
    """The least possible largest part over contiguous splits into non-empty parts."""
    parts, n = len(prefixes), len(prefixes[0]) - 1
    row = list(prefixes[0])
    for part in range(1, parts):
        prefix = prefixes[part]
        fresh = [float("inf")] * (n + 1)
        start = part
        for end in range(part + 1, n + 1):
            # As `end` grows the best last cut never moves left: row grows with its index, the last part shrinks.
            start = max(start, part)
            while start < end - 1 and _worse(row, prefix, start, end) >= _worse(row, prefix, start + 1, end):
                start += 1
            fresh[end] = _worse(row, prefix, start, end)
        row = fresh
    return row[n]


def _worse(row: list[float], prefix: list[float], cut: int, end: int) -> float:
    return max(row[cut], prefix[end] - prefix[cut])


# ---- a lighter cut, or the proof that there is none ------------------------------------------------------------------


def _lighter(weights: Weights, cuts: Sequence[int], placement: Placement) -> list[int] | None:
    """A cut whose fullest rank is lighter than that of `cuts`; None if there is none, or none within NODES nodes."""
    most = max(_loads(_prefixes(weights), cuts, placement))
    if most <= _unavoidable(weights, placement) + SAME * max(1.0, most):
        return None
    search = _Search(weights, placement, most - SAME * max(1.0, most))
    return search.cuts if search.place(0, 0) else None


def _unavoidable(weights: Weights, placement: Placement) -> float:
    """What some rank has to bear: an equal share, or a heavy layer with the lightest one in each other stage there."""
    lightest = [min(stage[i] for stage in weights) for i in range(len(weights[0]))]
    pipes, few = len(placement.pipes), min(len(placement.stages_of(r)) for r in range(placement.ranks))
    return max(pipes * sum(lightest) / placement.ranks, max(lightest) + (few - 1) * min(lightest))


class _Search:
    """Depth first over stages, longest stages first; states that led nowhere are not entered again."""

    def __init__(self, weights: Weights, placement: Placement, most: float) -> None:
        self.weights, self.placement, self.most = weights, placement, most
        self.stages, self.n = placement.stages, len(weights[0])
        self.cuts = [0] * (self.stages + 1)
        self.loads = [0.0] * placement.ranks
        self.nodes = NODES * 8 // max(8, placement.ranks)
        self.failed: set[tuple[int, int, tuple[float, ...]]] = set()
        lightest = [min(stage[i] for stage in weights) for i in range(self.n)]
        self.rest = list(accumulate(reversed(lightest), initial=0.0))[::-1]  # of all layers from i on
        heavy = [weight if weight > 0 else float("inf") for weight in lightest]
        self.unit = list(accumulate(reversed(heavy), min, initial=float("inf")))[::-1]  # the lightest of these
        self.count = list(accumulate(map(bool, reversed(lightest)), initial=0))[::-1]
        last = dict[int, int]()
        for s in range(self.stages):
            last |= dict.fromkeys(placement.holders(s), s)
        self.open = [[r for r, end in last.items() if end >= s] for s in range(self.stages)]

    def place(self, stage: int, start: int) -> bool:
        """Whether the layers from `start` on fit into the stages from `stage` on; leaves the cut in `cuts`."""
        if stage == self.stages:
            return True
        self.nodes -= 1
        if self.nodes < 0 or not self._room(stage, start):
            return False
        key = stage, start, tuple(round(load, 9) for load in self.loads)
        if key in self.failed:
            return False
        holders = self.placement.holders(stage)
        last = self.n - (self.stages - stage - 1)
        sums = list(accumulate(self.weights[stage][start:last]))
        room = min(self.most - self.loads[r] for r in holders) / max(map(holders.count, holders))
        ends = [(start + k + 1, size) for k, size in enumerate(sums) if size <= room]
        if stage == self.stages - 1:
            ends = [end for end in ends if end[0] == self.n]
        for end, size in reversed(ends):
            for r in holders:
                self.loads[r] += size
            self.cuts[stage + 1] = end
            if self.place(stage + 1, end):
                return True
            for r in holders:
                self.loads[r] -= size
        self.failed.add(key)
        return False

    def _room(self, stage: int, start: int) -> bool:
        """Whether what is left could fit, by its weight and by its number, in any order and in parts."""
        pipes = len(self.placement.pipes)
        free = [self.most - self.loads[r] for r in self.open[stage]]
        if sum(free) < pipes * self.rest[start] - SAME:
            return False
        unit, count = self.unit[start], self.count[start]
        return sum(int(room / unit + SAME) for room in free) >= pipes * count
