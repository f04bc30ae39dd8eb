"""Microbatches in slices along their sequence compute the same as whole ones, and leave nothing over."""

import math

import pytest
import torch

from tests.lowered import lower
from tests.refusals import refused
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program, parameters, reference
from tests.runtime.test_gradients import without_step
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules import Request, find
from zbc.errors import ZbcError
from zbc.ir import Kind
from zbc.runtime.core.tensors import Part
from zbc.runtime.features.slices import slicing
from zbc.runtime.features.slices.slicing import Inside, Past, attention, within
from zbc.training.probing.checkup import check_up

ROWS = {1: (), 2: (0, 9, 16), 3: (0, 7, 8, 16), 4: (0, 7, 11, 14, 16)}  # of 16 tokens
HERE = "tests.runtime.sliced_models:"
SEQUENCES = {"data": {"kind": HERE + "Sequences"}}
PADDED = {"data": {"kind": HERE + "Padded"}}


def user(factory, loss="mse", **args):
    return {"family": HERE + factory, "layers": 4, "loss": loss, "args": args, "seq_len": 16}


def plan_of(schedule="1f1b", p=2, m=3, k=3, how=None, **options):
    program = make_program(schedule, p, m, slices=k, **(how or {}))
    return make_plan(program, **{"rows": ROWS[k], **options})


def check_gradients(plan, tolerance=1e-6):
    """Compares with one process with whole microbatches and plain autograd."""
    workers, expected = run_threads(plan, 1), reference(plan)
    found = parameters(workers)
    assert found.keys() == expected.grads.keys()
    scale = math.sqrt(sum(grad.square().sum().item() for grad in expected.grads.values()))
    for name, grad in expected.grads.items():
        assert found[name].grad.dtype is grad.dtype, name
        assert (found[name].grad - grad).norm().item() <= tolerance * max(grad.norm().item(), 1e-2 * scale), name
    for worker in workers:
        assert worker.results[0].loss == pytest.approx(expected.losses[0], rel=tolerance)
        assert worker.results[0].grad_norm == pytest.approx(expected.norms[0], rel=10 * tolerance)
    return workers


def test_slices_that_come_in_another_order_are_refused():
    past, k = Past(6), torch.zeros(1, 2, 3, 4)
    with pytest.raises(ZbcError, match=r"forward of rows \[3, 6\): the next to run are those that begin at 0"):
        past.write(3, 6, k, k)
    past.write(0, 3, k, k)
    past.write(3, 6, k, k)
    with pytest.raises(ZbcError, match=r"backward of rows \[0, 3\): the next to come are those that end at 6"):
        past.add(0, 3, k, k)
    both = torch.zeros(1, 2, 6, 4)
    past.add(3, 6, both, both.clone())
    with pytest.raises(ZbcError, match="those that end at 3"):
        past.add(3, 6, both, both)


def test_two_attentions_of_a_layer_have_a_past_each():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 8, 4)
    wanted, found, pasts = attention(x, x, x) + attention(x, x.roll(1, -1), x), [], {}
    for number, (start, stop) in enumerate([(0, 3), (3, 8)]):
        part = x[:, :, start:stop]
        with within(Inside(Part(number, start, stop, 8), pasts, "layer")):
            found.append(attention(part, part, part) + attention(part, part.roll(1, -1), part))
    assert len(pasts) == 2
    torch.testing.assert_close(torch.cat(found, 2), wanted)


@pytest.mark.parametrize("chunk", [512, 5, 1])
@pytest.mark.parametrize("limits", [{"window": 4}, {"cap": 0.7}, {"window": 4, "cap": 0.7}], ids=str)
def test_limited_attention_follows_the_formula_with_its_gradients(limits, chunk, monkeypatch):
    monkeypatch.setattr(slicing, "CHUNK", chunk)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 11, 4, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2))
    scores = q @ k.repeat_interleave(3, 1).mT / 2
    scores = (scores / 0.7).tanh() * 0.7 if "cap" in limits else scores
    far = torch.arange(11)[:, None] - torch.arange(11)
    seen = (far >= 0) & (far < limits.get("window", 11))
    wanted = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(3, 1)
    found, grad = attention(q, k, v, **limits), torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted)
    both = (torch.autograd.grad(y, (q, k, v), grad) for y in (found, wanted))
    torch.testing.assert_close(*both, rtol=1e-11, atol=1e-13)


WAYS = [("1f1b", 2, 3, 2, {}), ("1f1b", 4, 2, 4, {}), ("zb-h1", 4, 3, 3, {}), ("gpipe", 2, 2, 3, {})]
WAYS += [("interleaved-1f1b", 2, 4, 3, {}), ("1f1b", 1, 2, 4, {}), ("1f1b", 2, 3, 3, {"model": LLAMA})]
WAYS += [("zb-h1", 2, 3, 3, {"model": {**GPT, "variant": "rotary"}})]
WAYS += [("zb-h1", 2, 3, 3, {"activations": "recompute"}), ("1f1b", 2, 3, 3, {"activations": "recompute"})]
WAYS += [("1f1b", 2, 3, 3, {"model": {**LLAMA, "window": 5}}), ("zb-h1", 2, 3, 4, {"model": {**GPT, "kv_heads": 2}})]
WAYS += [("zb-v", 2, 3, 3, {}), ("zb-v", 4, 3, 2, {"activations": "recompute"}), ("looped-zb", 2, 3, 2, {})]
WAYS += [("v-half", 2, 2, 3, {}), ("1f1b", 2, 2, 2, {"how": {"copies": 2}})]
WAYS += [("zb-h1", 2, 2, 2, {"how": {"tied": True}, "model": {**GPT, "ties": True}})]
WAYS += [("zb-h1", 2, 3, 3, {"model": user("mixers"), **SEQUENCES})]
WAYS += [("zb-v", 2, 3, 3, {"model": user("several"), **SEQUENCES})]
WAYS += [("1f1b", 2, 3, 3, {"model": user("several"), **SEQUENCES, "activations": "recompute"})]
WAYS += [("zb-h1", 2, 3, 3, {"model": user("nested"), **SEQUENCES})]
WAYS += [("1f1b", 2, 4, 4, {"model": user("tokens", loss="cross_entropy"), **PADDED})]
WAYS += [("zb-h1", 2, 4, 4, {"model": user("tokens", loss=HERE + "own_cross_entropy"), **PADDED})]


@pytest.mark.long("1f1b-4-2-4-options1", "interleaved-1f1b-2-4-3-options4")
@pytest.mark.parametrize(("schedule", "p", "m", "k", "options"), few(WAYS, lambda way: way[4] == {}))
def test_a_step_in_slices_has_the_gradients_of_whole_microbatches(schedule, p, m, k, options):
    check_gradients(plan_of(schedule, p, m, k, keep=without_step, **options))


@pytest.mark.long
def test_forwards_that_run_again_begin_with_the_first_slice():
    """The verdict comes in the middle of a warm-up: slices of some microbatches have run, and run again."""
    order = find("zb-h1").make(Request(p=4, m=2, slices=3))
    program = lower(order, "post-validate", Costs.uniform(order.placement).with_ms(hop=(1.5,)))
    before = [op for op in program.ranks[1][: [op.kind for op in program.ranks[1]].index(Kind.REDO)]]
    assert [op.slice for op in before if op.kind is Kind.F] == [0, 1, 2, 0, 1]
    options = {"kind": "sgd", "lr": 0.5, "clip_grad_norm": 0.5, "sync": "post-validate"}
    plan = make_plan(program, rows=ROWS[3], optimizer=options)
    workers, expected = run_threads(plan, 4), reference(plan, 4)
    assert any(result.redone for result in workers[0].results)
    assert losses_of(workers) == pytest.approx(expected.losses, rel=1e-6)


def test_each_slice_draws_for_itself_whatever_the_plan():
    model = user("mixers", dropout=0.5)
    one, two = (plan_of(*how, 3, 3, model=model, keep=without_step, **SEQUENCES) for how in (("1f1b", 1), ("zb-v", 2)))
    found, wanted = (parameters(run_threads(plan, 1)) for plan in (two, one))
    for name, parameter in wanted.items():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-5, atol=1e-6, msg=name)
    drop, masks = plan_of("1f1b", 1, 1, 2, model=model, rows=(0, 8, 16), **SEQUENCES), []

    def setup(worker):
        for layer in worker.stages[0].layers:
            layer.module.drop.register_forward_hook(lambda module, args, y: masks.append((y == 0).tolist()))

    run_threads(drop, 1, setup=setup)
    assert len(masks) == 8 and all(a != b for a, b in zip(masks[:4], masks[4:], strict=True))


@pytest.mark.long
def test_sequences_of_another_length_are_refused_with_both():
    """Slices would take the first tokens and silently ignore the others."""
    plan = plan_of("1f1b", 1, 2, 3, model=user("mixers"), size=1, data={"kind": HERE + "Uneven"})
    with refused("E505", match="inputs have 20 tokens, the slices of the plan are cut from 16"):
        run_threads(plan, 8)


def test_doctor_compares_slices_with_the_whole_model_and_draws_alike():
    found = check_up(plan_of("zb-h1", 2, 3, 3, model=user("mixers"), **SEQUENCES))
    assert found.fine and found.stages == ("B and W apart, in 3 slices",) * 2
    random = check_up(plan_of("zb-h1", 2, 3, 3, model=user("mixers", dropout=0.5), **SEQUENCES))
    assert random.fine and random.stages == ("B and W apart",) * 2, "slices would draw other numbers"


LONG = {"data": {"kind": HERE + "Sequences", "args": {"length": 48}}, "rows": (0, 20, 48)}
MIXING = [
    ("convolution", "layers.2 mixes tokens of different slices (they differ by", "from token 20 on)"),
    ("normed", "layers.2 mixes tokens of different slices", "from token 0 on)"),
    ("both_ways", "layers.2 mixes tokens of different slices", "from token 0 on)"),
    ("own_causal", "layers.2 mixes tokens of different slices", "from token 20 on)"),
    ("pooled", "layers.2 mixes tokens of different slices", "from token 0 on)"),
    ("state", "layers.2 mixes tokens of different slices", "from token 20 on)"),
    ("recurrent", "layers.2 mixes tokens of different slices", "from token 20 on)"),
    ("counts", "layers.2 changes seen in its forward, which runs once for every slice", ""),
    ("backwards", "layers.2 mixes tokens of different slices in its backward", ""),
]


def refusal(**options):
    with pytest.raises(ZbcError) as caught:
        run_threads(plan_of("1f1b", 1, 2, 2, **options), 1)
    return caught.value


@pytest.mark.parametrize(("what", "text", "where"), MIXING)
def test_a_layer_that_mixes_tokens_on_its_own_is_refused_by_name(what, text, where):
    error = refusal(model={**user("mixing", what=what), "seq_len": 48}, **LONG)
    assert error.code == "E512" and text in error.message and error.message.endswith(where)
    assert error.hint.endswith("or set schedule.slices = 1")


def test_a_layer_that_draws_random_numbers_is_not_compared():
    model = {**user("mixing", what="noisy"), "seq_len": 48}
    (worker,) = run_threads(plan_of("1f1b", 1, 2, 2, model=model, **LONG), 1)
    assert len(worker.results) == 1


@pytest.mark.parametrize("loss", ["without_zeros", "sum_over_tokens", "last_token"])
def test_a_loss_that_is_no_mean_over_tokens_is_refused(loss):
    padded = {"kind": HERE + "Padded", "args": {"ignored": 0}}
    what = ("tokens", {"data": padded}) if loss == "without_zeros" else ("mixers", SEQUENCES)
    error = refusal(model=user(what[0], loss=HERE + loss), **what[1])
    assert error.code == "E513" and error.message.startswith(f"model: {HERE}{loss} is no mean over tokens: ")


def test_samples_that_are_no_sequences_are_refused():
    error = refusal(model=user("mixers"), data={"kind": HERE + "OneNumber"})
    assert (error.code, error.hint) == ("E110", "set schedule.slices = 1")
    assert error.message.endswith(f"and targets of {HERE}OneNumber are float32 [] each")
