"""braid-v: its closed forms, its bars, and what its groups hide."""

import random
from itertools import pairwise

import pytest

from bench.braids import BARS, SUMS, exposed
from tests.check import operational
from tests.check.braids import with_sums
from tests.compiler.grid import make, timed, units
from tests.jobs import job
from tests.lowered import lower
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.bounds import bounds
from zbc.compiler.sim.shared import shared, sums_of
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Kind, Op, Placement


def chunks(p, a):
    """Costs of chunks of F = B = W = 1 with sums of a."""
    return with_sums(Costs.uniform(Placement.vshape(p), 2.0, 2.0, 2.0), a)


def braided(p, m, costs=None):
    return SCHEDULES["braid-v"].make(Request(p, m, 2, costs=costs))


@pytest.mark.parametrize(("p", "m"), few(BARS, [(4, 12), (4, 8), (2, 2)]))
def test_no_step_is_longer_than_the_best_known_order(p, m):
    costs = chunks(p, SUMS)
    assert simulate(braided(p, m, costs), costs).makespan <= BARS[p, m] + 1e-9


@pytest.mark.parametrize("p", few(range(2, 9), (2, 3, 4)))
@pytest.mark.parametrize("a", [0.0, 0.3, 0.7])
def test_steps_waits_and_memory_are_those_of_the_formulas(p, a):
    for m in (3 * p, 3 * p + 1, 5 * p):
        program, costs = braided(p, m), chunks(p, a)
        timeline = simulate(program, costs)
        assert timeline.makespan == pytest.approx(6 * m + (p - 1) * (1 + a) + (2 * p + p % 2) * a)
        assert exposed(program, costs)[0] == pytest.approx((2 * p + 1) * a)
        assert max(rank.units for rank in peaks(program, costs)) == pytest.approx(2 * p - 0.5)
    assert timed(program).makespan == pytest.approx(3 * m + (p - 1) / 2)
    assert max(units(program)) == pytest.approx(2 * p - 0.5)


@pytest.mark.parametrize("seed", few(range(60), 12))
def test_any_number_of_microbatches_runs_at_any_costs(seed):
    rng = random.Random(seed)
    p, m = rng.randint(1, 7), rng.randint(1, 30)
    times = [rng.random() + 0.1 for _ in range(3)]
    costs = with_sums(Costs.uniform(Placement.vshape(p), *times, comm=rng.choice((0.0, 0.2))), rng.random())
    program = braided(p, m, costs)
    for level in (program, lower(program, costs=costs)):
        check_all(level)
        assert operational.run(level, seed=seed).ok
    timeline = simulate(program, costs)
    least = bounds(program.placement, costs.hidden(), m)
    assert least.makespan <= timeline.makespan + 1e-9 and least.span <= timeline.span + 1e-9
    assert max(rank.units for rank in peaks(program, Costs.uniform(program.placement))) <= 2 * p - 0.5


def test_few_microbatches_are_never_slower_than_an_order_without_groups():
    for p, m in ((4, 4), (4, 5), (3, 8), (5, 5)):
        costs = chunks(p, SUMS)
        plain = SCHEDULES["v-auto"].make(Request(p, m, 2, costs=costs, memory_limit=2 * p - 0.5))
        assert simulate(braided(p, m, costs), costs).makespan <= simulate(plain, costs).makespan + 1e-9


def test_sums_are_under_the_other_op_and_add_up():
    costs = chunks(3, SUMS)
    program = braided(3, 9, costs)
    timeline = simulate(program, costs)
    found = sums_of(timeline, costs)
    inside = [costs.sums(op)[0] for ops in program.ranks for op in ops if op.kind.computes]
    assert found.ms == pytest.approx(sum(inside) / 3)
    assert found.exposed_ms == pytest.approx(sum(exposed(program, costs)) / 3)
    for rank in range(3):
        pieces = list(shared(timeline, costs, rank))
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(pieces))
        runs = {op: (start, end) for one, op, start, end in timeline if one == rank}
        beside = [piece for piece in pieces if piece.hidden and piece.op.kind is Kind.F]
        assert beside, "an F alone has none that is hidden"
        for piece in beside:
            start, end = runs[piece.op]
            assert piece.end <= start + 1e-9 or piece.start >= end - 1e-9, "under the other one"


def test_a_job_is_told_what_its_groups_hide_and_pays_for_what_they_do_not():
    costs = {"f": 1.0, "b": 1.0, "w": 1.0, "per": "stage", "tp": SUMS}
    model = {"layers": 16, "heads": 4}

    def report(kind, **changes):
        return compile_job(job(kind=kind, m=12, model=model, costs=costs, parallel={"tp": 2}, **changes)).report

    found = report("braid-v")
    assert found.makespan_ms == pytest.approx(78.3)
    assert found.lower_bound_makespan_ms <= 78.3
    assert found.tp_sums.ms == pytest.approx(2 * 2 * 12 * SUMS)
    assert found.as_json()["tp_sums"]["hidden"] == pytest.approx(found.tp_sums.hidden) and found.tp_sums.hidden > 0.8
    assert report("zb-v").tp_sums.exposed_ms > 4 * found.tp_sums.exposed_ms
    assert "tp_sums" not in compile_job(job(kind="zb-v", m=12)).report.as_json()


def test_groups_survive_in_the_order_of_the_formula():
    """p = 2, rank 1: no lone F of the leg that goes down, two of both legs, one group of F and F."""
    ops = [str(op) for op in make("braid-v", 2, 6).ranks[1]]
    assert ops[:7] == ["F s1 m0", "F s2 m0", "F s1 m1", "F s2 m1", "OVERLAP", "F s1 m2", "F s1 m3"]
    assert Op.parse(ops[4]).kind is Kind.OVERLAP
