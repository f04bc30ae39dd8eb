"""Steps whose gradients are not finite: skipped by all, counted by all, and the place is named."""

import math

import pytest

from tests.runtime.small_plans import make_plan, make_program
from tests.threads import last_of, run_threads, watch
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.ir import Kind
from zbc.training.guest import origin

PARAMETER = "up.weight"
WAYS = {
    "barrier": ("zb-h1", {}, {}),
    "post-validate": ("zb-v", {"sync": "post-validate"}, {}),
    "two copies": ("1f1b", {"copies": 2}, {}),
    "two copies, zero1": ("1f1b", {"copies": 2, "sharded": True}, {"zero1": True}),
    "weights come and go": ("breadth-first", {"copies": 2, "sharded": True, "resident": 1}, {}),
}


def plan_for(way="barrier", **train):
    schedule, how, options = WAYS[way]
    optimizer = {"clip_grad_norm": 1e6, **options, **({"sync": how["sync"]} if "sync" in how else {})}
    return make_plan(make_program(schedule, 2, 4, **how), optimizer=optimizer, train=train)


def poisoned(steps, layer="layers.3"):
    """Makes one gradient of that layer NaN in these steps, on the last copy of its stage alone."""

    def setup(worker):
        manifest = worker.plan.manifest
        (stage,) = [s for s, names in enumerate(manifest.layers) if layer in names]
        if stage not in worker.stages or worker.rank < manifest.topology.world - manifest.ranks:
            return
        parameter = worker.stages[stage].parameters[f"{layer}.{PARAMETER}"]
        last = worker.script[last_of(worker, Kind.W, Kind.BW, stage=stage)][1]

        def spoil(worker, op):
            if worker.step in steps:
                parameter.grad[0] = math.nan

        watch(worker, after=spoil, of=lambda op: op == last)

    return setup


def ends(plan, steps, setup):
    """The error that ends a run of `steps` steps, and the steps of each rank."""
    seen = {}

    def remember(worker):
        setup(worker)
        seen[worker.rank] = worker.results

    with pytest.raises(ZbcError) as raised:
        run_threads(plan, steps, setup=remember)
    assert raised.value.code == "E704" and raised.value.exit_code == 7
    return raised.value, {rank: [(r.step, r.skipped) for r in results] for rank, results in seen.items()}


@pytest.mark.parametrize("way", few(WAYS, ("barrier", "two copies, zero1")))
def test_stop_ends_the_run_at_the_first_such_step_and_names_it_and_its_stage(way):
    error, seen = ends(plan_for(way, skip_limit=1), 4, poisoned({1}))
    assert error.message == "run: step 2 has gradients that are not finite"
    assert "every loss is finite, so it happened in backward" in error.details
    stage = next(s for s, names in enumerate(plan_for(way).manifest.layers) if "layers.3" in names)
    assert f"backward met it first in stage {stage}: layers.3.{PARAMETER}" in error.details
    assert max(seen.values(), key=len) == [(0, False), (1, True)], "the run went on"


@pytest.mark.parametrize("way", few(["barrier", "post-validate"], ("barrier",)))
def test_skip_ends_the_run_when_too_many_follow_each_other(way):
    plan = plan_for(way, skip_limit=3)
    workers = run_threads(plan, 6, setup=poisoned({0, 1, 3, 4}))
    assert [r.skipped for r in workers[0].results] == [True, True, False, True, True, False]
    error, seen = ends(plan, 6, poisoned({0, 2, 3, 4}))
    assert error.message == "run: step 5 has gradients that are not finite, the 3rd in a row"
    assert max(seen.values(), key=len) == [(step, step != 1) for step in range(5)]


def test_a_loss_that_is_not_finite_is_told_from_a_gradient_that_is_not():
    def setup(worker):
        loss = worker.loss
        seen = iter(range(100))
        worker.loss = lambda y, target: loss(y, target) * (math.nan if next(seen) in (5, 6) else 1.0)

    error, _ = ends(plan_for(skip_limit=1), 3, setup)
    assert error.details[0] == "the loss is not finite for microbatches 1, 2, so it happened in forward"
    assert "in stage 1: head" in error.details[1] or "in stage 1: logits" in error.details[1]


def test_the_origin_is_the_last_layer_of_the_model_and_ten_comes_behind_nine():
    layers = [["embed", "layers.1"], ["layers.9", "layers.10"], ["head"]]
    names = ["embed.tokens.weight", "layers.1.a", "layers.10.b", "layers.9.a", "layers.10.a"]
    assert origin(layers, sorted(names)) == (1, ["layers.10.a", "layers.10.b"])
    assert origin(layers, ["layers.1.a"]) == (0, ["layers.1.a"])
    assert origin(layers, []) is None
