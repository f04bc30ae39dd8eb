"""One problem, its engine, and the best orders seen so far: what every search step works on."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from zbc.compiler.search.anneal import WORSE
from zbc.compiler.search.engine import Engine
from zbc.compiler.search.keys import Decoder, Genes
from zbc.compiler.search.listing import ROOM
from zbc.compiler.search.problem import Problem
from zbc.compiler.search.rounds import Filling, filled
from zbc.compiler.search.timing import wires

TINY = 1e-9
NO_END = 10**18
# What a step costs in op visits, so that one budget counts them all alike.
LIST_VISITS = 10
FILL_VISITS = 20
DECODE_VISITS = 2000  # to prepare it, whatever its size
TIME_VISITS = 1
STEPS = 8  # after which a sequence of steps has a period, as in `simulate.steady_state`

Recipe = Genes | Filling | tuple[float, ...]  # the last: knobs of a policy


@dataclass(frozen=True, slots=True)
class Candidate:
    """A feasible rank-major order and what it costs, in ms."""

    span: float
    makespan: float
    order: tuple[int, ...]
    origin: str
    recipe: Recipe | None = None  # how to make it again for another number of microbatches
    period: float = 0.0  # of steps that follow one another; only where that is the objective

    def cost(self, objective: str) -> float:
        return {"makespan": self.makespan, "span": self.span, "period": self.period}[objective]

    def rank(self, objective: str) -> tuple[float, float]:
        """Sort key: the objective, then the other step time."""
        return self.cost(objective), self.span if objective == "makespan" else self.makespan


class Bench:
    """Evaluates candidates of one problem and keeps the best of each origin.

    `spent` counts op visits; it depends only on what was tried, never on the clock. Once it reaches `most`, there is
    to be no more searching; an annealing stops in the middle.
    """

    KEEP, ROOTS = 8, 48

    def __init__(self, problem: Problem, engine: Engine, objective: str) -> None:
        self.problem, self.engine, self.objective = problem, engine, objective
        self.decoder = Decoder(problem)
        self.found: list[Candidate] = []  # best first
        self.roots: list[Candidate] = []  # the best of those that are not annealed, best first
        self.spent, self.most = 0, NO_END
        n = engine.numbers
        self._times = (n(problem.f), n(problem.b), n(problem.w), n(problem.lag))
        self._limit = n(problem.limit)
        self._memory = (n(problem.keep_b), n(problem.keep_w), self._limit)
        self._rank, self._stages = n(problem.rank), n(problem.stages)
        # The list scheduler admits by what F needs; where B leaves more than it frees, its result has to be checked.
        self._grows = any(w > b for b, w in zip(problem.keep_b, problem.keep_w, strict=True))
        self._first_b, self._reserves = n(problem.first_b()), n(problem.reserves())
        self._order, self._position = n([0] * problem.size), n([0] * problem.size)
        self._end = n([0.0] * problem.size)
        self._wires = tuple(n(column) for column in wires(problem))
        self._changes = _changes(problem)
        self._change = n(self._changes)
        self._starts = n(list(range(0, problem.size, 3 * problem.v * problem.m)))
        self._worse = n(WORSE)
        self._plain = (n([0.0] * problem.n_stages), n([0.0] * problem.n_stages), n([problem.m] * problem.n_stages))

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.problem.p, self.problem.m, self.problem.v

    @property
    def over(self) -> bool:
        return self.spent >= self.most

    def reached(self, target: float) -> bool:
        return self.best is not None and self.best.cost(self.objective) <= target * (1 + TINY)

    @property
    def best(self) -> Candidate | None:
        return self.found[0] if self.found else None

    def decode(self, recipe: Recipe, origin: str) -> Candidate | None:
        """The schedule of a recipe for this problem; None if its decoder gets stuck."""
        if isinstance(recipe, Filling):
            self.spent += FILL_VISITS * self.problem.size
            order = filled(self.problem, recipe)
            return self._timed(self.engine.numbers(order), origin, recipe) if order and self.fits(order) else None
        if not isinstance(recipe, Genes):
            return self._listed(list(recipe), self._plain, origin, recipe)
        key_f, key_b = self.decoder.keys(recipe)
        n = self.engine.numbers
        keys = (n(key_f), n(key_b), n(self.decoder.caps(recipe, key_f, key_b)))
        return self._listed(self.decoder.knobs(recipe), keys, origin, recipe)

    def _listed(self, knobs: list[float], keys: Any, origin: str, recipe: Recipe) -> Candidate | None:
        self.spent += LIST_VISITS * self.problem.size + DECODE_VISITS
        status, _, _ = self.engine.list_schedule(
            *self._shape,
            self._rank,
            self._stages,
            *self._times,
            *self._memory,
            self._first_b,
            self._reserves,
            self.engine.numbers(knobs),
            *keys,
            self._order,
        )
        if status or (self._grows and not self.fits(self._order)):
            return None
        # The scheduler may have waited for an op that did not come; a rank that runs the order does not.
        return self._timed(self._order, origin, recipe)

    def order(self, order: Sequence[int], origin: str) -> Candidate | None:
        """An order made elsewhere; None if it cannot finish or needs more memory than allowed."""
        if not self.fits(order):
            return None
        self.spent += TIME_VISITS * self.problem.size
        return self._timed(self.engine.numbers(list(order)), origin, None)

    def _timed(self, order: Any, origin: str, recipe: Recipe | None) -> Candidate | None:
        """A root; None if the order blocks."""
        found = self._time(order, origin, recipe)
        if found is None:
            return None
        self._keep(found, self.roots, self.ROOTS)
        return self._keep(found, self.found, self.KEEP)

    def _time(self, order: Any, origin: str, recipe: Recipe | None) -> Candidate | None:
        p, engine = self.problem.p, self.engine
        engine.locate(order, self._position)
        if engine.run(p, order, self._position, *self._wires, self._starts, self._end) < 0:
            return None
        span, makespan, _ = engine.steps(p, order, self._wires[0], self._end)
        period = 0.0
        if self.objective == "period":
            period = float(engine.period(p, order, self._position, *self._wires, self._end, STEPS))
            self.spent += STEPS * TIME_VISITS * self.problem.size
        return Candidate(float(span), float(makespan), tuple(engine.whole(order)), origin, recipe, period)

    def anneal(self, start: Candidate, moves: int, hot: float, seed: int, target: float) -> Candidate | None:
        """Shift ops of `start` about, at temperatures from `hot` mean op times down to a tenth of it."""
        problem = self.problem
        n = self.engine.numbers
        order, best = n(list(start.order)), n([0] * problem.size)
        unit = sum(problem.f + problem.b + problem.w) / 3 / problem.n_stages or 1.0
        self.spent += self.engine.anneal(
            problem.p,
            problem.m,
            problem.n_stages * problem.m,
            *self._wires,
            self._change,
            self._limit,
            self._worse,
            order,
            best,
            moves,
            hot * unit,
            hot * unit / 10,
            seed,
            self.objective == "makespan",
            target,
            self.most - self.spent,
        )
        cut_off = self.over
        self.spent += TIME_VISITS * problem.size
        found = self._time(best, f"{start.origin}, annealed", None)
        if cut_off and self.objective == "period":
            # Annealed is the span. What it has half way may have a better period than what a larger effort ends with.
            return None
        return self._keep(found, self.found, self.KEEP) if found else None

    def fits(self, order: Sequence[int]) -> bool:
        """Whether every rank keeps to its limit."""
        per_rank = 3 * self.problem.v * self.problem.m
        change = self._changes.__getitem__
        for r, limit in enumerate(self.problem.limit):
            if max(accumulate(map(change, order[r * per_rank : (r + 1) * per_rank]))) > limit + ROOM:
                return False
        return True

    def _keep(self, candidate: Candidate, among: list[Candidate], most: int) -> Candidate:
        """Remember it if it is among the best of different cost."""
        key = candidate.rank(self.objective)
        if len(among) == most and key >= among[-1].rank(self.objective):
            return candidate
        span, makespan = candidate.span, candidate.makespan
        if not any(abs(span - c.span) < TINY and abs(makespan - c.makespan) < TINY for c in among):
            insort(among, candidate, key=lambda c: c.rank(self.objective))
            del among[most:]
        return candidate


def _changes(problem: Problem) -> list[float]:
    """What each op adds to the memory in use."""
    backward = [w - b for b, w in zip(problem.keep_b, problem.keep_w, strict=True)]
    weights = [-w for w in problem.keep_w]
    return [x for row in (problem.keep_b, backward, weights) for x in row for _ in range(problem.m)]
