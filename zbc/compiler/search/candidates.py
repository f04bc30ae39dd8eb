"""One problem, its engine, and the best orders so far: the state of every search step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from zbc.compiler.blocks import AnyBlock
from zbc.compiler.search.anneal import WORSE
from zbc.compiler.search.cyclic import stretched
from zbc.compiler.search.engine import Engine
from zbc.compiler.search.keys import Decoder, Genes
from zbc.compiler.search.listing import ROOM
from zbc.compiler.search.patterns import Played, expanded, played
from zbc.compiler.search.problem import Problem

TINY = 1e-9
NO_END = 10**18
# Costs of search steps in op visits, so that one budget counts them all alike.
LIST_VISITS = 10
FILL_VISITS = 20
DECODE_VISITS = 2000  # to prepare it, for any size
TIME_VISITS = 1
MADE_VISITS, BLOCK_VISITS = 8, 2  # for orders made op by op
JUDGE_VISITS = 3000  # for a whole plan that is timed
STEPS = 8  # until a sequence of steps has a period, as in `simulate.steady_state`

Judge = Callable[[Sequence[int]], float]
Recipe = Genes | AnyBlock | Played | tuple[float, ...]  # the last are knobs of a policy


@dataclass(frozen=True, slots=True)
class Candidate:
    """A feasible rank-major order and its step times in ms."""

    span: float
    makespan: float
    order: tuple[int, ...]
    origin: str
    recipe: Recipe | None = None  # makes it again for another number of microbatches
    judged: float | None = None  # ms by the objective, if it is more than the span or makespan of these ops

    def cost(self, objective: str) -> float:
        return self.judged if self.judged is not None else self.makespan if objective == "makespan" else self.span

    def rank(self, objective: str) -> tuple[float, float]:
        """Sort key: the objective, then the other step time."""
        return self.cost(objective), self.span if objective == "makespan" else self.makespan


class Bench:
    """Evaluates candidates of one problem and keeps the best of each origin. `spent` counts op visits; it depends only
    on the tried candidates, never on the clock. Once it reaches `most`, the search has to stop; an annealing stops in
    the middle. `judge` tells ms of an order where more than its ops count."""

    KEEP, ROOTS = 8, 48

    def __init__(self, problem: Problem, engine: Engine, objective: str, judge: Judge | None = None) -> None:
        self.problem, self.engine, self.objective, self.judge = problem, engine, objective, judge
        self.found: list[Candidate] = []  # best first
        self.roots: list[Candidate] = []  # the best candidates that are not annealed, best first
        self.spent, self.most = 0, NO_END
        # The list scheduler admits by the needs of F; if B leaves more than it frees, its result has to be checked.
        self._grows = any(w > b for b, w in zip(problem.keep_b, problem.keep_w, strict=True))
        n, rows = engine.numbers, problem.rows()
        self.first, self._changes = rows.first, rows.change()
        self._rows, self._table = rows, engine.columns(rows.table())
        self._limit = n(problem.limit)
        self._order, self._position = n([0] * problem.size), n([0] * problem.size)
        self._end, self._zero = n([0.0] * problem.size), n([0.0] * problem.p)

    @cached_property
    def decoder(self) -> Decoder:
        return Decoder(self.problem)

    @cached_property
    def _lists(self) -> tuple[Any, ...]:
        """The list scheduler's arguments that are the same for every recipe, before its knobs."""
        n, problem = self.engine.numbers, self.problem
        facts = (n(made) for made in (problem.room(), problem.first_b(), problem.reserves()))
        return self._table, self.engine.columns(problem.seats(self._rows)), self._limit, *facts

    @cached_property
    def _blank(self) -> Any:
        p, seats = self.problem.p, sum(map(len, self.problem.stages))
        return self.engine.columns(([0.0] * self.problem.size, [0.0] * p, [0] * seats, [0] * p))

    @cached_property
    def _moves(self) -> tuple[Any, ...]:
        """The arguments of annealing that are the same for every start."""
        return self.engine.columns(self._rows.fences()), self._limit, self.engine.numbers(WORSE)

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
        if isinstance(recipe, Played):
            self.spent += FILL_VISITS * self.problem.size
            made = played(self.problem, self._rows.table(), expanded(self.problem, recipe.block))
            return self._timed(self.engine.numbers(made), origin, recipe) if made else None
        if isinstance(recipe, AnyBlock):
            self.spent += BLOCK_VISITS * self.problem.size
            order = expanded(self.problem, recipe)
            return self._timed(self.engine.numbers(order), origin, recipe) if self.fits(order) else None
        n, stages = self.engine.numbers, self.problem.n_stages
        if not isinstance(recipe, Genes):
            keys = (n([0.0] * stages), n([0.0] * stages), n([self.problem.m] * stages))
            return self._listed(list(recipe), keys, origin, recipe)
        key_f, key_b = self.decoder.keys(recipe)
        keys = (n(key_f), n(key_b), n(self.decoder.caps(recipe, key_f, key_b)))
        return self._listed(self.decoder.knobs(recipe), keys, origin, recipe)

    def _listed(self, knobs: list[float], keys: Any, origin: str, recipe: Recipe) -> Candidate | None:
        self.spent += LIST_VISITS * self.problem.size + DECODE_VISITS
        listed = self.engine.list_schedule(
            *self._lists,
            self.engine.numbers(knobs),
            *keys,
            self.problem.slices,
            self.problem.unequal,
            self._blank,
            self._order,
        )
        if not listed or (self._grows and not self.fits(self._order)):
            return None
        # The scheduler may have waited for an op that did not come; running the order does not.
        return self._timed(self._order, origin, recipe)

    def starts(self, order: Sequence[int]) -> list[float]:
        """Starts of the ops of an order that ends, by place."""
        made = self.engine.numbers(list(order))
        self.engine.measure(self._table, made, self._position, self._zero, self._end)
        self.spent += TIME_VISITS * self.problem.size
        length = self._table.length
        return [float(end - length[op]) for op, end in zip(order, self._end, strict=True)]

    def stretch(self, few: Bench, found: Candidate) -> None:
        """Tries an order for few microbatches, extended to all of them; see cyclic.py."""
        starts = few.starts(found.order)
        for order in stretched(few.problem, self.problem, found.order, starts):
            self.spent += MADE_VISITS * self.problem.size
            if self.fits(order):
                self._timed(self.engine.numbers(order), f"{found.origin}, repeated", None)

    def order(self, order: Sequence[int], origin: str) -> Candidate | None:
        """An order made elsewhere; None if it cannot finish or needs more memory than allowed."""
        if not self.fits(order):
            return None
        self.spent += TIME_VISITS * self.problem.size
        return self._timed(self.engine.numbers(list(order)), origin, None)

    def _timed(self, order: Any, origin: str, recipe: Recipe | None) -> Candidate | None:
        """Keeps the order as a root; None if it blocks."""
        if (found := self._time(order, origin, recipe)) is not None:
            self._keep(found, self.roots, self.ROOTS)
            self._keep(found, self.found, self.KEEP)
        return found

    def _time(self, order: Any, origin: str, recipe: Recipe | None) -> Candidate | None:
        engine = self.engine
        runs, span, makespan = engine.measure(self._table, order, self._position, self._zero, self._end)
        if not runs:
            return None
        judged, made = None, engine.whole(order)
        if self.judge is not None:
            judged = self.judge(made)
        elif self.objective == "period":
            begin = self._zero.copy()
            judged = float(engine.period(self._table, order, self._position, begin, self._end, STEPS))
            self.spent += STEPS * TIME_VISITS * self.problem.size
        return Candidate(float(span), float(makespan), tuple(made), origin, recipe, judged)

    def anneal(self, start: Candidate, moves: int, hot: float, seed: int, target: float) -> Candidate | None:
        """Anneals `start`, at temperatures from `hot` mean op times down to a tenth of it."""
        problem = self.problem
        n = self.engine.numbers
        order, best = n(list(start.order)), n([0] * problem.size)
        unit = sum(problem.f + problem.b + problem.w) / 3 / problem.n_stages or 1.0
        self.spent += self.engine.anneal(
            self._table,
            *self._moves,
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
        self.spent += (JUDGE_VISITS if self.judge else TIME_VISITS) * problem.size
        found = self._time(best, f"{start.origin}, annealed", None)
        if cut_off and found is not None and found.judged is not None:
            return None  # the span is annealed: an order half way may be judged better than a larger effort's result
        return self._keep(found, self.found, self.KEEP) if found else None

    def fits(self, order: Sequence[int]) -> bool:
        """Whether every rank keeps to its limit."""
        held = (map(self._changes.__getitem__, order[low:high]) for low, high in pairwise(self.first))
        peaks = (max(accumulate(changes), default=0.0) for changes in held)
        return all(peak <= limit + ROOM for peak, limit in zip(peaks, self.problem.limit, strict=True))

    def _keep(self, candidate: Candidate, among: list[Candidate], most: int) -> Candidate:
        """Stores the candidate if it is among the best of different cost."""
        key = candidate.rank(self.objective)
        if len(among) == most and key >= among[-1].rank(self.objective):
            return candidate
        span, makespan = candidate.span, candidate.makespan
        if not any(abs(span - c.span) < TINY and abs(makespan - c.makespan) < TINY for c in among):
            insort(among, candidate, key=lambda c: c.rank(self.objective))
            del among[most:]
        return candidate
