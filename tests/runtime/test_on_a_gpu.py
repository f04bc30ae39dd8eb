"""Tests that need a GPU; without one all are skipped. Ranks are threads on its default stream.

Written without a GPU at hand: a first failure may be due to the test.
"""

import os
import time
from contextlib import contextmanager

import pytest
import torch

from tests.runtime.moving import moved
from tests.runtime.small_plans import GPT, make_plan, make_program
from tests.threads import begun, run_threads
from zbc.runtime.core.progress import Progress
from zbc.runtime.core.slot import accumulate_product
from zbc.runtime.cuda import LEAD, CudaClock
from zbc.runtime.features.offload import parcels
from zbc.training.checkpoint.saving import Arena, copy_beside
from zbc.training.warm import warm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
GPU = torch.device("cuda", 0)
CYCLES = 200_000_000  # of torch.cuda._sleep: some tenth of a second


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def waits(mode):
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_schedule_has_the_bits_of_one_rank(schedule, activations, dtype):
    model = {**GPT, "dtype": dtype}

    def train(kind, p):
        plan = make_plan(make_program(kind, p, 8), model=model, activations=activations)
        return [(r.loss, r.grad_norm) for r in run_threads(plan, 3, device=GPU)[0].results]

    assert train(schedule, 4) == train("1f1b", 1)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_activations_that_go_to_the_host_leave_every_bit(monkeypatch, schedule, activations):
    monkeypatch.setattr(parcels, "SMALL", 256)
    program = make_program(schedule, 2, 4)

    def train(program):
        plan = make_plan(program, activations=activations)
        return [(r.loss, r.grad_norm) for r in run_threads(plan, 3, device=GPU)[0].results]

    assert train(moved(program)) == train(program)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("sync", ["before-step", "post-validate"])
def test_warming_up_changes_no_bit(sync):
    plan = make_plan(make_program("zb-h1", 2, 4, sync=sync), optimizer={"sync": sync, "clip_grad_norm": 0.1})
    plain, found = (run_threads(plan, 3, device=GPU, **how)[0].results for how in ({}, {"step": begun(warm)}))
    assert [(r.loss, r.grad_norm) for r in found] == [(r.loss, r.grad_norm) for r in plain]


def test_the_host_stays_near_its_device_and_says_where_that_is():
    progress = Progress()
    clock = CudaClock(GPU, progress)
    for index in range(6):
        progress.index, progress.op = index, f"F s0 m{index}"
        start = clock.start()
        torch.cuda._sleep(CYCLES)
        clock.stop(start)
        seen = progress.seen(time.monotonic())
        assert index - seen.index < LEAD and not seen.waiting
    assert seen.index < 5  # each op sleeps for longer than it takes to launch the next one
    assert clock.read()() > 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_what_is_copied_aside_for_a_checkpoint_is_pinned_and_whole():
    arena, tensor = Arena(pinned=True), torch.randn(1000, device=GPU)
    place = arena.places({"a": tensor})["a"]
    assert place.is_pinned()
    expected = tensor.cpu()
    with waits("error"):
        torch.cuda._sleep(CYCLES)
        event = copy_beside(GPU, [(place, tensor)])
        event.wait()
        tensor.zero_()  # an update, after the copy
    event.synchronize()
    assert torch.equal(place, expected)
    arena.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_narrow_product_is_added_to_a_sum_in_float32(dtype):
    weight = torch.nn.Parameter(torch.zeros(64, 32, device=GPU, dtype=dtype))
    weight.grad_dtype = torch.float32
    expected = torch.zeros(64, 32, device=GPU)
    for _ in range(3):
        grad, rows = (torch.randn(128, width, device=GPU).to(dtype) for width in (64, 32))
        accumulate_product(weight, grad, rows)
        expected += grad.float().t() @ rows.float()
    assert weight.grad.dtype is torch.float32
    torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=1e-3)
