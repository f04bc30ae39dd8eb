"""Kernels that a dry run counts: operations by torch's rules, bytes by what is read and written."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.jobs import job
from zbc.job.flops import keys_seen
from zbc.runtime.features.slices.slicing import Limits, causal
from zbc.runtime.transports.transport import Offer
from zbc.training.profiling import dry
from zbc.training.profiling.kernels import Kernels

LLAMA = {"family": "llama", "layers": 2, "kv_heads": 2, "seq_len": 16}
MOE = {**LLAMA, "experts": 8, "top_k": 2, "ffn_hidden": 16}


def counted(run, *inputs, device="cpu"):
    """{class: [(operations, bytes, kernels)]} of a function of some inputs."""
    made = job(model=LLAMA, hardware={"device": device})
    with dry.fakes(made):
        kernels = Kernels(device, {})
        given = [torch.empty(shape, dtype=dtype) for shape, dtype in inputs]
        with kernels.under("it"):
            run(*given)
    found = {}
    for what, flops, moved, count in kernels.kernels("it"):
        found.setdefault(what, []).append((flops, moved, count))
    return found


F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64
X = ((8, 4), F32)
CASES = {
    "a product": (
        lambda a, b: a @ b,
        [((8, 4), F32), ((4, 6), F32)],
        {"product": [(2 * 8 * 4 * 6, 4 * (32 + 24 + 48), 1)]},
    ),
    "a narrow one": (lambda a, b: a @ b, [((8, 4), BF16), ((4, 6), BF16)], {"product": [(384, 2 * (32 + 24 + 48), 1)]}),
    "a product added to a wide sum, as on a GPU": (
        lambda total, a, b: torch.addmm(total, a, b, out_dtype=F32, out=total),
        [((8, 6), F32), ((8, 4), BF16), ((4, 6), BF16)],
        {"product": [(384, 2 * (32 + 24) + 4 * (48 + 48), 1)]},
    ),
    "a sum": (lambda a, b: a + b, [X, X], {"moved": [(0, 3 * 128, 1)]}),
    "in place": (lambda a, b: a.add_(b), [X, X], {"moved": [(0, 3 * 128, 1)]}),
    "a copy into": (lambda a, b: a.copy_(b), [X, X], {"moved": [(0, 2 * 128, 1)]}),
    "a fill": (lambda a: a.zero_(), [X], {"moved": [(0, 128, 1)]}),
    "a view": (lambda a: a.t().reshape(4, 8)[1:], [X], {}),
    "no numbers": (torch.empty_like, [X], {}),
    "a look-up": (
        lambda table, ids: functional.embedding(ids, table),
        [((1000, 4), F32), ((3,), I64)],
        {"moved": [(0, 2 * 3 * 4 * 4, 1)]},
    ),
    "equal ones": (lambda a, b: (a @ b, a @ b), [((8, 4), F32), ((4, 6), F32)], {"product": [(768, 832, 2)]}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_counts_what_it_multiplies_reads_and_writes(name):
    run, inputs, expected = CASES[name]
    assert counted(run, *inputs) == expected


def test_a_norm_reads_its_input_and_gradient_once_more_for_its_weights():
    def of(trained):
        def run(x, weight):
            functional.layer_norm(x.requires_grad_(), (4,), weight.requires_grad_(trained)).sum().backward()

        ((_, moved, starts),) = counted(run, X, ((4,), F32))["moved"]
        return moved, starts

    (all_moved, all_starts), (moved, starts) = of(True), of(False)
    assert (all_moved - moved, all_starts - starts) == (2 * 128 + 16, 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_causal_attention_leaves_out_whole_tiles(device):
    shape = ((2, 3, 1024, 8), F32)
    mix = functional.scaled_dot_product_attention
    (whole,) = counted(lambda q, k, v: mix(q, k, v), shape, shape, shape, device=device)["attention"]
    (causal,) = counted(lambda q, k, v: mix(q, k, v, is_causal=True), shape, shape, shape, device=device)["attention"]
    assert whole[0] == 4 * 2 * 3 * 1024 * 1024 * 8
    assert causal[0] == whole[0] * keys_seen(1024, {"cpu": 512, "cuda": 128}[device]) / 1024


def test_on_a_gpu_the_last_rows_attend_by_a_kernel_without_a_mask():
    rows, length = (((1, 2, count, 8), F32) for count in (512, 1024))
    moved = 4 * 2 * (2 * 512 * 8 + 2 * 1024 * 8 + 512)  # queries and outputs, keys and values, a number per row
    flops = 4 * 2 * 512 * (512 + keys_seen(512, 128)) * 8
    run = partial(causal, limits=Limits())
    assert counted(run, rows, length, length, device="cuda") == {"attention": [(flops, moved, 1)]}
    assert counted(run, rows, length, length)["attention"] == [(4 * 2 * 512 * 1024 * 8, moved + 4 * 512 * 1024, 1)]


def test_backward_of_attention_makes_five_products():
    def run(q, k, v):
        q.requires_grad_()
        functional.scaled_dot_product_attention(q, k, v).sum().backward()

    shape = ((1, 2, 64, 8), F32)
    assert [flops for flops, _, _ in sorted(counted(run, shape, shape, shape)["attention"])] == [
        products * 2 * 2 * 64 * 64 * 8 for products in (2, 5)
    ]


def test_a_grouped_product_has_the_operations_of_its_rows():
    def run(rows, weights):
        functional.grouped_mm(rows, weights, offs=torch.arange(1, 5, dtype=torch.int32))

    ((flops, moved, _),) = counted(run, ((12, 8), BF16), ((4, 8, 16), BF16))["product"]
    assert (flops, moved) == (2 * 12 * 8 * 16, 2 * (12 * 8 + 4 * 8 * 16 + 12 * 16))


def test_on_a_gpu_a_norm_is_one_kernel():
    norm = nn.RMSNorm(4)
    steps = counted(lambda x: functional.rms_norm(x, (4,), norm.weight), ((8, 4), F32))["moved"][0][2]
    assert steps > 1
    assert counted(lambda x: functional.rms_norm(x, (4,), norm.weight), ((8, 4), F32), device="cuda") == {
        "moved": [(0, 2 * 128, 1)]
    }


ROWS = 2 * 16 * 32 * 4  # bytes of the tokens of a microbatch


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "forward", "backward"),
    [
        ({"model": LLAMA, "parallel": {"tp": 2}}, [("tp", "sum", ROWS)] * 2, [("tp", "sum", ROWS)] * 2),
        (
            {"model": LLAMA, "parallel": {"tp": 2, "tp_sequence": True}},
            [("tp", "gather", ROWS), ("tp", "scatter", ROWS)] * 2,
            [("tp", "gather", ROWS), ("tp", "scatter", ROWS)] * 2,
        ),
        ({"model": LLAMA, "parallel": {"cp": 2}}, [("cp", "gather", ROWS)], [("cp", "scatter", ROWS)]),
        (
            {"model": MOE, "parallel": {"dp": 2, "ep": 2}},
            [("ep", "swap", 64), ("ep", "swap", 2 * ROWS), ("ep", "swap", 2 * ROWS)],
            [("ep", "swap", 2 * ROWS)] * 2,
        ),
    ],
)
def test_collectives_inside_of_ops_are_told_in_order(changes, forward, backward):
    found = dry.profile(job(**changes)).layers["block"].collectives
    assert (found["f"], found["b"]) == (forward, backward) and "w" not in found


def test_what_takes_the_place_of_other_ranks_is_no_kernel():
    with dry.fakes(job(model=LLAMA)):
        kernels, x = Kernels("cpu", {(0, 1): "tp"}), torch.empty(8)
        with kernels.under("it"):
            with kernels.joined(Offer("sum", x, x), (0, 1)):
                x.add_(1)
            x.mul_(2)
    assert kernels.kernels("it") == [("moved", 0, 64, 1)] and kernels.collectives["it"] == [("tp", "sum", 32)]
