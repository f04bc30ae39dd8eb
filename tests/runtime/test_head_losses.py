"""Losses of built-in heads: by chunks, with a z loss, with label smoothing; all equal to plain torch."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.jobs import job
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program, plain_loss
from tests.runtime.test_gradients import without_step
from tests.runtime.test_slices import check_gradients
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.memory.per_rank import peaks
from zbc.runtime.core.slot import Slot, using
from zbc.runtime.features.words.cross_entropy import Chunks, cross_entropy
from zbc.runtime.features.words.words import Terms

ALL = {"loss_chunk": 5, "z_loss": 0.02, "label_smoothing": 0.1}
WITHOUT = {key: value for key, value in ALL.items() if key != "loss_chunk"}
V, H, N = 37, 12, 23


@pytest.mark.parametrize(("z", "smoothing"), [(0.0, 0.0), (0.03, 0.0), (0.0, 0.2), (0.03, 0.2)])
@pytest.mark.parametrize("size", [1, 4, 23, 100])
def test_loss_and_both_gradients_by_chunks_are_those_of_plain_torch(size, z, smoothing):
    torch.manual_seed(size)
    x, targets = torch.randn(N, H, dtype=torch.float64, requires_grad=True), torch.randint(0, V, (N,))
    targets[::4] = -100
    layer = nn.Linear(H, V, bias=False, dtype=torch.float64)
    terms = SimpleNamespace(loss="cross_entropy", z_loss=z, label_smoothing=smoothing)
    expected = plain_loss(terms)(layer(x), targets)
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


@pytest.mark.parametrize("model", [{**GPT, **ALL}, {**LLAMA, **ALL}, {**GPT, **WITHOUT, "ties": True}])
@pytest.mark.parametrize(("kind", "p", "how"), few(WAYS, WAYS[:3]))
def test_a_step_by_chunks_has_the_gradients_of_one_process(kind, p, how, model):
    slices, tied = how.get("slices", 1), bool(model.get("ties"))
    program = make_program(kind, p, 4, slices=slices, tied=tied)
    rest = {key: value for key, value in how.items() if key != "slices"}
    rest |= {"rows": (0, model["seq_len"] // 2, model["seq_len"])} if slices > 1 else {}
    check_gradients(make_plan(program, model=model, keep=without_step, **rest))


@pytest.mark.long
def test_chunks_leave_the_last_rank_less_memory_and_one_product_more():
    sizes = {"hidden": 64, "seq_len": 256, "vocab": 4096}
    whole, chunked = (compile_job(job(kind="zb-h1", model={**sizes, **more})) for more in ({}, {"loss_chunk": 32}))
    before, after = (peaks(one.program, one.costs)[-1] for one in (whole, chunked))
    assert after.bytes < before.bytes - 4 * 256 * 4096 and before.activations > 2 * after.activations
    assert chunked.timeline.makespan > whole.timeline.makespan
