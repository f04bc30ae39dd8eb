"""The time of a step when op times differ from the predicted ones: the same order, simulated many times.

Noise is of two kinds. **Jitter**: the time of every op and every transfer is multiplied by a factor of its own, drawn
from a lognormal distribution with mean 1 and the given standard deviation. **A straggler**: in each trial all ops of
one rank take longer by a given share, rank after rank in turn, so that every rank is the slow one equally often.

The order is as planned; nothing is planned again. With the optimizer's barrier a trial is one step, and its time the
makespan. Without it trials are consecutive steps: each rank continues from its own end, and a step's time is its
increment of the last rank's end. Collectives on gradients and the optimizer keep their times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from statistics import fmean, median

from zbc.compiler.cost.cost import Costs
from zbc.compiler.graph import Graph, build
from zbc.compiler.sim.simulate import lengths, replay, steady_state
from zbc.compiler.steps import SETTLES, bodies, period_of
from zbc.compiler.whatif.why import Path, path_of
from zbc.errors import ZbcError
from zbc.ir import Program, repeated

TRIALS = 200
_ROW = 10  # steps without a flush that are simulated in a row


@dataclass(frozen=True, slots=True)
class Noise:
    """Shares of the predicted times: the standard deviation of each, and the slowdown of one rank."""

    jitter: float = 0.0
    straggler: float = 0.0
    trials: int = TRIALS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.jitter < 0 or self.straggler < 0 or self.trials < 1:
            text = f"noise: jitter {self.jitter:g}, straggler {self.straggler:g}, {self.trials} trials"
            raise ZbcError("E103", text, hint="noise is 0 or more, a share of the times: 0.05; and one trial at least")


@dataclass(frozen=True, slots=True)
class Spread:
    """Steps under noise, in ms, and the composition of their critical paths, as shares that sum to 1."""

    predicted: float
    steps: tuple[float, ...]
    by_rank: tuple[float, ...]
    by_kind: dict[str, float] = field(default_factory=dict)
    transfers: float = 0.0
    slow: tuple[float, ...] = ()  # median of the steps in which each rank was the slow one; () without a straggler

    def quantile(self, share: float) -> float:
        """The `share` quantile of the steps in ms, interpolated between the two nearest."""
        ordered = sorted(self.steps)
        place = share * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    @property
    def median(self) -> float:
        return median(self.steps)

    @property
    def mean(self) -> float:
        return fmean(self.steps)

    def slower(self, ms: float) -> float:
        """The excess over the predicted time, as a share of it."""
        return ms / self.predicted - 1 if self.predicted > 0 else 0.0


def spread(program: Program, costs: Costs, noise: Noise, *, barrier: bool = True) -> Spread:
    """Steps of a compute-only or complete program under noise, the same ones for the same seed."""
    graph, ranks = build(program), len(program.ranks)
    if program.flushless:
        predicted, noisy = period_of(program, costs), _cycles(program, costs, noise)
    else:
        once = replay(graph, costs, lengths(graph, costs))
        predicted = max(map(once.closes, range(ranks))) if barrier else steady_state(once, costs)
        noisy = _steps(graph, costs, noise, barrier=barrier)
    slow, steps, paths = zip(*noisy, strict=True)
    total = sum(path.total for path in paths) or 1.0
    kinds = dict.fromkeys(kind for path in paths for kind in path.by_kind)
    by_kind = {kind: sum(path.by_kind.get(kind, 0.0) for path in paths) / total for kind in kinds}
    return Spread(
        predicted,
        steps,
        tuple(sum(path.by_rank.get(r, 0.0) for path in paths) / total for r in range(ranks)),
        dict(sorted(by_kind.items(), key=lambda item: -item[1])),
        sum(path.transfers for path in paths) / total,
        tuple(_median(steps, slow, r) for r in range(ranks)) if noise.straggler else (),
    )


def _median(steps: Sequence[float], slow: Sequence[int], rank: int) -> float:
    """The median of the steps in which `rank` was the slow one; not a number if there was none."""
    times = [step for step, number in zip(steps, slow, strict=True) if number == rank]
    return median(times) if times else math.nan


def _trials(noise: Noise, ranks: int, *, barrier: bool) -> Iterator[tuple[int, bool]]:
    """The slow rank of each step, -1 for none, and whether the step counts. Without a barrier a rank stays slow for its
    share of the steps, after some in which the new pace settles."""
    if barrier:
        yield from ((trial % ranks if noise.straggler else -1, True) for trial in range(noise.trials))
        return
    for slow, count in _slow(noise, ranks):
        yield from ((slow, False) for _ in range(SETTLES if count else 0))
        yield from ((slow, True) for _ in range(count))


def _slow(noise: Noise, ranks: int) -> list[tuple[int, int]]:
    """Each slow rank with the number of its trials; -1 with all trials without a straggler."""
    return [(r, len(range(r, noise.trials, ranks))) for r in range(ranks)] if noise.straggler else [(-1, noise.trials)]


def _steps(graph: Graph, costs: Costs, noise: Noise, *, barrier: bool) -> Iterator[tuple[int, float, Path]]:
    """The slow rank, the time and the critical path of each step that counts."""
    length = lengths(graph, costs)
    ranks = len(graph.first) - 1
    free, before = [0.0] * ranks, 0.0
    for number, (slow, counts) in enumerate(_trials(noise, ranks, barrier=barrier)):
        rng = random.Random(f"{noise.seed} {number}")
        timeline = replay(graph, costs, _noisy(rng, graph, length, noise, slow), free)
        ends = [timeline.closes(r) for r in range(ranks)]
        if counts:
            last = max(range(ranks), key=lambda r: ends[r])
            yield slow, max(ends) - before, path_of(timeline, last, min(map(timeline.first_start, range(ranks))))
        if not barrier:
            free, before = ends, max(ends)


def _cycles(program: Program, costs: Costs, noise: Noise) -> Iterator[tuple[int, float, Path]]:
    """As `_steps`, without a flush: of every _ROW consecutive steps, with their critical path."""
    graph = build(repeated(program, SETTLES + _ROW + 2))  # the last two have no ops of a next one among theirs
    length, ranks = lengths(graph, costs), range(len(program.ranks))
    for slow, count in _slow(noise, len(ranks)):
        for first in range(0, count, _ROW):
            rng = random.Random(f"{noise.seed} {slow} {first}")
            timeline = replay(graph, costs, _noisy(rng, graph, length, noise, slow))
            path = path_of(timeline, max(ranks, key=timeline.closes), 0.0)
            ends = [max(body) for body in bodies(program, timeline)][SETTLES - 1 :]
            yield from ((slow, after - before, path) for before, after in islice(pairwise(ends), count - first))


def _noisy(rng: random.Random, graph: Graph, length: Sequence[float], noise: Noise, slow: int) -> list[float]:
    """The times of nodes, those of ops and messages each with its own factor: lognormal, mean 1, deviation `jitter`."""
    times, sigma = list(length), math.sqrt(math.log1p(noise.jitter * noise.jitter))
    shift, gauss, exp = -sigma * sigma / 2, rng.gauss, math.exp
    for i in (*chain.from_iterable(graph.computing), *graph.messages) if noise.jitter else ():
        if times[i]:
            times[i] *= exp(gauss(shift, sigma))
    for i in graph.computing[slow] if slow >= 0 else ():
        times[i] *= 1 + noise.straggler
    return times
