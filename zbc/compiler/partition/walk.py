"""A search among cuts, and among the stages that recompute, for the one that is judged best.

Where the cuts that could be better than the first ones are few, all of them are judged. Otherwise the best known is
left for a better neighbour until there is none: a layer moved between two stages, a stage that recomputes or no longer
does, with the layers spread anew. Then it starts over a few moves away from the best, until the visits are spent or
nothing better has come for a while. What fewer visits judge is the beginning of what more of them judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from random import Random
from typing import NamedTuple

from zbc.compiler.partition.cuts import Cut, Lightest, moved, neighbours

SAME = 1e-12
FAR = 24  # moves between distant stages that are looked at from one cut
PATIENCE = 16  # starts without anything better
SUBSETS = 64  # of stages that may recompute, all of which are tried
PRICE = 3.0  # of a share of memory too much, in shares of the step
INF = float("inf")


class Judged(NamedTuple):
    """By what share a cut is above the limits (0: it fits), and ms of its step. The least is best.

    Of equals it is the one with the more even ranks, so that a walk can cross level ground.
    """

    over: float
    step: float
    cut: Cut
    uneven: float = 0.0


@dataclass
class Ground:
    """What there is to choose from, and how it is judged."""

    open: bool  # whether layers may move
    flags: Sequence[int]  # stages that may recompute
    judge: Callable[[Cut, float], Judged | None]  # None: no better than so many ms, or impossible
    visits: int  # what judging one takes
    lightest: Callable[[frozenset[int]], Lightest]  # by the stages that recompute
    spread: Callable[[frozenset[int]], Cut]  # the most even cut for stages that recompute
    factor: float = 1.0  # a step is no shorter than this share of the work of its busiest rank


@dataclass
class Walk:
    """The best so far; the order of what is judged depends on the seed only."""

    ground: Ground
    seed: int = 0
    best: Judged | None = None
    tried: int = 0
    all_tried: bool = False
    left: int = 0
    _known: dict[Cut, Judged | None] = field(default_factory=dict)

    def run(self, first: Iterable[Cut], visits: int) -> None:
        """Spend `visits`, from the cuts of `first` on."""
        self.left = visits
        for cut in first:
            self._judge(cut)
        if self._all(visits):
            self.all_tried = True
            return
        rng = Random(self.seed)
        self._descend(self.best, rng, _better)
        idle = 0
        while self.left > 0 and self.best is not None and idle < PATIENCE:
            before = self.best
            self._descend(self._judge(self._kicked(before.cut, rng), keep=True), rng, _cheaper)
            idle = idle + 1 if self.best is before else 0

    def least_over(self) -> list[Judged]:
        """All cuts that were judged, those least above the limits first."""
        return sorted((one for one in self._known.values() if one is not None), key=lambda one: (one.over, one.step))

    def _judge(self, cut: Cut, *, keep: bool = False) -> Judged | None:
        """What a cut is like; None if it cannot be or, without `keep`, if it is no better than the best."""
        if cut in self._known or (self.left <= 0 and self._known):
            return self._known.get(cut)
        self._known[cut] = None
        best = self.best
        limit = best.step * (1 + SAME) if best is not None and best.over <= 0 and not keep else INF
        lightest = self.ground.lightest(cut.again)
        if limit < INF and self.ground.factor * lightest.busiest(cut.points) > limit:
            return None
        self.left -= self.ground.visits
        self.tried += 1
        judged = self.ground.judge(cut, limit)
        if judged is None:
            return None
        judged = self._known[cut] = judged._replace(uneven=lightest.uneven(cut.points))
        if best is None or _better(judged, best):
            self.best = judged
        return judged

    def _all(self, visits: int) -> bool:
        """Judge every cut that could be better, if there are few enough."""
        ground = self.ground
        if len(ground.flags) > 0 and 2 ** len(ground.flags) > SUBSETS:
            return False
        subsets = [frozenset(some) for k in range(len(ground.flags) + 1) for some in combinations(ground.flags, k)]
        budget, cuts = visits // ground.visits, list[Cut]()
        most = self.best.step if self.best is not None and self.best.over <= 0 else INF
        for again in subsets:
            points = self._points(again, most / ground.factor if ground.factor else INF, budget - len(cuts))
            if points is None:
                return False
            cuts += [Cut(one, again) for one in points]
        for cut in cuts:
            self.left = max(self.left, 1)  # they were counted before
            self._judge(cut)
        return True

    def _points(self, again: frozenset[int], most: float, limit: int) -> list[tuple[int, ...]] | None:
        if not self.ground.open:
            return [self.ground.spread(again).points]
        return self.ground.lightest(again).within(most, limit)

    def _descend(self, at: Judged | None, rng: Random, better: Callable[[Judged, Judged], bool]) -> None:
        while at is not None and self.left > 0:
            found = None
            for cut in self._around(at.cut, rng):
                judged = self._judge(cut, keep=better is _cheaper)
                if judged is not None and better(judged, at):
                    found = judged
                    break
                if self.left <= 0:
                    return
            at = found

    def _around(self, cut: Cut, rng: Random) -> Iterator[Cut]:
        if self.ground.open:
            for points in neighbours(cut.points, rng, FAR):
                yield Cut(points, cut.again)
        flags = list(self.ground.flags)
        rng.shuffle(flags)
        for stage in flags:
            again = cut.again ^ {stage}
            yield Cut(cut.points, again)
            if self.ground.open:
                yield self.ground.spread(again)

    def _kicked(self, cut: Cut, rng: Random) -> Cut:
        """A few moves away."""
        points, again, stages = cut.points, cut.again, len(cut.points) - 1
        for _ in range(2 + int(rng.random() * 3)):
            if self.ground.flags and (not self.ground.open or rng.random() < 0.3):
                again = again ^ {rng.choice(list(self.ground.flags))}
            elif self.ground.open and stages > 1:
                givers = [k for k in range(stages) if points[k + 1] - points[k] > 1]
                points = moved(points, rng.choice(givers), rng.randrange(stages)) or points
        return Cut(points, again)


def _better(one: Judged, other: Judged) -> bool:
    """Less above the limits, or as much and a shorter step, or as short and more even."""
    if one.over > 0 or other.over > 0:
        return max(one.over, 0.0) < max(other.over, 0.0) - SAME
    if abs(one.step - other.step) > SAME * other.step:
        return one.step < other.step
    return one.uneven < other.uneven * (1 - 1e-9)


def _cheaper(one: Judged, other: Judged) -> bool:
    """The same where memory has a price: the way to a cut that fits may lead over some that do not."""
    return _better(*(each._replace(over=0.0, step=each.step * (1 + PRICE * each.over)) for each in (one, other)))
