"""The search: an anytime portfolio under a budget that counts work, not seconds, so that a plan can be made again.

1. The fast tier: orders made elsewhere (named schedules that fit), fixed policies, and gene vectors learned offline.
2. Building blocks of the V placement.
3. Rounds, until the budget is spent or the lower bound is reached: annealings of many orders, longer ones of fewer,
   each round longer than the one before.
With more than 4p microbatches all that runs on 4p of them; its best recipes are decoded in full, and half of the work
goes into annealing those. The budget never changes the steps, only their number, so that more is never worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat

from zbc.compiler.blocks import AnyBlock
from zbc.compiler.search import cyclic, patterns
from zbc.compiler.search.candidates import Bench, Candidate, Judge, Recipe
from zbc.compiler.search.engine import Engine
from zbc.compiler.search.keys import learned, policies
from zbc.compiler.search.problem import Problem

# Op visits per second, a cautious estimate, to convert seconds of budget into work.
PLAIN_RATE, COMPILED_RATE = 5_000_000, 100_000_000
FINALISTS = 4  # recipes found with fewer microbatches and decoded in full
REPEATED = 2  # orders found with fewer microbatches and repeated
FIRST_BLOCKS, FIRST_PLAYED = 3, 24
LEAST_TRIED, FAST_VISITS, PATTERN_VISITS = 8, 4_000_000, 8_000_000
FIRST_MOVES, GROWTH = 4.0, 2.0
WIDTHS = (4, 4, 8)  # of the first brackets; the last one for all others
HEATS = (0.03, 0.03, 0.03, 0.03, 0.15)  # of annealing, in mean op times, in turn
# With few ops an order is a dead end sooner, and the work suffices to leave many: hotter, and more brackets.
SMALL, SMALL_HEATS, SMALL_GROWTH = 150, (0.1, 0.5, 2.0), 1.4


def visits_of(seconds: float, engine: Engine) -> int:
    """Op visits that count as `seconds`."""
    return int(seconds * (COMPILED_RATE if engine.compiled else PLAIN_RATE))


def search(
    problem: Problem,
    objective: str,
    visits: int,
    engine: Engine,
    *,
    orders: Iterable[tuple[str, Sequence[int]]] = (),
    target: float = 0.0,
    judge: Judge | None = None,
    fits: Callable[[Sequence[int]], bool] | None = None,
) -> Candidate | None:
    """The best order found for `problem`, or None if nothing fits; of the few best, one that `fits`, if any does.
    `target` is a lower bound at which to stop. The steps of fewer `visits` of ops are a prefix of those of more."""
    full = Bench(problem, engine, objective, judge)
    for origin, order in orders:
        full.order(order, origin)
        if problem.pipes > 1 and full.reached(target):  # each of these takes a run of a list scheduler
            break
    few = cyclic.reduced(problem)
    if few is None:
        if problem.pipes == 1:
            _fast_tier(full, target)
        full.most = visits
        for _ in chain(_patterns(full, target), _rounds(full, target)):
            pass
    else:
        small = Bench(few, engine, objective)
        _fast_tier(small, 0.0)
        _in_turn(small, full, visits, target)
    return next((one for one in full.found if fits and fits(one.order)), full.best)


def _in_turn(small: Bench, full: Bench, visits: int, target: float) -> None:
    """Searches with few microbatches and with all of them, each with half of the work spent so far."""
    rounds = {
        small: chain(_patterns(small, 0.0), _rounds(small, 0.0)),
        full: _rounds(full, target, carried=small.problem.size),
    }
    carried: set[Recipe | Candidate] = set()
    _carry(small, full, 2 if full.problem.size < 2 * cyclic.FEW_OPS else 1, carried)
    going = True
    while going:
        small.most, full.most = visits - full.spent, visits - small.spent
        if full.reached(target):
            return
        bench = small if small.spent <= full.spent else full
        if bench is full and not full.over:
            _carry(small, full, FINALISTS, carried)
            for candidate in small.found[:REPEATED]:  # the best orders found with few microbatches, each once
                if candidate not in carried and not full.over:
                    carried.add(candidate)
                    full.stretch(small, candidate)
        going = next(rounds[bench], False)


def _carry(small: Bench, full: Bench, most: int, carried: set[Recipe | Candidate]) -> None:
    """Decodes the best recipes found with few microbatches for all of them, each once; and the best building block."""
    known = [c for c in small.roots if c.recipe is not None]
    blocks = [c for c in known[most:] if isinstance(c.recipe, AnyBlock | patterns.Played)]
    for candidate in known[:most] + blocks[:1]:
        if candidate.recipe is not None and candidate.recipe not in carried:
            carried.add(candidate.recipe)
            full.decode(candidate.recipe, candidate.origin)


def _fast_tier(bench: Bench, target: float) -> None:
    """Policies and learned genes in turn, best first; for large problems only as many as about a second allows."""
    v = bench.problem.v
    known = list[tuple[Recipe, str]]()
    blocks = [(genes, f"building block {index}") for index, genes in enumerate(learned(v))]
    for index, policy in enumerate(policies(v)):
        known += [(policy, f"policy {index}"), *blocks[2 * index : 2 * index + 2]]
    known += blocks[2 * len(policies(v)) :]
    for block in patterns.fitting(bench.problem)[:FIRST_BLOCKS]:
        bench.decode(block, "block")
    for block in patterns.in_flight(bench.problem)[:FIRST_PLAYED]:
        bench.decode(patterns.Played(block), "block, W in gaps")
    for tried, (recipe, origin) in enumerate(known):
        if bench.reached(target) or (tried >= LEAST_TRIED and bench.spent > FAST_VISITS):
            return
        bench.decode(recipe, origin)


def _patterns(bench: Bench, target: float) -> Iterator[bool]:
    """Building blocks; for large problems only as many as a fixed share of work allows."""
    if bench.over:
        return
    began = bench.spent
    known: list[tuple[Recipe, str]] = [(block, "block") for block in patterns.fitting(bench.problem)]
    known += [(patterns.Played(block), "block, W in gaps") for block in patterns.in_flight(bench.problem)]
    for recipe, origin in known:
        if bench.over or bench.spent - began > PATTERN_VISITS or bench.reached(target):
            return
        bench.decode(recipe, origin)
        yield True


def _rounds(bench: Bench, target: float, *, carried: int = 0) -> Iterator[bool]:
    """Brackets of growing length, a step at a time, while the budget lasts. A bracket anneals the best candidates
    (WIDTHS), the better half of these twice as long, and so on down to one. Half of its candidates are results of
    earlier brackets, half have not been annealed yet. If roots are `carried` from a problem of that many ops, it begins
    with as few moves as there."""
    objective = bench.objective
    heats, growth = (SMALL_HEATS, SMALL_GROWTH) if bench.problem.size <= SMALL else (HEATS, GROWTH)
    heads: list[Candidate] = []
    used: set[tuple[float, float]] = set()
    moves, turn, seed = FIRST_MOVES * (carried or bench.problem.size), 0, 0
    for most in chain(WIDTHS, repeat(WIDTHS[-1])):
        if bench.over or not bench.roots:
            return
        heads = heads[: most // 2]
        fresh = [c for c in bench.roots if c.rank(objective) not in used][: most - len(heads)]
        used |= {c.rank(objective) for c in fresh}
        heads += fresh
        width, each = most, moves
        while width:
            heads.sort(key=lambda c: c.rank(objective))
            for place, head in enumerate(heads[:width]):
                if bench.over or bench.reached(target):
                    return
                seed += 1
                heads[place] = bench.anneal(head, int(each), heats[turn % len(heats)], seed, target) or head
                yield True
            width, each, turn = width // 2, each * 2, turn + 1
        moves *= growth
