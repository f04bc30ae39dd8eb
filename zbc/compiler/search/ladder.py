"""Searches under a limit and under smaller ones: more memory and more effort never give a worse answer.

A search has an effort of its own and shares of it. A share goes to each coarse rung of rungs.py, so the answers under
two limits have all rungs below the smaller one in common, searched alike. A fine rung tries the recipes that did best
in the fast tier on the coarse rung below. Efforts above ENOUGH also search the very limit in full; its result is in no
other answer, so the guarantee ends there, and the rest is as good as the shares are.

Rungs whose lower bound is not below the best known order are skipped: nothing there could be better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from zbc.compiler.search.candidates import Bench, Candidate, Recipe
from zbc.compiler.search.engine import Engine
from zbc.compiler.search.portfolio import Effort, SearchResult, search
from zbc.compiler.search.problem import Problem
from zbc.compiler.search.rungs import Grid

INF = float("inf")
LARGE = 4000  # ops from which only the limit itself is searched
ENOUGH, SHARE = 2_000_000, 128  # op visits, and a rung's divisor of more than that
RECIPES = 3  # tried by fine rungs
SAME = 1e-12

Orders = Iterable[tuple[str, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Question:
    """The search and its known facts: orders that need no search, and a lower bound for any limits."""

    problem: Problem
    objective: str
    effort: Effort
    engine: Engine
    orders: Callable[[Problem], Orders]
    bound: Callable[[Sequence[float]], float]

    def search(self, problem: Problem, visits: int) -> SearchResult:
        """As `portfolio.search`, under other limits."""
        return search(
            problem,
            self.objective,
            replace(self.effort, visits=visits),
            self.engine,
            orders=self.orders(problem),
            target=self.bound(problem.limit),
        )


def climb(ask: Question, *, rungs: int | None = None, beat: float = INF) -> Candidate | None:
    """The best order found, or None if nothing fits.

    Under the limit itself or the rung below it; with `rungs`, a number of op visits for each, under all rungs on which
    better than `beat` ms is possible.
    """
    visits = ask.effort.visits
    if ask.problem.size > LARGE:
        return ask.search(ask.problem, visits).best
    ladder = _Ladder(ask, beat)
    if ask.problem.exact:  # the peaks of hand-made orders may lie between two rungs
        ladder.by_hand()
    if visits > ENOUGH:
        ladder.add(ask.search(ask.problem, visits).best)
    wanted = visits if rungs is None else rungs
    share = min(wanted, max(ENOUGH, wanted // SHARE))
    grid = Grid.of(ask.problem)
    high = grid.top
    for rung in grid.coarse():
        if ladder.settles(grid.at(high)):
            break
        ladder.segment(grid, rung, high, share)
        high = rung
        if rungs is None:
            break
    return ladder.best


class _Ladder:
    """The best order so far, and the searched limits."""

    def __init__(self, ask: Question, beat: float) -> None:
        self.ask, self.beat = ask, beat
        self.best: Candidate | None = None
        self._seen: set[tuple[float, ...]] = set()

    def add(self, candidate: Candidate | None) -> None:
        key = self.ask.objective
        if candidate is not None and (self.best is None or candidate.rank(key) < self.best.rank(key)):
            self.best = candidate
            self.beat = min(self.beat, candidate.cost(key))

    def by_hand(self) -> None:
        """Orders that need no search, under the limit itself."""
        bench = Bench(self.ask.problem, self.ask.engine, self.ask.objective)
        for origin, order in self.ask.orders(self.ask.problem):
            bench.order(order, origin)
        self.add(bench.best)

    def settles(self, problem: Problem) -> bool:
        """Whether no order under these limits, or smaller ones, could be better than the best known."""
        return self.best is not None and self.ask.bound(problem.limit) >= self.beat * (1 - SAME)

    def segment(self, grid: Grid, rung: float, high: float, share: int) -> None:
        """Searches a coarse rung, and tries the fine ones above it up to `high`."""
        found = self.ask.search(grid.at(rung), share)
        self._seen.add(tuple(grid.at(rung).limit))
        self.add(found.best)
        for fine in grid.fine(rung, high):
            problem = grid.at(fine)
            if self.settles(problem):
                return
            if tuple(problem.limit) not in self._seen:
                self._seen.add(tuple(problem.limit))
                self._try(problem, found.liked[:RECIPES])

    def _try(self, problem: Problem, recipes: Sequence[Recipe]) -> None:
        bench = Bench(problem, self.ask.engine, self.ask.objective)
        for recipe in recipes:
            bench.decode(recipe, "building block")
        self.add(bench.best)
