"""Losses of built-in heads: by chunks, with a z loss, with label smoothing; all equal to plain torch."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.jobs import job
from tests.refusals import error_of
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program
from tests.runtime.test_gradients import without_step
from tests.runtime.test_measure import LLAMA as SMALL
from tests.runtime.test_measure import both
from tests.runtime.test_shared_words import plan_of as shared_plan
from tests.runtime.test_slices import check_gradients
from tests.runtime.test_tensor_parallel import near, numbers
from tests.runtime.test_tensor_parallel import plan_of as parted_plan
from tests.threads import run_threads
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.memory.per_rank import peaks
from zbc.runtime.core.slot import Slot, using
from zbc.runtime.features.words.cross_entropy import Chunks, cross_entropy
from zbc.runtime.features.words.words import Terms

ALL = {"loss_chunk": 5, "z_loss": 0.02, "label_smoothing": 0.1}
WITHOUT = {key: value for key, value in ALL.items() if key != "loss_chunk"}
V, H, N = 37, 12, 23


def plainly(x, weight, targets, z, smoothing):
    logits = x @ weight.t()
    counted = logits[targets != -100].logsumexp(-1).square().mean()
    return functional.cross_entropy(logits, targets, label_smoothing=smoothing) + z * counted


@pytest.mark.parametrize(("z", "smoothing"), [(0.0, 0.0), (0.03, 0.0), (0.0, 0.2), (0.03, 0.2)])
@pytest.mark.parametrize("size", [1, 4, 23, 100])
def test_loss_and_both_gradients_by_chunks_are_those_of_plain_torch(size, z, smoothing):
    torch.manual_seed(size)
    x, targets = torch.randn(N, H, dtype=torch.float64, requires_grad=True), torch.randint(0, V, (N,))
    targets[::4] = -100
    layer = nn.Linear(H, V, bias=False, dtype=torch.float64)
    expected = plainly(x, layer.weight, targets, z, smoothing)
    wanted = torch.autograd.grad(expected * 3, (x, layer.weight))
    loss = cross_entropy(V, Terms(z, smoothing, smoothing / V), chunks=Chunks(layer, size))
    slot = Slot()
    slot.split = True
    with using(slot):
        found = loss(x, targets)
    (found * 3).backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close((x.grad, layer.weight.grad), wanted, rtol=1e-10, atol=1e-14)
    assert not len(slot), "W has nothing to do"


WAYS = [("1f1b", 1, {}), ("zb-h1", 4, {}), ("zb-v", 4, {}), ("zb-h1", 4, {"activations": "recompute"})]
WAYS += [("interleaved-1f1b", 2, {}), ("gpipe", 2, {}), ("chimera", 2, {}), ("zb-v", 2, {"slices": 2})]


@pytest.mark.parametrize("model", [{**GPT, **ALL}, {**LLAMA, **ALL}, {**GPT, **ALL, "ties": True}])
@pytest.mark.parametrize(("kind", "p", "how"), few(WAYS, WAYS[:3]))
def test_a_step_by_chunks_has_the_gradients_of_one_process(kind, p, how, model):
    slices, tied = how.get("slices", 1), bool(model.get("ties"))
    program = make_program(kind, p, 4, slices=slices, tied=tied)
    rest = {key: value for key, value in how.items() if key != "slices"}
    rest |= {"rows": (0, model["seq_len"] // 2, model["seq_len"])} if slices > 1 else {}
    check_gradients(make_plan(program, model=model, keep=without_step, **rest))


@pytest.mark.parametrize("model", [{**GPT, **WITHOUT}, {**GPT, "z_loss": 0.1}, {**LLAMA, **WITHOUT}])
@pytest.mark.parametrize(("kind", "p"), [("1f1b", 1), ("zb-h1", 4)])
def test_whole_logits_with_terms_have_the_gradients_of_one_process(kind, p, model):
    check_gradients(make_plan(make_program(kind, p, 3), model=model, keep=without_step))


@pytest.mark.parametrize("sums", [1, 2])
@pytest.mark.parametrize("model", [{**GPT, **WITHOUT}, {**LLAMA, **WITHOUT}])
def test_words_that_all_ranks_share_have_them_too(sums, model):
    check_gradients(shared_plan("zb-h1", 4, 3, sums, model=model, keep=without_step))


@pytest.mark.parametrize("more", [ALL, WITHOUT, {"loss_chunk": 3}])
@pytest.mark.parametrize(("kind", "pp", "tp", "model"), [("zb-h1", 2, 2, "gpt"), ("zb-v", 1, 2, "window")])
def test_ranks_that_share_layers_find_the_loss_of_one_process(kind, pp, tp, model, more, tmp_path):
    shared = run_threads(parted_plan(tmp_path / "tp", kind, pp=pp, tp=tp, model=model, model_more=more), 3)
    alone = run_threads(parted_plan(tmp_path / "one", pp=1, model=model, model_more=more), 3)
    assert numbers(shared) == near(alone)


SIZED = {
    "fp32": {"hidden": 48, "heads": 3, "seq_len": 96, "vocab": 2000},
    "bf16": {"hidden": 48, "heads": 3, "seq_len": 96, "vocab": 2000, "dtype": "bfloat16"},
    "llama": {**SMALL, "seq_len": 96, "vocab": 2000},
}


@pytest.mark.parametrize("terms", [{"loss_chunk": 16}, {"loss_chunk": 16, **WITHOUT}, WITHOUT], ids=str)
@pytest.mark.parametrize("case", SIZED)
@pytest.mark.parametrize(("kind", "activations"), few([("zb-h1", "keep"), ("1f1b", "recompute")], [("zb-h1", "keep")]))
def test_memory_of_the_head_is_predicted(tmp_path, kind, activations, case, terms):
    model = {**SIZED[case], **terms}
    for predicted, measured in both(tmp_path, kind=kind, m=5, memory={"activations": activations}, model=model):
        for name in ("weights", "gradients", "optimizer", "activations"):
            assert getattr(predicted, name) == pytest.approx(getattr(measured, name), rel=0.01), name
        assert predicted.bytes == pytest.approx(measured.peak, rel=0.02)


@pytest.mark.parametrize("case", few(SIZED, 1))
@pytest.mark.parametrize("kind", few(["zb-h1", "1f1b"], 1))
def test_memory_of_a_frozen_head_is_predicted(tmp_path, kind, case):
    model = {**SIZED[case], "loss_chunk": 16}
    *_, (predicted, measured) = both(tmp_path, kind=kind, m=5, model=model, adapter={"rank": 4})
    assert predicted.activations == pytest.approx(measured.activations, rel=0.01)
    assert predicted.bytes == pytest.approx(measured.peak, rel=0.01)


MIXTURE = {"family": "llama", "experts": 4, "top_k": 2, "ffn_hidden": 96, "hidden": 64, "heads": 4, "layers": 4}


@pytest.mark.parametrize("more", few([{}, {"dtype": "bfloat16"}, {"shared_hidden": 96}, {"top_k": 1}], 1))
@pytest.mark.parametrize(
    ("kind", "activations"), few([("zb-h1", "keep"), ("1f1b", "keep"), ("1f1b", "selective")], [("zb-h1", "keep")])
)
def test_memory_of_frozen_experts_is_predicted(tmp_path, kind, activations, more):
    model = {**MIXTURE, "seq_len": 64, "vocab": 32, **more}
    how = {"model": model, "adapter": {"rank": 4}, "memory": {"activations": activations}}
    ranks = both(tmp_path, kind=kind, m=5, **how)
    assert all(predicted.activations == pytest.approx(measured.activations, rel=0.01) for predicted, measured in ranks)
    predicted, measured = max(ranks, key=lambda pair: pair[1].peak)
    assert predicted.bytes == pytest.approx(measured.peak, rel=0.02 if activations == "keep" else 0.04)


def test_chunks_leave_the_last_rank_less_memory_and_one_product_more():
    sizes = {"hidden": 64, "seq_len": 256, "vocab": 4096}
    whole, chunked = (compile_job(job(kind="zb-h1", model={**sizes, **more})) for more in ({}, {"loss_chunk": 32}))
    before, after = (peaks(one.program, one.costs)[-1] for one in (whole, chunked))
    assert after.bytes < before.bytes - 4 * 256 * 4096 and before.activations > 2 * after.activations
    assert chunked.timeline.makespan > whole.timeline.makespan


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"loss_chunk": 8}, "parallel": {"vocabulary": "shared"}}, "model.loss_chunk"),
        ({"model": {"z_loss": 0.1, "loss": "mse"}}, "model.z_loss is for cross_entropy"),
        ({"model": {"label_smoothing": 1.0}}, "label_smoothing"),
    ],
)
def test_what_does_not_go_with_them_is_refused(changes, words):
    error = error_of(job, **changes)
    assert words in error.message and error.code in ("E103", "E110") and error.hint


def test_what_the_loss_of_a_frozen_head_holds_is_predicted(tmp_path):
    model = {"hidden": 48, "heads": 3, "seq_len": 64, "vocab": 900, "z_loss": 0.3, "label_smoothing": 0.2}
    predicted, measured = both(tmp_path, kind="zb-h1", pp=2, m=4, layers=2, model=model, adapter={"rank": 4})[-1]
    assert predicted.bytes == pytest.approx(measured.peak, rel=0.02)
