"""A plan runs exactly as written, leaves nothing over, and reports the op and rank of a failure."""

from threading import active_count

import pytest

from tests.refusals import refused
from tests.runtime.small_plans import make_plan, make_program, make_worker, plan_of
from tests.runtime.test_gradients import VECTORS, user
from tests.threads import run_threads, side_by_side
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement
from zbc.runtime.core.execute import run_step
from zbc.runtime.transports.hub import Hub

ONE, TWO = Placement.linear(1), Placement.linear(2)
FIRST = "F s0 m0, SEND_F s0 m0, RECV_B s0 m0, BW s0 m0, VALIDATE, STEP s0"
LAST = "RECV_F s1 m0, F s1 m0, BW s1 m0, SEND_B s1 m0, VALIDATE, STEP s1"


def fails(plan, steps=1, setup=None):
    """The error of a run."""
    with pytest.raises(Exception) as caught:
        run_threads(plan, steps, setup=setup)
    return caught.value


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_ops_run_exactly_as_written(schedule, ran):
    plan = make_plan(make_program(schedule, 2, 3))
    run_threads(plan, 2)
    assert [tuple(ran[rank]) for rank in (0, 1)] == [ops * 2 for ops in plan.program.ranks]


def test_each_step_learns_from_other_data_and_every_rank_knows_the_result():
    workers = run_threads(make_plan(make_program("zb-h1", 4, 4)), 3)
    results = [[(r.step, r.loss, r.grad_norm, r.busy_seconds, r.peak_bytes) for r in w.results] for w in workers]
    assert all(other == results[0] for other in results)
    assert [r.step for r in workers[0].results] == [0, 1, 2]
    assert len({r.loss for r in workers[0].results}) == 3
    for result in workers[0].results:
        assert len(result.busy_seconds) == len(result.peak_bytes) == 4
        assert all(0 < busy < result.seconds for busy in result.busy_seconds) and min(result.peak_bytes) > 2**20


def test_a_stop_asked_for_by_one_rank_is_known_to_all():
    plan = plan_of([FIRST, LAST], TWO, 1)
    hub = Hub(2)
    workers = [make_worker(plan, rank, hub) for rank in (0, 1)]
    found = side_by_side(
        2, lambda rank: [run_step(workers[rank], step, stop=rank == step == 1).stop for step in (0, 1)]
    )
    assert found == [[False, True]] * 2


# ---- plans that are wrong --------------------------------------------------------------------------------------

WRONG = {
    "an output is never sent": (FIRST.replace("SEND_F s0 m0, ", ""), LAST, "F s1 m0"),
    "a gradient is never sent": (FIRST, LAST.replace("SEND_B s1 m0, ", ""), "B s0 m0"),
    "a receive is never posted": (FIRST, LAST.replace("RECV_F s1 m0, ", ""), "RECV_F s1 m0 is needed but was not"),
    "a gradient is never posted": (FIRST.replace("RECV_B s0 m0, ", ""), LAST, "RECV_B s0 m0 is needed but was not"),
    "a backward without its forward": (FIRST, LAST.replace("F s1 m0, BW", "BW"), "BW s1 m0: its F has not run"),
    "a weight gradient without its B": (FIRST.replace("BW", "W"), LAST, "W s0 m0: its B has not run"),
    "a send before its op": (FIRST.replace("F s0 m0, SEND_F s0 m0", "SEND_F s0 m0, F s0 m0"), LAST, "SEND_F s0 m0"),
    "a forward twice": (FIRST.replace("F s0 m0, SEND", "F s0 m0, F s0 m0, SEND"), LAST, "F s0 m0 runs twice"),
    "a message twice": (FIRST.replace("VALIDATE", "RECV_B s0 m0, VALIDATE"), LAST, "never used: RECV_B s0 m0"),
    "a step before the verdict": (FIRST.replace("VALIDATE, STEP s0", "STEP s0, VALIDATE"), LAST, "STEP s0 comes"),
    "no verdict": (FIRST.replace(", VALIDATE, STEP s0", ""), LAST.replace(", VALIDATE, STEP s1", ""), "no VALIDATE"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_plan_ends_with_e703_that_names_the_op(what):
    first, last, named = WRONG[what]
    error = fails(plan_of([first, last], TWO, 1))
    assert isinstance(error, ZbcError) and error.code == "E703", error
    assert named in error.render(), error.render()


LEFT = {
    "F s0 m0, VALIDATE": "kept[s0 m0]",
    "F s0 m0, B s0 m0, VALIDATE": "slots[s0 m0]",
    "VALIDATE, F s0 m0, BW s0 m0": "losses[m0]",
}


@pytest.mark.parametrize("ops", LEFT)
def test_work_left_behind_is_named(ops):
    error = fails(plan_of([ops], ONE, 1))
    assert error.code == "E703" and LEFT[ops] in error.message and error.where == "rank 0 after step 1"


def test_messages_without_an_end_are_named():
    error = fails(plan_of(["F s0 m0, VALIDATE", "VALIDATE"], TWO, 1))
    assert "kept[s0 m0]" in error.message and error.details == ("edges[SEND_F s0 m0]",)
    first = "F s0 m0, SEND_F s0 m0, F s0 m1, SEND_F s0 m1, RECV_B s0 m0, BW s0 m0, RECV_B s0 m1, BW s0 m1, VALIDATE"
    error = fails(plan_of([first, "RECV_F s1 m0, F s1 m0, BW s1 m0, SEND_B s1 m0, VALIDATE"], TWO, 2))
    assert error.code == "E703" and "SEND_F s0 m1" in error.render()


EARLY = [
    (FIRST, LAST + ", BW s0 m0", "E205", "BW s0 m0"),
    (FIRST + ", RECV_F s0 m0", LAST, "E203", "RECV_F s0 m0"),
    (FIRST, LAST + ", SEND_F s1 m0", "E203", "SEND_F s1 m0"),
]


@pytest.mark.parametrize(("first", "last", "code", "said"), EARLY)
def test_ops_of_other_ranks_and_transfers_out_of_the_pipeline_are_refused_before_the_run(first, last, code, said):
    with refused(code, said):
        make_worker(plan_of([first, last], TWO, 1), int(last != LAST))


def test_slices_of_which_nobody_says_where_they_are_are_refused():
    plan = make_plan(make_program("1f1b", 1, 1))
    with refused("E406"):
        make_worker(type(plan)(plan.manifest.model_copy(update={"slices": 2}), plan.program))


# ---- ops that fail ---------------------------------------------------------------------------------------------


def test_an_exception_keeps_its_type_and_names_rank_step_and_op():
    plan, before = make_plan(make_program("1f1b", 2, 2), model=user("fails_later", good=3), **VECTORS), active_count()
    error = fails(plan, steps=3)
    assert active_count() == before
    assert type(error) is ArithmeticError and str(error) == "out of luck"
    layer, note = error.__notes__
    assert layer == "in layer layers.1, for float32 [2, 8]"
    index = plan.program.ranks[0].index(Op(Kind.F, 0, 1))
    assert note == f"while rank 0 ran op {index} of {len(plan.program.ranks[0])} of step 2: F s0 m1"


def test_a_layer_that_changes_its_shape_in_training_and_a_loss_that_is_not_one_number_are_named():
    error = fails(make_plan(make_program("1f1b", 4, 4), model=user("shrinks"), **VECTORS))
    assert error.code == "E505" and "output of stage 1 is float32 [1, 8], it must be float32 [2, 8]" in error.message
    assert "rank 1 ran op" in error.__notes__[0]
    model = user("residual", loss="tests.runtime.user_models:no_reduction")
    error = fails(make_plan(make_program("1f1b", 1, 1), model=model, **VECTORS))
    assert error.code == "E505" and "shape [2, 8]" in error.message


@pytest.mark.parametrize(
    ("forward", "op", "what"), [(True, "F", "the input of F s1 m0"), (False, "BW", "the gradient for B s0 m0")]
)
def test_tensors_handed_over_in_memory_are_checked_too(forward, op, what):
    plan = plan_of(["F s0 m0, F s1 m0, BW s1 m0, BW s0 m0, VALIDATE"], Placement.looped(1, 2), 1)
    worker = make_worker(plan)
    with refused("E505", what):
        for handler, current, _ in worker.script:
            if current.kind.value == op:
                for edge in [one for one in worker.edges if one.forward is forward]:
                    worker.edges[edge] = worker.edges[edge].double()
            handler(worker, current)
