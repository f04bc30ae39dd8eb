"""Two pipes in opposite directions train like one: their copies of a stage stay equal."""

import pytest

from tests.lowered import lower
from tests.runtime.small_plans import GPT, make_plan, make_program
from tests.runtime.test_copies import alike, results
from tests.runtime.test_gradients import check_gradients, without_step
from tests.threads import run_threads
from tests.tiers import few
from tests.uneven import FOLD, FORK, THREE, eager
from zbc.compiler.check import check_all
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.ir import Kind, Placement

CLIPPED = {"lr": 1e-2, "clip_grad_norm": 0.05}
SMALL = {**GPT, "layers": 6, "hidden": 16}


@pytest.mark.parametrize(
    ("name", "p"), few([("chimera", 2), ("bitpipe", 4), ("dualpipe", 4), ("bitpipe-zb", 2)], ("chimera",))
)
def test_copies_of_a_stage_have_the_same_bits_after_fifty_clipped_steps(name, p):
    """Copies that once differ never meet again."""
    plan = make_plan(make_program(name, p, 4), model=SMALL, optimizer=CLIPPED, size=1)
    workers = run_threads(plan, 50)
    alike(workers)
    holders = {s: len(set(plan.program.placement.holders(s))) for s in range(plan.program.placement.stages)}
    assert max(holders.values()) == 2
    found = results(workers)
    assert all(norm > CLIPPED["clip_grad_norm"] for _, norm in found[:5]), "clipping was at work"


@pytest.mark.parametrize("pipes", [FORK, FOLD, THREE])
@pytest.mark.parametrize("split", few([False, True], (True,)))
def test_ranks_may_hold_different_numbers_of_stages_and_pipes_leave_some_out(pipes, split):
    program = lower(eager(Placement(pipes), 5, split=split))
    check_all(program)
    check_gradients(make_plan(program, keep=without_step), tolerance=1e-6)


@pytest.mark.parametrize(("name", "v"), [("dualpipe", 1), ("dualpipe-v", 2)])
def test_groups_run_one_op_after_the_other_where_there_is_one_stream(name, v):
    program = lower(SCHEDULES[name].make(Request(4, 8, v, overlap=True)))
    assert any(op.kind is Kind.OVERLAP for ops in program.ranks for op in ops)
    check_gradients(make_plan(program, keep=without_step), tolerance=1e-6)
