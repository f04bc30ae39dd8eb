"""Orders of few microbatches, repeated for many; and long steps made this way."""

from dataclasses import replace

import pytest

from tests.search.instances import Instance, Recorder, instance
from tests.search.test_kernels import faults
from tests.tiers import few
from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.search import cyclic
from zbc.compiler.search.keys import policies
from zbc.compiler.search.patterns import fitting
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Placement

# T_F, T_B, T_W, T_comm and M_W/M_B of the 14.6B model at p = 16, m = 128: arXiv 2401.10241, table 5.
TIMES = (11.325, 11.308, 8.109, 0.378, 0.4324)


@pytest.mark.parametrize("seed", few(range(60), 20))
def test_what_is_repeated_is_legal_and_grows_evenly(seed, compiled):
    given = instance(seed, ranks=4, chunks=2, microbatches=8)
    problem = replace(given.problem, m=14)
    small = Recorder(problem, compiled, "makespan")
    for policy in policies(problem.v)[:4]:
        small.decode(policy, "policy")
    if small.best is None:
        small.order(replace(given, m=14).simplest[0][1], "one by one")
    order = small.best.order
    steps = []
    for more in (0, 24, 36, 48):
        many = replace(given, m=14 + more)
        bench = Recorder(many.problem, compiled, "makespan")
        rows = list(cyclic.stretched(problem, many.problem, order, small.starts(order)))
        steps.append([bench.order(row, "repeated") if bench.fits(row) else None for row in rows])
        for row in rows[::3]:
            found = list(faults(replace(many, limits=None), many.problem.program(row, "repeated")))
            assert found == []
    for zero, *more in zip(*steps, strict=True):
        if zero is not None and more[0] is None:
            assert more[1] is None and more[2] is None  # one more body tells about any number
        if all(more):
            a, b, c = (one.makespan for one in more)
            assert c - b <= 1.1 * (b - a)  # one body after another takes about as long


def test_a_microbatch_more_or_less_finds_a_problem_that_any_body_extends():
    for m in range(60, 90):
        problem = replace(Instance(Placement.linear(4), Costs.uniform(Placement.linear(4)), 1, None).problem, m=m)
        small = cyclic.reduced(problem)
        assert all((m - small.m) % size == 0 for size in cyclic.SIZES)
        assert 16 <= small.m < 16 + cyclic.CYCLE


@pytest.mark.parametrize(("kind", "p", "m"), few([("v-min", 4, 96), ("v-half", 6, 72), ("v-min", 7, 96)], 1))
def test_many_microbatches_take_no_longer_than_the_published_block(kind, p, m, plain):
    where = Placement.vshape(p)
    costs = Costs.uniform(where, *TIMES)
    units = {"v-min": (p + 4) // 3, "v-half": (p + 2) // 2}[kind]
    given = Instance(where, costs, m, (float(units),) * p)
    best = None
    for block in fitting(given.problem):
        order = Recorder(given.problem, plain, "makespan").decode(block, "block")
        if order is not None and (best is None or order.makespan < best):
            best = order.makespan
    request = Request(p, m, 2, costs=costs, budget=0.05, compiled=True)
    assert simulate(SCHEDULES[kind].make(request), costs).makespan <= best + 1e-9
