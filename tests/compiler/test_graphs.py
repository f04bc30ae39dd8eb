"""Graphs of stages: their orders, bounds, partitions and refusals."""

import itertools
import random

import pytest

from tests.check.graphs import edges
from zbc.compiler.cost.cost import Costs
from zbc.compiler.partition.groups import even
from zbc.compiler.schedules import SCHEDULES
from zbc.compiler.schedules.branched import branched
from zbc.compiler.schedules.request import Request
from zbc.compiler.sim.bounds import bounds
from zbc.compiler.sim.context import Context
from zbc.ir import Placement

BARS = [  # the sources of each stage; 1F1B and zb-h1 at F = B = W = 1 and 8 microbatches
    ([[], [0], [], [2], [1, 3], [4]], 33, 27),
    ([[], [], [1], [2], [0, 3], [4]], 36, 28),
    ([[], [], [], [0, 1, 2]], 27, 25),
    ([[], [0], [1], [0, 2]], 33, 27),
]


def step(program, costs):
    return Context(program, costs).step_ms("makespan")


@pytest.mark.parametrize(("reads", "one", "split"), BARS)
def test_steps_are_those_of_the_longest_ways(reads, one, split):
    place = Placement((tuple(range(len(reads))),), tuple(sorted((a, b) for b, of in enumerate(reads) for a in of)))
    costs, request = Costs.uniform(place), Request(len(reads), 8)
    assert step(branched("1f1b", place, request), costs) == one
    assert step(branched("zb-h1", place, request), costs) == split
    assert step(branched("auto", place, request), costs) <= split
    assert bounds(place, costs, 8).makespan == split


@pytest.mark.parametrize("seed", range(40))
def test_no_graph_is_slower_than_its_chain_or_faster_than_its_bound(seed):
    rng = random.Random(seed)
    stages, m = rng.randint(2, 7), rng.randint(1, 9)
    place = Placement((tuple(range(stages)),), edges(rng, stages))
    costs = Costs.uniform(place, rng.random() + 0.5, rng.random() + 0.5, rng.random() + 0.1, rng.choice((0.0, 0.2)))
    plain = Placement.linear(stages)
    chain = Costs(costs.ms, costs.amounts, Costs.uniform(plain, comm=max(costs.links[0].values())).links)
    least = bounds(place, costs, m)
    for kind in ("1f1b", "zb-h1"):
        found = Context(branched(kind, place, Request(stages, m, costs=costs)), costs)
        assert found.step_ms("makespan") <= step(SCHEDULES[kind].make(Request(stages, m)), chain) + 1e-9
        assert found.step_ms("makespan") >= least.makespan - 1e-9
        assert found.step_ms("span") >= least.span - 1e-9


@pytest.mark.parametrize("seed", range(30))
def test_the_largest_stage_is_least(seed):
    rng = random.Random(seed)
    groups = [[rng.choice((1.0, 2.0, 3.5)) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 3))]
    ranks = rng.randint(len(groups), sum(map(len, groups)))

    def largest(runs):
        ends = [(ms, [0, *itertools.accumulate(run)]) for ms, run in zip(groups, runs, strict=True)]
        return max(sum(ms[a:b]) for ms, at in ends for a, b in itertools.pairwise(at))

    def cuts(count):
        for k in range(1, count + 1):
            for inner in itertools.combinations(range(1, count), k - 1):
                yield [b - a for a, b in itertools.pairwise([0, *inner, count])]

    every = [
        runs for runs in itertools.product(*(list(cuts(len(ms))) for ms in groups)) if sum(map(len, runs)) == ranks
    ]
    found = even(groups, ranks)
    assert sum(map(len, found)) == ranks
    assert largest(found) == min(map(largest, every))
