"""The test that defines correctness: every schedule computes the same as one process with plain autograd."""

import pytest
import torch

from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program, parameters, plan_of, reference
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.compiler.schedules import SCHEDULES
from zbc.ir import Kind, Op, Placement

VECTORS = {"data": {"kind": "tests.runtime.user_models:Vectors"}}


def user(factory, **args):
    loss = args.pop("loss", "mse")
    layers = args.pop("layers", 4)
    return {"family": f"tests.runtime.user_models:{factory}", "layers": layers, "loss": loss, "args": args}


def slack(schedule):
    """The tolerance: 0, bitwise; with two pipes a stage's gradient is a sum of two, whose order differs."""
    return 0.0 if len(SCHEDULES[schedule].placement(4, SCHEDULES[schedule].default_chunks).pipes) == 1 else 1e-6


def without_step(op: Op) -> bool:
    """The plan without STEP, so that gradients stay."""
    return op.kind is not Kind.STEP


def check_gradients(plan, *, tolerance=0.0, loss=0.0, expected=None):
    workers, expected = run_threads(plan, 1), expected or reference(plan)
    found = parameters(workers)
    assert found.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        mine = found[name].grad
        if grad is None or mine is None:
            assert grad is None and mine is None, name
        elif tolerance:
            torch.testing.assert_close(mine, grad, rtol=tolerance, atol=tolerance, msg=name)
        else:
            assert torch.equal(mine, grad), name
    for worker in workers:
        (result,) = worker.results
        assert result.loss == pytest.approx(expected.losses[0], rel=loss, abs=0.0)
        assert not expected.norms or result.grad_norm == pytest.approx(expected.norms[0], rel=tolerance or 1e-12)
        assert (result.loss, result.grad_norm) == (workers[0].results[0].loss, workers[0].results[0].grad_norm)
    return workers


def check_training(plan, steps=3, *, tolerance=0.0):
    workers, expected = run_threads(plan, steps), reference(plan, steps)
    assert losses_of(workers) == pytest.approx(expected.losses, rel=tolerance, abs=0.0)
    for name, parameter in parameters(workers).items():
        assert tolerance or torch.equal(parameter, expected.weights[name]), name


@pytest.mark.long("chimera-zb-4-8", "interleaved-1f1b-4-8")
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 8), (4, 1), (4, 3)])
@pytest.mark.parametrize("schedule", few(SCHEDULES))
def test_losses_and_gradients_are_those_of_one_process_bit_by_bit(schedule, p, m):
    if p % SCHEDULES[schedule].ranks_in == 0:
        check_gradients(make_plan(make_program(schedule, p, m), keep=without_step), tolerance=slack(schedule))


@pytest.mark.long("zb-v")
@pytest.mark.parametrize("schedule", few(SCHEDULES, ("1f1b", "zb-v", "chimera-zb")))
def test_weights_after_three_clipped_adamw_steps_are_those_of_one_process(schedule):
    plan = make_plan(make_program(schedule, 4, 4), optimizer={"lr": 1e-2, "clip_grad_norm": 0.5})
    check_training(plan, tolerance=slack(schedule))


BOTH = [("zb-h1", 4), ("1f1b", 4)]
BOTH_ERRORS = "tests.runtime.user_models:both_errors"
CONVNET = {"family": "plans.convnet:layers", "layers": 8}
MODELS = {  # its plans, of which the first always runs, and its settings
    "rotary positions": ([("zb-v", 4), ("1f1b", 4), ("zb-h1", 4)], {**GPT, "variant": "rotary"}),
    "llama": ([("zb-h1", 4), ("1f1b", 1), ("zb-v", 4)], LLAMA),
    "qwen2": ([("zb-v", 2)], {**LLAMA, "variant": "qwen2"}),
    "qwen3 in a window": ([("zb-v", 2), ("zb-h1", 2)], {**LLAMA, "variant": "qwen3", "window": 5}),
    "convolutions": ([*BOTH, ("zb-v", 4)], CONVNET),
    "convolutions in bfloat16": ([*BOTH, ("zb-v", 4)], {**CONVNET, "dtype": "bfloat16"}),
    "ready-made": (BOTH, user("ready_made")),
    "builders": (BOTH, user("residual")),
    "without parameters": (BOTH, user("without_parameters")),
    "looks at values": (BOTH, user("value_dependent")),
    "several kinds": (BOTH, user("mixed")),
    "checkpoints its activations": ([("1f1b", 2), ("zb-h1", 2), ("zb-v", 2)], user("checkpointed")),
    "only biases train": ([("1f1b", 2), ("zb-h1", 2)], user("frozen", which=[0, 2], bias_only=True)),
    "dropout": ([("1f1b", 2), ("1f1b", 4), ("zb-h1", 4), ("zb-v", 2)], user("residual", dropout=0.3)),
    "several tensors, dropout": ([("zb-v", 2)], user("several", layers=8, count=8, dropout=0.5)),
    "several in bfloat16": ([("zb-v", 2)], {**user("several", layers=8, count=8), "dtype": "bfloat16"}),
    "only a mask goes on": ([("1f1b", 2), ("1f1b", 4)], user("masks")),
    "dicts and constants": ([("1f1b", 4), ("zb-v", 4)], user("structured", layers=8, count=8)),
    "two heads": ([("zb-v", 2)], user("two_heads", loss=BOTH_ERRORS)),
    "named heads": ([("zb-v", 2)], user("two_heads", named=True, loss=BOTH_ERRORS)),
    **{
        f"{family['family']} in bfloat16": ([("zb-h1", 2), ("1f1b", 2), ("zb-v", 2)], {**family, "dtype": "bfloat16"})
        for family in (GPT, LLAMA)
    },
    "a loss of the user": ([("zb-h1", 2)], user("residual", loss="tests.runtime.user_models:sum_of_errors")),
    **{
        f"layers {which} do not train": (BOTH, user("frozen", which=which))
        for which in ([0], [1], [0, 1], [3], [0, 1, 2, 3])
    },
}
PLANNED = [(name, *way) for name, (ways, _) in MODELS.items() for way in ways]
EACH = ("checkpoints its activations", "only biases train", "dropout", "only a mask goes on", "dicts and constants")


def model_of(name):
    data = {"plans": {"data": {"kind": "plans.convnet:Quadrants"}}, "tests": VECTORS}
    return {"model": MODELS[name][1], **data.get(MODELS[name][1]["family"].partition(".")[0], {})}


@pytest.mark.long("llama-zb-h1-4")
@pytest.mark.parametrize(
    ("name", "schedule", "p"), few(PLANNED, lambda case: case[0] in EACH or case[1:] == MODELS[case[0]][0][0])
)
def test_each_model_has_the_gradients_of_one_process_bit_by_bit(name, schedule, p):
    check_gradients(make_plan(make_program(schedule, p, 4), **model_of(name), keep=without_step))


WARM = {"warmup_steps": 2, "min_lr": 1e-3}
TRAINED = {
    **{
        kind: ("zb-v", 2, {"steps": 5, "optimizer": {"lr": 1e-2, "schedule": {"kind": kind, **WARM}}})
        for kind in ("wsd", "linear", "cosine")
    },
    "momentum": ("zb-h1", 2, {"optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}}),
    "nothing trains": ("zb-h1", 4, {"model": user("frozen", which=[0, 1, 2, 3]), **VECTORS}),
    "one key for all": ("zb-v", 2, {"model": {**LLAMA, "kv_heads": 1, "head_size": 12, "rope_theta": 500.0}}),
}


@pytest.mark.long("wsd")
@pytest.mark.parametrize("name", few(TRAINED, lambda name: name not in ("linear", "cosine")))
def test_weights_after_some_steps_are_those_of_one_process(name):
    schedule, p, options = TRAINED[name]
    plan = make_plan(make_program(schedule, p, 4), **{"optimizer": {"lr": 1e-2}, **options})
    check_training(plan, options.get("steps", 3))


@pytest.mark.parametrize("factory", ["twice", "scales"])
def test_layers_whose_w_sums_in_another_order_have_nearly_the_gradients_of_one_process(factory):
    """Autograd adds both uses of a module before it accumulates, W accumulates them one by one; and autograd reduces a
    broadcast in another order than the (grad * x).sum(0) that a layer defers."""
    plan = make_plan(make_program("zb-h1", 4, 4), model=user(factory), **VECTORS, keep=without_step)
    assert all(p.grad is not None for p in parameters(check_gradients(plan, tolerance=1e-6)).values())


def test_a_copy_without_a_gradient_gets_the_sum_and_no_gradient_anywhere_stays_none():
    """Only rank 0 ran a microbatch through stage 0; of layer 0 nothing trains."""
    one = "F s0 m0, SEND_F s0 m0, RECV_B s0 m0, BW s0 m0, REDUCE s0, REDUCE s1, VALIDATE"
    two = "RECV_F s1 m0, F s1 m0, BW s1 m0, SEND_B s1 m0, REDUCE s0, REDUCE s1, VALIDATE"
    plan = plan_of([one, two], Placement.bidirectional((0, 1)), 1, model=user("frozen", which=[0]), **VECTORS)
    workers = check_gradients(plan)
    assert workers[0].stages[0].parameters["layers.0.up.weight"].grad is None
    assert workers[1].stages[0].parameters["layers.1.up.weight"].grad is not None


@pytest.mark.parametrize("order", ["B m0, B m1, W m1, W m0", "B m1, W m1, B m0, W m0", "B m1, B m0, W m0, W m1"])
def test_any_order_of_b_and_w_keeps_microbatches_apart(order):
    """Sums of two terms, so that the order of accumulation has no effect and any other difference shows."""
    body = ", ".join(f"{kind} s0 {mb}" for kind, mb in (item.split() for item in order.split(", ")))
    check_gradients(plan_of([f"F s0 m0, F s0 m1, {body}, VALIDATE"], Placement.linear(1), 2))
