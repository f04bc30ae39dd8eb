"""The local search over partitions and the stages that recompute.

Where the choices that could be better than the first ones are few, all of them are judged. Otherwise the best known is
left for a better neighbour until there is none: a layer moved between two stages, a stage that recomputes or no longer
does, with the layers spread again. Then it starts over a few moves away from the best, until the visits are spent or
nothing better has come for a while. What fewer visits judge is the beginning of what more of them judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from random import Random

from zbc.compiler.partition.balance import Loads, moved
from zbc.compiler.partition.evaluate import INF, Evaluator, Judged
from zbc.compiler.partition.setup import Choice
from zbc.compiler.partition.timing import OVERHEAD, Timing

SAME = 1e-12
FAR = 24  # moves between distant stages that are looked at from one partition
PATIENCE = 16  # starts without anything better
SUBSETS = 64  # of stages that may recompute, all of which are tried
PRICE = 3.0  # of a share of memory too much, in shares of the step


class LocalSearch:
    """For the shortest step that fits or, without a timing, for the least memory. No clock decides what is judged."""

    def __init__(self, evaluator: Evaluator, timing: Timing | None = None) -> None:
        self.evaluator, self.timing = evaluator, timing
        self.best: Judged | None = None
        self.tried, self.all_tried = 0, False
        self._price = OVERHEAD if timing is None else timing.visits
        self._left = 0
        self._known: dict[Choice, Judged | None] = {}
        self._loads: dict[frozenset[int], Loads] = {}
        # A step is no shorter than this share of the work of its busiest rank. What a stage costs is not the sum of
        # its layers where it was given for stages or ranks.
        costs, m = evaluator.job.costs, evaluator.job.schedule.microbatches
        known = timing is not None and (costs.f is None or costs.per == "layer")
        self._share = (1 - costs.overlap) * m / (timing.microbatches if timing else 1) if known else 0.0

    def run(self, first: Iterable[Choice], visits: int) -> None:
        """Judge `first`, of schedules made by hand all of them; then spend what is left of `visits`."""
        self._left = visits
        for choice in first:
            self._judge(choice, free=not self._known or not self.evaluator.schedule.searched)
        if self._left <= 0:
            return
        if self._all(visits):
            self.all_tried = True
            return
        rng = Random(0)
        self._descend(self.best, rng, _better)
        idle = 0
        while self._left > 0 and self.best is not None and idle < PATIENCE:
            before = self.best
            self._descend(self._judge(self._kicked(before.choice, rng), keep=True), rng, _cheaper)
            idle = idle + 1 if self.best is before else 0

    def ranked(self) -> list[Judged]:
        """All choices that were judged, those least above the limits first, then those with the shortest step."""
        return sorted((one for one in self._known.values() if one is not None), key=lambda one: (one.over, one.step))

    def _judge(self, choice: Choice, *, keep: bool = False, free: bool = False) -> Judged | None:
        """What a choice is like; None if it cannot be or, without `keep`, if it is no better than the best."""
        if choice in self._known or (self._left <= 0 and not free):
            return self._known.get(choice)
        self._known[choice] = None
        best = self.best
        limit = best.step * (1 + SAME) if best is not None and best.over <= 0 and not keep else INF
        loads = self._loads_of(choice.recompute).of(choice.points)
        if limit < INF and self._share * max(loads) > limit:
            return None
        self._left -= self._price
        self.tried += 1
        judged = self.evaluator.judge(choice, self.timing, limit)
        if judged is None:
            return None
        judged = self._known[choice] = judged._replace(uneven=sum(load * load for load in loads))
        if best is None or _better(judged, best):
            self.best = judged
        return judged

    def _loads_of(self, recompute: frozenset[int]) -> Loads:
        """The work of ranks in what is timed."""
        if recompute not in self._loads:
            where = self.evaluator.placement
            counts = [[0.0] * where.stages] * where.ranks if self.timing is None else self.timing.counts
            self._loads[recompute] = Loads(self.evaluator.times(recompute), counts)
        return self._loads[recompute]

    def _all(self, visits: int) -> bool:
        """Judge every choice that could be better, if there are few enough."""
        optional, budget = self.evaluator.optional, visits // self._price
        if 2 ** len(optional) > SUBSETS:
            return False
        choices = list[Choice]()
        most = self.best.step if self.best is not None and self.best.over <= 0 else INF
        for recompute in (frozenset(some) for k in range(len(optional) + 1) for some in combinations(optional, k)):
            if not self.evaluator.movable:
                choices.append(self.evaluator.even(recompute))
                continue
            bound, count = most / self._share if self._share else INF, budget - len(choices)
            found, whole = self._loads_of(recompute).below(bound, count=count, nodes=20 * count)
            if not whole:
                return False
            choices += [Choice(points, recompute) for points in found]
        for choice in choices:
            self._judge(choice, free=True)
        return True

    def _descend(self, at: Judged | None, rng: Random, better: Callable[[Judged, Judged], bool]) -> None:
        while at is not None and self._left > 0:
            found = None
            for choice in self._around(at.choice, rng):
                judged = self._judge(choice, keep=better is _cheaper)
                if judged is not None and better(judged, at):
                    found = judged
                    break
                if self._left <= 0:
                    return
            at = found

    def _around(self, choice: Choice, rng: Random) -> Iterator[Choice]:
        """Every boundary shifted by a layer either way, moves between stages further apart, other recompute."""
        stages, movable, optional = len(choice.points) - 1, self.evaluator.movable, list(self.evaluator.optional)
        if movable:
            near = [(a, b) for s in range(stages - 1) for a, b in ((s, s + 1), (s + 1, s))]
            rng.shuffle(near)
            far = [(a, b) for a in range(stages) for b in range(stages)] if stages * stages <= 4 * FAR else []
            far = far or [(rng.randrange(stages), rng.randrange(stages)) for _ in range(FAR)]
            far = [(a, b) for a, b in far if abs(a - b) > 1]
            rng.shuffle(far)
            found = (moved(choice.points, a, b) for a, b in [*near, *far[:FAR]])
            yield from [Choice(points, choice.recompute) for points in found if points is not None]
        rng.shuffle(optional)
        for stage in optional:
            recompute = choice.recompute ^ {stage}
            yield Choice(choice.points, recompute)
            if movable:
                yield self.evaluator.even(recompute)

    def _kicked(self, choice: Choice, rng: Random) -> Choice:
        """A few moves away."""
        points, recompute, stages = choice.points, choice.recompute, len(choice.points) - 1
        movable, optional = self.evaluator.movable, self.evaluator.optional
        for _ in range(2 + int(rng.random() * 3)):
            if optional and (not movable or rng.random() < 0.3):
                recompute = recompute ^ {rng.choice(optional)}
            elif movable:
                givers = [k for k in range(stages) if points[k + 1] - points[k] > 1]
                points = moved(points, rng.choice(givers), rng.randrange(stages)) or points
        return Choice(points, recompute)


def _better(one: Judged, other: Judged) -> bool:
    """Less above the limits, or as much and a shorter step, or as short and more even."""
    if one.over > 0 or other.over > 0:
        return max(one.over, 0.0) < max(other.over, 0.0) - SAME
    if abs(one.step - other.step) > SAME * other.step:
        return one.step < other.step
    return one.uneven < other.uneven * (1 - 1e-9)


def _cheaper(one: Judged, other: Judged) -> bool:
    """The same where memory has a price: the way to a choice that fits may lead over some that do not."""
    return _better(*(each._replace(over=0.0, step=each.step * (1 + PRICE * each.over)) for each in (one, other)))
