"""Every order of the search is complete, legal, within its limit, and has the cost of the simulator."""

from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from tests.check.slices import shares
from tests.lowered import lower
from tests.search.instances import Instance, Recorder, costs, instance, limits, odd
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.search import anneal, patterns, portfolio, timing
from zbc.compiler.search.cyclic import stretched
from zbc.compiler.search.feasible import least_of
from zbc.compiler.search.keys import learned, policies
from zbc.compiler.search.patterns import Played
from zbc.compiler.search.problem import Problem
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Kind, Placement


def faults(given, program):
    """Problems of a compute-only program, independent of the code under test: ops, their order, memory."""
    stages, m = given.placement.stages, given.m
    limits = given.limits or [float("inf")] * given.placement.ranks
    for rank, ops in enumerate(program.ranks):
        pipes = given.placement.pipes
        mine = [(s, i) for i in range(m) for s in range(stages) if pipes[i % len(pipes)][s] == rank]
        at = {(op.kind, op.stage, op.mb): place for place, op in enumerate(ops)}
        if sorted(at) != sorted((kind, s, i) for kind in (Kind.F, Kind.B, Kind.W) for s, i in mine):
            yield f"rank {rank} runs other ops than its own"
            continue
        if len(at) != len(ops):
            yield f"rank {rank} runs an op twice"
        for kind, s, i in at:
            if i >= len(pipes) and at[kind, s, i - len(pipes)] > at[kind, s, i]:
                yield f"{kind} s{s} m{i} before m{i - len(pipes)}"
        for s, i in mine:
            if not at[Kind.F, s, i] < at[Kind.B, s, i] < at[Kind.W, s, i]:
                yield f"s{s} m{i} is not F, B, W"
        held = {}
        for op in ops:
            if op.kind is Kind.W:
                del held[op.stage, op.mb]
            else:
                kept = given.costs.units("kept" if op.kind is Kind.F else "left")
                held[op.stage, op.mb] = kept[op.stage]
            if sum(held.values()) > limits[rank] + 2e-6:
                yield f"rank {rank} holds {sum(held.values())} of {limits[rank]} after {op}"


def examine(given, bench):
    """Checks every order that the bench saw; with the costlier checks on a few."""
    limits = given.limits or [float("inf")] * given.placement.ranks
    for number, (order, (span, makespan, origin)) in enumerate(bench.seen.items()):
        program = given.problem.program(order, origin)
        assert program.slices > 1 or list(faults(given, program)) == [], origin
        held = [rank.units for rank in peaks(program, given.costs)]
        assert all(units <= limit + 2e-6 for units, limit in zip(held, limits, strict=True)), origin
        timeline = simulate(program, given.costs)
        assert (span, makespan) == pytest.approx((timeline.span, timeline.makespan), rel=1e-9), origin
        if number % 25 == 0:
            check_all(lower(program))


@pytest.mark.parametrize("seed", few(range(100), 30))
def test_every_order_of_every_decoder_is_legal_and_fits(seed, compiled):
    given = instance(seed)
    bench = Recorder(given.problem, compiled, "span")
    rng, v = Random(seed), given.problem.v
    for recipe in [*policies(v), *learned(v)]:
        bench.decode(recipe, "decoded")
    for block in patterns.fitting(given.problem):
        if rng.random() < 0.05:
            bench.decode(block, "block")
    bench.order(given.simplest[0][1], "one by one")
    for place in range(min(4, len(bench.found))):
        bench.anneal(bench.found[place], 300, 0.5, seed, 0.0)
    assert len(bench.seen) > 0
    examine(given, bench)


@pytest.mark.long("5-True", "8-True")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("p", range(2, 9))
def test_blocks_fit_in_the_memory_of_v_min_and_1f1b_v(p, whole, compiled):
    """The low-memory orders of the V placement come from blocks; a refusal of all would otherwise be unnoticed."""
    where = Placement.vshape(p)
    even = Costs.uniform(where)
    units = (2 * p + 3) // 3 if whole else (p + 4) // 3
    given = Instance(where, even.joined() if whole else even, 2 * p, (float(units),) * p)
    bench = Recorder(given.problem, compiled, "span")
    fitting = patterns.fitting(given.problem)
    assert all(bench.decode(block, "block") for block in fitting if p < 4)  # first, middle and last rank are all
    for block in fitting:
        bench.decode(block, "block")
    assert len(bench.seen) > 0
    for order, (_, _, origin) in bench.seen.items():
        assert list(faults(given, given.problem.program(order, origin))) == []


@pytest.mark.long
@pytest.mark.parametrize("objective", few(["span", "makespan"], ("makespan",)))
def test_every_order_a_whole_search_looks_at_is_legal_and_fits(objective, compiled, monkeypatch):
    benches = []

    class Listed(Recorder):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            benches.append(self)

    monkeypatch.setattr(portfolio, "Bench", Listed)
    for seed in range(100, 130):
        given = instance(seed)
        benches.clear()
        best = portfolio.search(given.problem, objective, 300_000, compiled, orders=given.simplest)
        (bench,) = [bench for bench in benches if bench.problem.m == given.m]
        assert best.order in bench.seen
        assert best.cost(objective) <= min(row[objective == "makespan"] for row in bench.seen.values()) + 1e-9
        examine(given, bench)


def test_an_order_that_can_never_finish_is_refused(compiled, plain):
    where = Placement.linear(2)
    given = Instance(where, Costs.uniform(where), 2, None)
    f, b, w = ([[kind * 4 + stage * 2 + i for i in range(2)] for stage in range(2)] for kind in range(3))
    one_at_a_time = [f[0][0], b[0][0], w[0][0], f[0][1], b[0][1], w[0][1]]
    both_first = [f[1][0], f[1][1], b[1][0], w[1][0], b[1][1], w[1][1]]  # waits for m1, which waits for B of m0
    for engine in (compiled, plain):
        assert Recorder(given.problem, engine, "span").order(one_at_a_time + both_first, "circular") is None


@pytest.mark.parametrize("name", ["chimera-zb", "bitpipe-zb"])
@pytest.mark.parametrize(("f", "b", "w"), [(0.0, 1.0, 4.5), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0), (1e-14, 1.0, 1.0)])
def test_two_pipes_whose_ops_take_no_time_are_annealed_as_well(name, f, b, w):
    for p, m in ((2, 1), (2, 2), (4, 4), (4, 7)):
        schedule = SCHEDULES[name]
        where = schedule.placement(p, schedule.default_chunks)
        uneven = tuple(b * (1 + s % 3) for s in range(where.stages))
        given = Costs.uniform(where, f, 1.0, w).with_ms(b=uneven)
        program = schedule.make(Request(p, m, schedule.default_chunks, costs=given, budget=0.01))
        check_all(lower(program))


@pytest.mark.parametrize("by_makespan", few([False, True], (True,)))
def test_times_and_tails_after_every_move_are_those_of_the_whole_order(by_makespan, plain, monkeypatch):
    """Annealing computes only those anew that a move changes, and takes back what a refused move changed."""
    moved, update = 0, anneal.tails_of_starts

    def checked(first, by_makespan, ops, course, begin):
        nonlocal moved
        count = update(first, by_makespan, ops, course, begin)
        (length, _, lowest, highest, _, (head, reader, lag, after)), (order, position, end, tail, _) = ops, course
        whole, wanted = [0.0] * len(order), {}
        assert timing.run(table, order, position, [0.0] * len(begin), whole) and end == whole
        for k in sorted(range(len(order)), key=lambda k: (end[k], table.rank[order[k]], k), reverse=True):
            start = lowest[k]
            last = 0.0 if by_makespan else length[order[start]] - end[start]
            wanted[k] = length[order[k + 1]] + wanted[k + 1] if k < highest[k] else last
            edge = head[order[k]]
            while edge >= 0:
                wanted[k] = max(wanted[k], lag[edge] + length[reader[edge]] + wanted[position[reader[edge]]])
                edge = after[edge]
        assert tail == pytest.approx([wanted[k] for k in range(len(order))], abs=1e-9)
        moved += 1
        return count

    monkeypatch.setattr(anneal, "tails_of_starts", checked)
    for seed in range(60):
        given = instance(seed)
        table = given.problem.rows().table()
        bench = Recorder(given.problem, plain, "makespan" if by_makespan else "span")
        bench.anneal(bench.order(given.simplest[0][1], "one by one"), 120, 0.3, seed, 0.0)
    assert moved > 400


def cut(seed: int) -> Instance:
    """A random instance in slices of random lengths, with keys and values, and a limit from the least feasible up."""
    rng, given = Random(seed), instance(seed)
    k = rng.randint(2, 5)
    rows = shares(rng, k)
    costs = given.costs.cut(rows, f=shares(rng, k), b=shares(rng, k), w=rows)
    kv = tuple(0.1 * units for units in costs.units("kept"))
    costs = replace(costs, amounts={**costs.amounts, "kv": kv}) if rng.random() < 0.5 else costs
    needs = least_of(given.placement, costs)
    limits = tuple(need * rng.uniform(1.0, 2.5) for need in needs) if rng.random() < 0.7 else None
    return Instance(given.placement, costs, rng.randint(1, 6), limits)


def unlike(seed: int) -> Instance:
    """Ranks that hold different numbers of stages, and one that holds none."""
    rng = Random(seed)
    where = Placement((((0, 0, 1, 2, 2), (0, 2, 0, 2), (1, 0, 1, 1, 2, 0))[seed % 3],))
    given, m = costs(rng, where), rng.randint(1, 6)
    return Instance(where, given, m, limits(rng, where, given, m))


def two_pipes(seed: int) -> Instance:
    """Microbatches dealt to the pipes in turn, also an odd number; ranks at their own pace."""
    rng = Random(seed)
    p, v, m = rng.randint(1, 5), rng.randint(1, 2), rng.randint(1, 7)
    where = Placement.bidirectional(Placement.vshape(p, v).pipes[0])
    drawn = replace(costs(rng, where), paces=tuple(tuple(1 + r % 2 / 2 for r in pipe) for pipe in where.pipes))
    needs = least_of(where, drawn)
    return Instance(where, drawn, m, tuple(need * rng.uniform(1, 2) for need in needs) if seed % 3 else None)


DRAWN = {
    "one pipe": instance,
    "two pipes": two_pipes,
    "unlike ranks": unlike,
    "slices": cut,
    # Ops without length that wait for each other in a cycle are consistent in time, but never run.
    "no time": lambda seed: odd(seed, chunks=2, microbatches=1 + seed % 6),
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("block", few(range(6), 3))
def test_orders_are_legal_fit_and_do_not_depend_on_the_engine(name, block, plain, compiled):
    better = 0
    for seed in range(8 * block, 8 * block + 8):
        given, objective = DRAWN[name](seed), ("span", "makespan", "period")[seed % 3]
        v, benches = given.problem.v, [Recorder(given.problem, engine, objective) for engine in (plain, compiled)]
        recipes = [*policies(v)[:4], *islice(learned(v), 4), *map(Played, patterns.in_flight(given.problem)[:4])]
        for bench in benches:
            start = bench.order(given.simplest[0][1], "one by one")
            for recipe in recipes if name != "two pipes" else ():
                bench.decode(recipe, "decoded")
            for root, heat in ((start, 0.3), (start, 2.0), (bench.roots[-1], 0.03)):
                bench.anneal(root, 200, heat, seed, 0.0)
        assert (benches[0].seen, benches[0].spent) == (benches[1].seen, benches[1].spent)
        best = benches[0].best
        assert best.makespan >= given.bounds.makespan * (1 - 1e-9) and best.span >= given.bounds.span * (1 - 1e-9)
        better += best.cost(objective) < start.cost(objective)
        examine(given, benches[0])
    assert better


def test_policies_hardly_ever_wedge_at_small_limits(compiled):
    """The reserved memory includes the other slices of a microbatch."""
    where = Placement.vshape(8)
    for k, limit in ((4, 2.0), (4, 1.5), (8, 1.5)):
        problem = Problem.make(where, Costs.uniform(where).cut([1 / k] * k), 8, limit)
        bench = Recorder(problem, compiled, "makespan")
        assert all(bench.decode(policy, "policy") is not None for policy in policies(2)), (k, limit)


@pytest.mark.parametrize("k", [2, 4])
def test_orders_for_few_microbatches_are_repeated_in_whole_microbatches(k, compiled):
    where = Placement.vshape(2)
    costs = Costs.uniform(where).cut([1 / k] * k)
    few_of, many_of = (Problem.make(where, costs, m, 2.0) for m in (24, 48))
    found = portfolio.search(few_of, "makespan", 0, compiled)
    other = portfolio.search(few_of, "makespan", 0, compiled, fits=lambda order: order != found.order)
    assert other.order != found.order and other.makespan >= found.makespan, "the best one that fits"
    assert portfolio.search(few_of, "makespan", 0, compiled, fits=lambda order: False) == found, "if any does"
    bench, full = (Recorder(one, compiled, "makespan") for one in (few_of, many_of))
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
