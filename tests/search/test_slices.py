"""Searches with slices as units: legal, within their limits, timed as they run, alike on both engines."""

from dataclasses import replace
from random import Random

import pytest

from tests.check.slices import shares
from tests.lowered import lower
from tests.search.instances import Instance, Recorder, instance
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs, Size
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.search import patterns, portfolio
from zbc.compiler.search.cyclic import stretched
from zbc.compiler.search.feasible import least, least_of
from zbc.compiler.search.learned import learned
from zbc.compiler.search.played import Played
from zbc.compiler.search.policies import policies
from zbc.compiler.search.problem import Problem
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Placement


def cut(seed: int) -> Instance:
    """A random instance in slices of random lengths, with keys and values, and a limit from the least that works up."""
    rng, given = Random(seed), instance(seed)
    k = rng.randint(2, 5)
    rows = shares(rng, k)
    costs = given.costs.cut(rows, f=shares(rng, k), b=shares(rng, k), w=rows)
    kv = tuple(Size(0.1 * units) for units in costs.units("kept"))
    costs = replace(costs, size={**costs.size, "kv": kv}) if rng.random() < 0.5 else costs
    needs = least_of(given.placement, costs)
    limits = tuple(need * rng.uniform(1.0, 2.5) for need in needs) if rng.random() < 0.7 else None
    return Instance(given.placement, costs, rng.randint(1, 6), limits)


def examine(given: Instance, bench: Recorder) -> None:
    limits = given.limits or [float("inf")] * given.placement.ranks
    for number, (order, (span, makespan, origin)) in enumerate(bench.seen.items()):
        program = given.problem.program(order, origin)
        timeline = simulate(program, given.costs)
        assert (span, makespan) == pytest.approx((timeline.span, timeline.makespan), rel=1e-9), origin
        held = [rank.units for rank in peaks(program, given.costs)]
        assert all(units <= limit + 2e-6 for units, limit in zip(held, limits, strict=True)), origin
        if number % 20 == 0:
            check_all(lower(program))


@pytest.mark.parametrize("seed", few(range(60), 12))
def test_orders_of_slices_are_legal_fit_and_do_not_depend_on_the_engine(seed, plain, compiled):
    given = cut(seed)
    assert least(given.problem) == pytest.approx(least_of(given.placement, given.costs))
    benches = [Recorder(given.problem, engine, "makespan") for engine in (plain, compiled)]
    recipes = [*policies(given.problem.v), *learned(given.problem.v)[:6]]
    recipes += map(Played, patterns.in_flight(given.problem)[:6])
    for bench in benches:
        bench.order(given.simplest[0][1], "one by one")
        for recipe in recipes:
            bench.decode(recipe, "decoded")
        bench.anneal(bench.found[0], 200, 0.5, seed, 0.0)
    assert benches[0].seen == benches[1].seen and benches[0].seen
    assert benches[0].best.makespan >= given.bounds.makespan * (1 - 1e-9)
    assert benches[0].best.span >= given.bounds.span * (1 - 1e-9)
    examine(given, benches[0])


def test_policies_hardly_ever_wedge_at_small_limits(compiled):
    """The room that is kept counts the rest of a microbatch's slices."""
    where = Placement.vshape(8)
    for k, limit in ((4, 2.0), (4, 1.5), (8, 1.5)):
        problem = Problem.make(where, Costs.uniform(where).cut([1 / k] * k), 8, limit)
        bench = Recorder(problem, compiled, "makespan")
        ran = [bench.decode(policy, "policy") is not None for policy in policies(2)]
        assert all(ran), (k, limit, ran)


@pytest.mark.parametrize("k", [2, 4])
def test_orders_for_few_microbatches_are_repeated_in_whole_microbatches(k, compiled):
    where = Placement.vshape(2)
    costs = Costs.uniform(where).cut([1 / k] * k)
    few_of, many_of = (Problem.make(where, costs, m, 2.0) for m in (24, 48))
    found = portfolio.search(few_of, "makespan", portfolio.Effort(0), compiled).best
    bench = Recorder(few_of, compiled, "makespan")
    full = Recorder(many_of, compiled, "makespan")
    for order in stretched(few_of, many_of, found.order, bench.starts(found.order)):
        assert sorted(order) == list(range(many_of.size))
        assert full.order(order, "repeated") is not None
    assert full.found


@pytest.mark.parametrize(
    ("name", "rival"), [("zb-auto", "zb-h1"), ("looped-zb", "gis"), ("looped-zb", "interleaved-1f1b")]
)
@pytest.mark.parametrize("seed", few(range(12), 2))
def test_a_search_is_never_worse_than_the_order_by_hand(name, rival, seed):
    rng = Random(seed)
    p, m, k, v = rng.randint(2, 5), rng.randint(1, 8), rng.randint(2, 4), 1 if name == "zb-auto" else 2
    card, other = SCHEDULES[name], SCHEDULES[rival]
    rows = shares(rng, k)
    costs = Costs.uniform(card.placement(p, v), 1.0, 1.2, 0.7, 0.05).cut(rows, f=shares(rng, k), b=rows, w=rows)
    by_hand = other.make(Request(p, m, v, slices=k, costs=costs))
    limit = tuple(rank.units for rank in peaks(by_hand, costs))
    found = card.make(Request(p, m, v, slices=k, costs=costs, memory_limit=limit))
    assert simulate(found, costs).makespan <= simulate(by_hand, costs).makespan * (1 + 1e-9)
