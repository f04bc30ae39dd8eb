"""Interleaved 1F1B with a longer warm-up: its memory, and the transfers hidden by groups of its pairs."""

import pytest

from tests.composed import TOLERANCE, apart, beside, trained
from tests.jobs import job
from tests.lowered import lower
from zbc.compiler.check import check_all
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Kind

MAKE = SCHEDULES["interleaved-1f1b"].make


@pytest.mark.parametrize("early", [0, 1, 2])
@pytest.mark.parametrize("v", [2, 3])
def test_it_holds_a_chunk_of_a_microbatch_more_for_each_and_takes_as_long(early, v):
    plain, more = (lower(MAKE(Request(4, 8, v, early=count))) for count in (0, early))
    costs = Costs.uniform(plain.placement)
    before, after = ([rank.units for rank in peaks(one, costs)] for one in (plain, more))
    assert after == pytest.approx([units + early / v for units in before])
    assert simulate(more, costs).makespan == simulate(plain, costs).makespan


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize(("p", "m", "v"), [(1, 1, 2), (2, 3, 2), (3, 7, 3), (4, 8, 2), (4, 2, 1), (5, 6, 2)])
def test_pairs_as_groups_are_free_of_deadlock(p, m, v, slices):
    for early in (1, 2):
        check_all(lower(MAKE(Request(p, m, v, early=early, overlap=True, slices=slices))))


def marks(program):
    return sum(op.kind is Kind.OVERLAP for ops in program.ranks for op in ops)


def test_a_backward_that_needs_the_forward_beside_it_is_in_no_group_with_it():
    assert marks(MAKE(Request(4, 8, 2, early=1, overlap=True))) > 0
    assert not marks(MAKE(Request(4, 8, 2, overlap=True)))
    assert not marks(MAKE(Request(4, 8, 2, early=1, overlap=True, group=2)))  # a round does not cover the ranks


def test_groups_hide_sums_of_ranks_that_share_layers():
    costs = {"f": 1.0, "b": 1.0, "w": 1.0, "tp": 0.3}
    asked = {"kind": "interleaved-1f1b", "layers": 8, "pp": 4, "m": 16, "costs": costs, "parallel": {"tp": 2}}
    plain = compile_job(job(**asked), budget=0.0, suggest=False)
    hidden = compile_job(job(**asked, schedule={"early": 1, "overlap": True}), budget=0.0, suggest=False)
    assert hidden.settled_ms < 0.93 * plain.settled_ms


def test_groups_train_as_ops_one_after_the_other():
    both, plain = beside("tp", schedule__kind="interleaved-1f1b", schedule__early=1, schedule__overlap=True)
    both["parallel"]["pp"] = plain["parallel"]["pp"] = 2
    both["model"]["layers"] = plain["model"]["layers"] = 4
    both["schedule"]["microbatches"] = plain["schedule"]["microbatches"] = 4
    assert apart(trained(both), trained(plain)) <= TOLERANCE
