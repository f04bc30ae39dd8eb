"""A vocabulary that all ranks share costs no bubble, and a unit of activations for each sum."""

from itertools import pairwise

import pytest

from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.passes.weave import Weave
from zbc.compiler.schedules import Request, find
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Kind

SIZES = [(4, 8, 1, 0.0), (8, 24, 1, 0.25), (8, 12, 4, 0.25), (8, 24, 4, 0.0), (3, 5, 2, 0.5)]


def woven(kind, p, m, k, sums, late=1, **ms):
    """Makespan and most units, in slices, without the vocabulary and with it; and the program."""
    card = find(kind)
    program = card.make(Request(p=p, m=m, v=card.default_chunks, slices=k))
    costs = Costs.uniform(program.placement)
    costs = costs.cut([1 / k] * k) if k > 1 else costs
    priced = costs.with_ms(**{name: (each / k,) * p for name, each in ms.items()})
    found = Weave(sums, late).run(program, Context(program, priced))
    check_all(found)
    ends = simulate(program, costs).makespan, simulate(found, priced).makespan
    units = [k * max(one.units for one in peaks(one, costs)) for one in (program, found)]
    return ends, units, found


@pytest.mark.parametrize("sums", [1, 2])
@pytest.mark.parametrize(("p", "m", "k", "st"), few(SIZES, SIZES[:3]))
@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "gis"])
def test_the_bubble_is_what_it_was_and_a_sum_keeps_one_unit_more(kind, p, m, k, st, sums):
    (plain, found), (held, most), _ = woven(kind, p, m, k, sums, s=st, t=st)
    assert found <= plain + 2 * st * m + 1e-9
    assert most <= held + sums + 1e-9


def test_v_half_beside_what_was_published():
    """97 and 98 there, p = 8, m = 24, S = T = 0.25."""
    for sums, late, makespan, units in ((1, 2, 94, 6), (2, 1, 96, 7)):
        (_, found), (_, most), _ = woven("v-half", 8, 24, 1, sums, late, s=0.25, t=0.25)
        assert found <= makespan + 1e-9 and most <= units + 1e-9


@pytest.mark.parametrize("m", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "zb-v", "gpipe", "looped-zb"])
def test_any_number_of_microbatches_works(kind, m):
    woven(kind, 4, m, 1, 1, s=0.3, t=0.2, meet=0.1)
    woven(kind, 4, m, 2, 2, s=0.3, t=0.2, sum=0.1)


def test_all_ranks_start_their_collectives_in_one_order_and_t_is_late_by_no_more_than_allowed():
    for late in (1, 2):
        *_, program = woven("zb-h1", 4, 9, 2, 1, late, s=0.4, t=0.3, i=0.1, e=0.1)
        orders = [[op for op in ops if op.kind.unit_wide and op.kind.is_collective] for ops in program.ranks]
        assert all(one == other for one, other in pairwise(orders)) and len(orders[0]) == 4 * 9 * 2
        for ops in program.ranks:
            owed = most = 0
            for op in ops:
                owed += (op.kind is Kind.S) - (op.kind is Kind.T)
                most = max(most, owed)
            assert most <= late + 1
