"""float16: losses are scaled, steps skipped and scales changed as torch's own GradScaler does it in one process."""

from itertools import pairwise

import pytest
import torch

from tests.composed import beside, trained
from tests.jobs import job
from tests.refusals import refused
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program, parameters, reference
from tests.runtime.test_added import plan_of as added_plan
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.runtime.core.progress import StepResult
from zbc.training.guest import Skips

HALF = {**GPT, "dtype": "float16", "loss_scale": (65536.0, 2)}
LOUD = {**HALF, "loss": "tests.runtime.losses:loud"}
ADAMW = {"lr": 1e-2, "clip_grad_norm": 0.5}
SGD = {"kind": "sgd", "lr": 0.1, "clip_grad_norm": 0.5}
STEPS = 8


def plan_of(schedule="1f1b", p=2, m=4, *, model=LOUD, how=None, **options):
    program = make_program(schedule, p, m, **(how or {}))
    return make_plan(program, model=model, **{"optimizer": ADAMW, "size": 1, **options})


def check(plan, steps=STEPS, tolerance=0.0):
    workers, wanted = run_threads(plan, steps), reference(plan, steps)
    for worker in workers:
        assert [one.scale for one in worker.results] == wanted.scales
        skips = [low < high for high, low in pairwise(wanted.scales)]
        assert [one.skipped for one in worker.results][:-1] == skips
    assert losses_of(workers) == pytest.approx(wanted.losses, rel=tolerance, abs=0.0)
    finite = [at for at, norm in enumerate(wanted.norms) if norm < float("inf")]
    norms = [workers[0].results[at].grad_norm for at in finite]
    assert norms == pytest.approx([wanted.norms[at] for at in finite], rel=tolerance or 1e-12)
    for name, parameter in parameters(workers).items():
        expected = wanted.weights[name]
        torch.testing.assert_close(parameter.detach(), expected, rtol=tolerance, atol=tolerance, msg=name)
    return wanted


WAYS = [(schedule, p, kept) for schedule in ("1f1b", "zb-h1", "zb-v") for p in (1, 2) for kept in ("keep", "recompute")]


@pytest.mark.parametrize(("schedule", "p", "kept"), few(WAYS, lambda way: way in (WAYS[2], WAYS[5], WAYS[10])))
def test_training_is_that_of_one_process_with_a_grad_scaler_bit_by_bit(schedule, p, kept):
    """The first steps overflow; two in a row that do not double the scale."""
    scales = check(plan_of(schedule, p, activations=kept)).scales
    assert scales[0] == 65536.0 and min(scales) < 65536.0
    assert any(low < high for low, high in pairwise(scales)), "it grows"


@pytest.mark.parametrize("model", [HALF, {**LLAMA, "dtype": "float16"}])
def test_a_training_without_overflows_is_that_of_one_process(model):
    assert min(check(plan_of("zb-h1", model=model), 4).scales) == 65536.0


@pytest.mark.parametrize(("how", "optimizer"), [({}, {}), ({"sharded": True}, {"zero1": True})])
def test_an_overflow_on_one_replica_skips_the_step_on_all(how, optimizer):
    check(plan_of("1f1b", 2, 2, how={"copies": 2, **how}, optimizer={**SGD, **optimizer}), tolerance=1e-4)


FEATURES = ["sharded weights", "slices", "copies", "sharded all", "offload", "cp", "tp_sequence", "tp", "freeze"]
FEATURES += ["overlap", "replicas", "ramp", "tied embeddings", "fused gradients", "loss by chunks", "shared vocabulary"]


@pytest.mark.parametrize("trait", few(FEATURES, 0))
def test_steps_that_overflow_are_the_same_with_other_features(trait):
    parts = trait in ("slices", "cp")  # products over fewer tokens overflow later
    how = {"model__dtype": "float16", "model__loss_scale": [2.0**10, 3] if parts else [2.0**21, 1]}
    found, wanted = (trained(tables, steps=4) for tables in beside(trait, optimizer__kind="sgd", **how))
    finite = [norm < float("inf") for _, norm in wanted]
    assert [norm < float("inf") for _, norm in found] == finite and set(finite) == ({True} if parts else {True, False})
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in wanted], rel=3e-3)


@pytest.mark.parametrize("how", ["add", "scaled"])
def test_losses_that_layers_add_are_scaled_and_told_as_they_are(how):
    """Layers in double precision, which autocast leaves alone: all is as without a scale, to the bit."""

    def trained(**changes):
        plan = added_plan(("zb-h1", 2, 1, "before-step"), how, clip=0.1, model=changes)
        workers = run_threads(plan, 3)
        told = [(one.loss, one.added, one.grad_norm, one.scale) for one in workers[0].results]
        return told, {name: p.detach() for name, p in parameters(workers).items()}

    (told, weights), (plain, wanted) = trained(dtype="float16"), trained()
    assert [one[3] for one in told] == [65536.0] * 3 and [one[:3] for one in told] == [one[:3] for one in plain]
    assert all(torch.equal(weights[name], value) for name, value in wanted.items()) and (how != "add" or told[0][1] > 0)


def test_a_plan_counts_with_the_times_and_bytes_of_bfloat16():
    jobs = (job(model={"dtype": dtype}, parallel={"dp": 2, "shard": "weights"}) for dtype in ("float16", "bfloat16"))
    one, other = (compile_job(found).assemble()[0] for found in jobs)
    assert one.predicted == other.predicted and one.id != other.id


def test_overflows_that_a_lower_scale_mends_are_no_skipped_steps_that_end_a_run():
    skips = Skips(plan_of(train={"skip_limit": 2}).manifest)
    result = StepResult(1.0, float("inf"), False, (), (), skipped=True, scale=65536.0)
    for _ in range(5):
        skips.told(result)
    with refused("E704", match="the 2nd in a row"):
        for one in (StepResult(1.0, float("inf"), False, (), (), skipped=True), result):
            skips.told(one)
            skips.told(StepResult(float("nan"), float("inf"), False, (), (), skipped=True, scale=8.0, bad_losses=(1,)))
