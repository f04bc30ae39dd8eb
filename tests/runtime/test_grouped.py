"""Products of the experts of a layer as one kernel: the bits of a loop over matrices, and few launches."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zbc.job.spec import Model
from zbc.runtime.core import grouped
from zbc.runtime.core.grouped import Groups
from zbc.runtime.core.slot import Slot, using
from zbc.runtime.core.split import split_backward
from zbc.training.models.experts import Experts


def made(dtype=torch.float32, *, gated=True, fused=False, hidden=16, width=24, count=6, top_k=2):
    torch.manual_seed(1)
    sizes = {"hidden": hidden, "ffn_hidden": width, "experts": count, "top_k": top_k}
    layer = Experts(Model(family="llama" if gated else "gpt", layers=1, **sizes), nn.SiLU()).to(dtype)
    split_backward(layer, fused=fused)
    return layer


def ran(layer, x, *, split, times=2):
    """Output, gradient of the input and of each parameter, after some microbatches."""
    given, outputs = x.clone().requires_grad_(True), []
    for _ in range(times):
        slot = Slot()
        with using(slot):
            y = layer(given)
        slot.split = split
        (y * y).sum().backward()
        slot.run()
        outputs.append(y.detach())
    return [*outputs, given.grad, *(p.grad for p in layer.parameters())]


def one_by_one(monkeypatch):
    monkeypatch.setattr(grouped, "_together", lambda rows, *sizes: False)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("fused", [False, True])
def test_a_grouped_product_has_the_bits_of_a_loop(monkeypatch, dtype, gated, fused, split):
    x = torch.randn(3, 7, 16, dtype=dtype)
    assert grouped._together(x, 16, 24)
    found = ran(made(dtype, gated=gated, fused=fused), x, split=split)
    one_by_one(monkeypatch)
    wanted = ran(made(dtype, gated=gated, fused=fused), x, split=split)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@examples(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    outputs=st.sampled_from([4, 5, 8, 12]),
    inputs=st.sampled_from([3, 4, 8]),
    stack=st.sampled_from([1, 40, 100, grouped.AT_ONCE]),
    before=st.booleans(),
    fused=st.booleans(),
)
def test_weight_gradients_are_those_of_each_matrix(counts, outputs, inputs, stack, before, fused):
    """Some matrices at a time, with or without gradients before, with odd sizes, and experts without rows."""
    torch.manual_seed(sum(counts) + outputs)
    weight = nn.Parameter(torch.randn(len(counts), outputs, inputs))
    grad, rows = torch.randn(sum(counts), outputs), torch.randn(sum(counts), inputs)
    parts = zip(grad.split(counts), rows.split(counts), strict=True)
    wanted = torch.stack([g.t() @ r for g, r in parts])
    if before:
        weight.grad = torch.ones_like(weight)
        wanted += 1.0
    kept = grouped.AT_ONCE
    grouped.AT_ONCE = stack
    try:
        grouped.accumulate_weights(weight, grad, rows, Groups.of(torch.tensor(counts), counts), fused=fused)
    finally:
        grouped.AT_ONCE = kept
    torch.testing.assert_close(weight.grad, wanted)


def test_a_matrix_without_rows_gets_zeros_where_a_kernel_leaves_them_unwritten(monkeypatch):
    """As on some GPUs (pytorch issue 172439)."""
    plain = torch.nn.functional.grouped_mm

    def unwritten(a, b, *, offs):
        found = plain(a, b, offs=offs)
        if found.dim() == 3:
            found[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return found

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", unwritten)
    weight = nn.Parameter(torch.randn(3, 8, 8))
    groups = Groups.of(torch.tensor([2, 0, 3]), [2, 0, 3])
    grouped.accumulate_weights(weight, torch.randn(5, 8), torch.randn(5, 8), groups, fused=False)
    assert torch.equal(weight.grad[1], torch.zeros(8, 8)) and weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_the_kernel_refuses_is_multiplied_one_by_one(dtype):
    """float64, and rows whose bytes are no multiples of 16; the same formula."""
    layer = made(dtype, hidden=6 if dtype is torch.float32 else 8, width=10)
    x = torch.randn(2, 5, layer.router.in_features, dtype=dtype)
    assert not grouped._together(x, layer.router.in_features, 10)
    found = ran(layer, x, split=True, times=1)
    plain = Experts.forward(layer, x)  # outside a step: by torch's own autograd
    torch.testing.assert_close(found[0], plain)


class Counting(TorchDispatchMode):
    """Counts the operations that launch a kernel: all but views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returned = function(*args, **(kwargs or {}))
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns)
        self.count += not views and "empty" not in str(function)
        return returned


def test_launches_do_not_grow_with_the_number_of_experts():
    """A block of 128 experts launches fewer than 60 kernels in F, and as many as one of 8."""
    counts = []
    for count in (8, 128):
        layer, counting = made(hidden=8, width=8, count=count, top_k=4), Counting()
        with counting, using(Slot()):
            layer(torch.randn(2, 16, 8))
        counts.append(counting.count)
    assert counts[0] == counts[1] < 60
