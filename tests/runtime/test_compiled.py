"""`model.compile`: compiled layers have the gradients of plain autograd, B and W apart or not, or are refused.

Most tests use torch's backend "aot_eager": all of torch.compile's graphs, forwards and backwards, without the code that
is made of them, which takes long. Without that code the bits are those of the layers as they are.
"""

import shutil

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program, make_worker, parameters, plan_of
from tests.runtime.test_gradients import VECTORS, check_gradients, user, without_step
from tests.threads import each_layer, losses_of, run_threads
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.ir import Kind, Placement
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.slot import Slot
from zbc.training.evaluate import evaluate
from zbc.training.models import compiled
from zbc.training.probing.checkup import check_up

FAMILIES = {"gpt": {**GPT, "layers": 3, "hidden": 16}, "llama": {**LLAMA, "layers": 3, "hidden": 16}}
FAMILIES["window"] = {**FAMILIES["llama"], "variant": "qwen3", "window": 5}
FAMILIES["experts"] = {**FAMILIES["llama"], "experts": 4, "top_k": 2, "ffn_hidden": 8}

# Ranks as threads look for compiled code at the same time and may miss it; torch then compiles once more, and warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function:DeprecationWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def from_the_beginning():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def graphs_only(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", {"backend": "aot_eager"})


def zoo(kind, **how):
    return {"family": f"tests.runtime.zoo:{kind}", "layers": 4, "loss": "mse", **how}


def graphs():
    return counters["stats"]["unique_graphs"]


def compiled_layers(workers):
    return [layer.name for layer in each_layer(workers) if layer.compiled is not None]


def apart(plan: StoredPlan) -> bool:
    return any(op.kind is Kind.W for ops in plan.program.ranks for op in ops)


CASES = [
    ("gpt", "zb-h1", "float32", "keep", 0.0),
    ("experts", "zb-h1", "float32", "keep", 1e-6),
    ("gpt", "1f1b", "bfloat16", "recompute", 0.0),
    ("llama", "1f1b", "float32", "keep", 0.0),
    ("window", "zb-h1", "float32", "keep", 1e-6),
    ("llama", "zb-v", "bfloat16", "recompute", 1e-6),  # the three gradients of a norm's input add in another order
    ("experts", "1f1b", "bfloat16", "recompute", 1e-6),
]


@pytest.mark.long
@pytest.mark.parametrize(("family", "schedule", "dtype", "activations", "tolerance"), few(CASES, 2))
def test_families_get_the_gradients_of_one_process(family, schedule, dtype, activations, tolerance, monkeypatch):
    model, before, waiting = {**FAMILIES[family], "dtype": dtype, "compile": True}, graphs(), []
    monkeypatch.setattr(Slot, "run", lambda slot, *more, run=Slot.run: (waiting.append(len(slot)), run(slot, *more)))
    plan = make_plan(make_program(schedule, 2, 3), model=model, keep=without_step, activations=activations)
    workers = check_gradients(plan, tolerance=tolerance)
    assert 0 < graphs() - before < (12 if family == "experts" else 30), "one more for other numbers of rows"
    assert sorted(compiled_layers(workers)) == ["layers.0", "layers.1", "layers.2"]
    assert apart(plan) == schedule.startswith("zb") == bool(waiting)
    assert not waiting or max(waiting) >= 4  # each block has four linear layers


@pytest.mark.long
@pytest.mark.parametrize("kind", few(["custom", "overwrites", "dropped"], ("custom",)))
def test_layers_of_users_get_the_gradients_of_one_process(kind):
    model = zoo(kind, compile=True)
    plan = make_plan(make_program("zb-h1", 2, 3), model=model, **VECTORS, keep=without_step)
    workers = check_gradients(plan)
    assert len(compiled_layers(workers)) == (3 if kind == "overwrites" else 4)  # one is a linear layer by itself


@pytest.mark.long
def test_buffers_that_a_forward_changes_and_training_without_a_barrier():
    optimizer = {"lr": 1e-2, "clip_grad_norm": 1e-3, "sync": "post-validate"}
    program = make_program("zb-h1", 2, 3, sync="post-validate")
    models = (zoo("batchnorm", compile=compiles) for compiles in (True, False))
    plans = [make_plan(program, model=model, optimizer=optimizer, **VECTORS) for model in models]
    one, other = (run_threads(plan, 3) for plan in plans)
    assert any(result.redone for result in one[0].results)
    assert losses_of(one) == losses_of(other)
    for a, b in zip(each_layer(one), each_layer(other), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.module.buffers(), b.module.buffers(), strict=True))


@pytest.mark.long
def test_everything_is_compiled_before_training_starts_and_evaluation_runs_layers_as_they_are():
    ops = "F s0 m0, B s0 m0, F s0 m1, W s0 m0, BW s0 m1, VALIDATE, STEP s0"
    options = {"train": {"eval_every": 1, "eval_batches": 1}, "data": {"kind": "synthetic", "validation": 0.2}}
    one, model = Placement.linear(1), {**FAMILIES["gpt"], "compile": True}
    make_worker(plan_of([ops], one, 2, model=model))
    kept = dict(counters["frames"])
    losses = []
    for compiles in (True, False):
        model = {**FAMILIES["gpt"], "compile": compiles}
        worker = make_worker(
            plan_of([ops], Placement.linear(1), 2, model=model, activations={"0": "recompute"}, **options)
        )
        assert dict(counters["frames"]) == kept  # F and the second forward are one code: others would have other bits
        for step in range(2):
            run_step(worker, step)
        losses.append(evaluate(worker, 1).loss)
        assert dict(counters["frames"]) == kept
    assert losses[0] == losses[1]


def refusal(family, schedule="zb-h1"):
    plan = make_plan(make_program(schedule, 2, 3), model={**family, "compile": True}, **VECTORS)
    with pytest.raises(ZbcError) as caught:
        make_worker(plan)
    assert caught.value.hint and "model.compile = false" in caught.value.hint
    return caught.value.code, caught.value.message


@pytest.mark.long
def test_layers_that_torch_compiles_wrongly_or_for_each_value_anew_are_refused_by_name():
    code, text = refusal({"family": "tests.runtime.zoo:averages", "layers": 4, "loss": "mse"}, "1f1b")
    assert code == "E509" and "layer layers.0 compiled (backward in one) is not what it is uncompiled" in text
    assert refusal(user("value_dependent")) == (
        "E509",
        "model: layer layers.0 depends on its data: torch compiles it again for other numbers",
    )


class Deceives(nn.Linear):
    """With a wrong gradient if compiled."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (0.001 if torch.compiler.is_compiling() else 0.0) * (y - y.detach())


def deceivers():
    return [lambda: Deceives(8, 8)] * 4


@pytest.mark.long
def test_a_gradient_that_is_off_by_a_thousandth_is_found():
    code, text = refusal({"family": f"{__name__}:deceivers", "layers": 4, "loss": "mse"})
    assert code == "E509" and "the gradient of bias" in text and "its output" not in text


@pytest.mark.long
def test_the_doctor_holds_compiled_layers_against_plain_autograd():
    found = check_up(make_plan(make_program("zb-h1", 2, 3), model={**FAMILIES["gpt"], "compile": True}))
    assert found.fine and all(one.error == 0 for one in found.parameters)
    assert found.stages[0] == "B and W apart, compiled"


# ---- with the code that torch makes ----------------------------------------------------------------------------

REAL = {"backend": "inductor", "options": {"fallback_random": True}}


@pytest.mark.long
def test_without_a_compiler_the_error_comes_before_training(monkeypatch, tmp_path):
    from torch._inductor import config

    monkeypatch.setattr(compiled, "BACKEND", REAL)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert refusal(user("residual"))[0] == "E602"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_code_has_the_gradients_of_one_process_and_the_bits_of_itself_on_one_rank(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", REAL)
    torch._dynamo.reset()
    model = {**FAMILIES["gpt"], "compile": True}
    workers = check_gradients(make_plan(make_program("zb-h1", 2, 3), model=model, keep=without_step), tolerance=1e-5)
    ops = "F s0 m0, B s0 m0, W s0 m0, F s0 m1, F s0 m2, B s0 m1, B s0 m2, W s0 m1, W s0 m2, VALIDATE"
    (alone,) = run_threads(plan_of([ops], Placement.linear(1), 3, model=model), 1)
    found, expected = parameters(workers), parameters([alone])
    assert all(torch.equal(found[name].grad, p.grad) for name, p in expected.items())
    assert workers[0].results[0].loss == alone.results[0].loss
