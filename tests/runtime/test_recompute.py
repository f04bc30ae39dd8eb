"""Recompute changes only the saved activations: bitwise equal, one more forward per layer, one alive at a time."""

import pytest

from tests.runtime.small_plans import GPT, make_plan, make_program, make_worker
from tests.runtime.test_gradients import MODELS, PLANNED, VECTORS, check_gradients, model_of, slack, user, without_step
from tests.tiers import few
from zbc.compiler.schedules import SCHEDULES
from zbc.runtime.core.execute import run_step

ALL = {"activations": "recompute"}


@pytest.mark.parametrize("p", few([2, 4], (4,)))
@pytest.mark.parametrize("schedule", few(SCHEDULES, ("1f1b", "zb-v", "chimera-zb")))
def test_gradients_keep_their_bits_in_every_schedule(schedule, p):
    plan = make_plan(make_program(schedule, p, 2 * p), keep=without_step, **ALL)
    check_gradients(plan, tolerance=slack(schedule))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_stages_choose_for_themselves_and_some_of_their_layers(schedule):
    how = {"model": {**GPT, "layers": 10}, "activations": {"1": "recompute", "0": "recompute 1"}}
    workers = check_gradients(make_plan(make_program(schedule, 2, 4), keep=without_step, **how))
    found = {stage.index: (stage.recompute, len(stage.layers)) for w in workers for stage in w.stages.values()}
    assert found[0][0] == 2 < found[0][1] and found[1][0] == found[1][1]
    assert not any(again for s, (again, _) in found.items() if s > 1)


@pytest.mark.parametrize(
    ("name", "schedule", "p"), few(PLANNED, lambda case: case[0] == "dropout" or case[1:] == MODELS[case[0]][0][0])
)
def test_each_model_keeps_its_gradients(name, schedule, p):
    """A second forward draws the same numbers, and norms over the batch see it twice."""
    check_gradients(make_plan(make_program(schedule, p, 4), **model_of(name), keep=without_step, **ALL))


def forwards(activations, schedule="zb-h1", frozen=0):
    """The number of forwards of each layer in one step of two microbatches on one stage."""
    plan = make_plan(make_program(schedule, 1, 2), model=user("residual"), **VECTORS, activations=activations)
    worker, counts = make_worker(plan), {}
    for layer in worker.stages[0].layers[:frozen]:
        layer.module.requires_grad_(False)
    for layer in worker.stages[0].layers:
        counts[layer.name] = 0

        def count(module, inputs, name=layer.name):
            counts[name] += 1

        layer.module.register_forward_pre_hook(count)
    run_step(worker, 0)
    return list(counts.values())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_each_layer_runs_twice_per_microbatch_with_split_backward_too(schedule):
    assert forwards("keep", schedule) == [2] * 4
    assert forwards("recompute", schedule) == [4] * 4
    assert forwards("recompute 3", schedule) == [4, 4, 4, 2]


def test_layers_before_the_first_that_trains_run_once():
    assert forwards("recompute", frozen=2) == [2, 2, 4, 4]
