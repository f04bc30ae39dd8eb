"""The search: an anytime portfolio under a budget that counts work, not seconds, so that a plan can be made again.

1. The fast tier: orders made elsewhere (named schedules that fit), fixed policies, and gene vectors learned offline.
2. Building blocks of the V placement, for at most a quarter of the budget.
3. Rounds, until the budget is spent or the lower bound is reached: a chain of mutations of the best genes, then an
   annealing of the best orders, each round longer than the one before.
With more than 4p microbatches the first two run on 4p of them and their best recipes are decoded in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from zbc.compiler.search import patterns
from zbc.compiler.search.candidates import Bench, Candidate, Recipe
from zbc.compiler.search.engine import Engine
from zbc.compiler.search.keys import Genes, mutate, random_genes
from zbc.compiler.search.learned import learned
from zbc.compiler.search.policies import policies
from zbc.compiler.search.problem import Problem

# Op visits per second, cautiously: what turns seconds of budget into work.
PLAIN_RATE, COMPILED_RATE = 5_000_000, 100_000_000
FINALISTS = 4  # recipes found with fewer microbatches that are decoded in full
LEAST_TRIED, FAST_VISITS = 6, 6_000_000
FIRST_CHAIN, FIRST_MOVES, GROWTH = 60, 600, 1.5
WARM = 0.02  # of chains, in periods
HEATS = (0.03, 0.03, 0.03, 0.03, 0.15)  # of annealing, in mean op times, in turn


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to search: op visits, and the seed of its random numbers."""

    visits: int
    seed: int = 0

    @classmethod
    def seconds(cls, seconds: float, engine: Engine, seed: int = 0) -> Effort:
        return cls(int(seconds * (COMPILED_RATE if engine.compiled else PLAIN_RATE)), seed)


class Found(NamedTuple):
    """The best order, or None if nothing fits, and the recipes that the fast tier liked best."""

    best: Candidate | None
    liked: list[Recipe]


def search(
    problem: Problem,
    objective: str,
    effort: Effort,
    engine: Engine,
    *,
    orders: Iterable[tuple[str, Sequence[int]]] = (),
    target: float = 0.0,
) -> Found:
    """The best order found for `problem`. `target` is a lower bound at which to stop.

    What a smaller effort tries is the beginning of what a larger one tries.
    """
    full = Bench(problem, engine, objective)
    for origin, order in orders:
        full.order(order, origin)
    small = _reduced(problem)
    if small is None:
        _fast_tier(full, target)
        liked = _recipes(full)
        _patterns(full, effort.visits, target)
        _rounds(full, effort.visits, effort.seed, target)
    else:
        bench = Bench(small, engine, objective)
        _fast_tier(bench, 0.0)
        liked = _recipes(bench)
        _rounds(bench, effort.visits // 2, effort.seed, 0.0)
        recipes = [(c.recipe, c.origin) for c in bench.found if c.recipe is not None]
        for recipe, origin in recipes[: FINALISTS if effort.visits else 2]:
            full.decode(recipe, origin)
        _anneal_only(full, effort.visits - bench.spent, effort.seed, target)
    return Found(full.best, liked)


def _recipes(bench: Bench) -> list[Recipe]:
    return [c.recipe for c in bench.found if c.recipe is not None]


def _reduced(problem: Problem) -> Problem | None:
    """The problem with 4p microbatches, where that is clearly fewer."""
    few = 4 * problem.p
    return replace(problem, m=few) if problem.m > 1.5 * few else None


def _fast_tier(bench: Bench, target: float) -> None:
    """Policies and learned genes in turn, best first; of large problems only as many as a second or so allows."""
    v = bench.problem.v
    known: list[tuple[Recipe, str]] = []
    blocks = [(genes, f"building block {index}") for index, genes in enumerate(learned(v))]
    for index, policy in enumerate(policies(v)):
        known += [(policy, f"policy {index}"), *blocks[2 * index : 2 * index + 2]]
    known += blocks[2 * len(policies(v)) :]
    for tried, (recipe, origin) in enumerate(known):
        if _reached(bench, target) or (tried >= LEAST_TRIED and bench.spent > FAST_VISITS):
            return
        bench.decode(recipe, origin)


def _patterns(bench: Bench, visits: int, target: float) -> None:
    """Building blocks, while a share of the budget lasts."""
    for origin, order in patterns.orders(bench.problem):
        if bench.spent >= visits or _reached(bench, target):
            return
        bench.order(order, origin)


def _rounds(bench: Bench, visits: int, seed: int, target: float) -> None:
    """Chains and annealings of growing length while the budget lasts."""
    rng = Random(seed)
    length, moves, turn = float(FIRST_CHAIN), float(FIRST_MOVES), 0
    while bench.spent < visits and not _reached(bench, target):
        _chain(bench, int(length), rng, visits, fresh=turn % 3 == 2)
        for place in (0, 1 + 3 * turn % (Bench.KEEP - 1)):
            if bench.spent < visits and place < len(bench.found) and not _reached(bench, target):
                bench.anneal(bench.found[place], int(moves), HEATS[turn % len(HEATS)], seed + 7 * turn + place, target)
        length, moves, turn = length * GROWTH, moves * GROWTH, turn + 1


def _anneal_only(bench: Bench, visits: int, seed: int, target: float) -> None:
    moves, turn = float(FIRST_MOVES), 0
    while bench.spent + moves * bench.problem.size < visits and bench.found and not _reached(bench, target):
        bench.anneal(bench.found[0], int(moves), HEATS[0], seed + turn, target)
        moves, turn = moves * GROWTH, turn + 1


def _reached(bench: Bench, target: float) -> bool:
    return bench.best is not None and bench.best.cost(bench.objective) <= target * (1 + 1e-9)


def _chain(bench: Bench, length: int, rng: Random, visits: int, *, fresh: bool) -> None:
    """Mutate genes, accepting a worse one now and then; starts from the best known, or afresh."""
    v = bench.problem.v
    known = [c for c in bench.found if isinstance(c.recipe, Genes)]
    current: Candidate | None = None
    genes = known[0].recipe if known and not fresh else random_genes(rng, v)
    for step in range(length):
        if bench.spent >= visits:
            return
        if step:
            genes = (
                random_genes(rng, v)
                if current is None or rng.random() < 0.02
                else mutate(rng, _genes(current), 2 * bench.problem.n_stages - 1)
            )
        candidate = bench.decode(_some(genes), "building block search")
        if candidate is None:
            continue
        heat = WARM * bench.decoder.period * (1 - step / length)
        if current is None or _accept(candidate, current, bench.objective, heat, rng):
            current = candidate


def _accept(candidate: Candidate, current: Candidate, objective: str, heat: float, rng: Random) -> bool:
    worse = candidate.cost(objective) - current.cost(objective)
    return worse <= 0 or (heat > 0 and rng.random() < math.exp(-worse / heat))


def _genes(candidate: Candidate) -> Genes:
    return _some(candidate.recipe)


def _some(recipe: Recipe | None) -> Genes:
    if not isinstance(recipe, Genes):
        raise TypeError("a chain runs on genes")
    return recipe
