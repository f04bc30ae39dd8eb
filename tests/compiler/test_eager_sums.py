"""Sums over the two copies of a stage overlap with other ops: BitPipe's eager synchronisation."""

from dataclasses import replace

import pytest

from tests.lowered import lower
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Kind

PAPERS = [("chimera", 1), ("bitpipe", 2)]
SPLIT = [("chimera-zb", 1), ("bitpipe-zb", 2)]


def lowered(name, v, p, m, each, **how):
    """The complete program, its costs with sums that take `each` ms, and the makespan without."""
    compute = SCHEDULES[name].make(Request(p, m, v))
    free = Costs.uniform(compute.placement)
    costs = free.with_ms(reduce=(each,) * compute.placement.stages)
    program = lower(replace(compute, **how), costs=costs)
    check_all(program)
    return program, costs, simulate(compute, free).makespan


def with_late_sums(program):
    """The program with all REDUCEs after the last compute op and the last transfer."""
    ranks = []
    for ops in program.ranks:
        sums = [op for op in ops if op.kind is Kind.REDUCE]
        rest = [op for op in ops if op.kind is not Kind.REDUCE]
        end = next(i for i, op in enumerate(rest) if op.kind is Kind.VALIDATE)
        ranks.append([*rest[:end], *sums, *rest[end:]])
    late = program.with_ranks(ranks, by="late-sums")
    check_all(late)
    return late


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(("name", "v"), PAPERS)
def test_all_sums_but_the_one_that_begins_at_the_end_are_hidden(name, v, p):
    """The gradients of stage 0 are complete with the last op of the step: only its sum is exposed."""
    each = 1.0 / v
    program, costs, before = lowered(name, v, p, 2 * p, each)
    after = simulate(program, costs).makespan
    sums = sum(op.kind is Kind.REDUCE for op in program.ranks[0])
    assert sums == 2 * v
    assert after == pytest.approx(before + each)
    late = simulate(with_late_sums(program), costs).makespan
    assert late == pytest.approx(before + sums * each)
    assert (late - after) / ((sums - 1) * each) >= 0.8


@pytest.mark.parametrize(("name", "v"), [*PAPERS, *SPLIT, ("dualpipe", 1)])
def test_a_sum_starts_right_behind_the_last_gradient_of_its_stage_unless_another_has_to_start_first(name, v):
    program, _, _ = lowered(name, v, 4, 8, 0.25)
    for ops in program.ranks:
        sums = [i for i, op in enumerate(ops) if op.kind is Kind.REDUCE]
        for k, i in enumerate(sums):
            last = max(j for j, op in enumerate(ops) if op.kind.computes and op.stage == ops[i].stage)
            between = [op for op in ops[last + 1 : i] if op.kind.computes]
            assert last < i
            assert not between or sums[k - 1] > last, "or it stands behind the sum before it"


@pytest.mark.parametrize(("name", "v"), SPLIT)
def test_a_searched_order_leaves_its_sums_time(name, v):
    """The search times candidates with their sums."""
    placement = SCHEDULES[name].placement(4, v)
    free = Costs.uniform(placement)
    slow = free.with_ms(reduce=(2.0,) * placement.stages)
    found = []
    for known in (free, slow):
        program = SCHEDULES[name].make(Request(4, 8, v, costs=known))
        found.append(simulate(lower(program, costs=slow), slow).makespan)
    assert found[1] <= found[0]
