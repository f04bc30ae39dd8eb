"""Fewer microbatches than ranks, down to one: every schedule plans them, and trains as one process does."""

import pytest

from tests.jobs import job
from tests.runtime.small_plans import GPT, hold, make_plan, make_program, reference
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.schedules import AUTO, SCHEDULES

FAST = {"lr": 1e-2, "clip_grad_norm": 0.5}
SMALL = {**GPT, "hidden": 16, "heads": 2}
STEPS = 1


def options(schedule):
    """Layers for every stage of four ranks."""
    stages = SCHEDULES[schedule].placement(4, SCHEDULES[schedule].default_chunks).stages
    return {"model": {**SMALL, "layers": max(2, stages - 2)}, "size": 1}


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("schedule", few(SCHEDULES, ("1f1b", "interleaved-1f1b", "dualpipe")))
def test_four_ranks_train_with_fewer_microbatches_as_one_process_does(schedule, m):
    plan = make_plan(make_program(schedule, 4, m), optimizer=FAST, **options(schedule))
    workers, expected = run_threads(plan, STEPS), reference(plan, STEPS)
    one_pipe = len(plan.manifest.placement[0]) == 1  # two sum their gradients in another order
    hold(workers, expected, tolerance=1e-5)
    assert not one_pipe or losses_of(workers) == expected.losses


@pytest.mark.parametrize("schedule", few(["gpipe", "zb-h1", "zb-v", "interleaved-1f1b"], ("zb-h1",)))
def test_without_a_barrier_one_microbatch_is_enough(schedule):
    plain, ahead = (
        run_threads(
            make_plan(make_program(schedule, 4, 1, sync=sync), optimizer={**FAST, "sync": sync}, **options(schedule)), 3
        )
        for sync in ("before-step", "post-validate")
    )
    assert [(r.loss, r.grad_norm) for r in plain[0].results] == [(r.loss, r.grad_norm) for r in ahead[0].results]


@pytest.mark.parametrize("schedule", few([AUTO, *SCHEDULES], lambda name: name != AUTO))
def test_a_job_with_one_microbatch_is_planned_proven_and_predicted(schedule):
    """A single one goes down and up: no schedule can hide anything, none needs longer than that."""
    for m in (1, 2, 3):
        compiled = compile_job(
            job(kind=schedule, m=m, layers=16, pp=4, costs={"f": 1.0, "b": 1.0, "w": 1.0, "reduce": 0.0}), budget=0.0
        )
        assert compiled.report.makespan_ms <= m * 4 * 3.0 + 1e-9
        assert compiled.report.makespan_ms >= max(8.0, compiled.report.lower_bound_makespan_ms) - 1e-9
        assert compiled.assemble()[0].microbatches == m
