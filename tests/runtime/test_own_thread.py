"""Backward as on a GPU, where torch runs the graph in a thread of its own unless told not to."""

import threading

import pytest
import torch
from torch import nn

from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program
from tests.runtime.test_gradients import VECTORS, check_gradients, user, without_step
from tests.threads import side_by_side
from tests.tiers import few
from zbc.ir import Kind
from zbc.runtime.core import tape
from zbc.runtime.core.slot import Slot

REENTRANT = {"model": user("reentrant"), **VECTORS}


def elsewhere(engine, threads, *, always=False):
    """Runs the engine in a thread of its own whenever torch would for a GPU; `always`: also if told not to."""

    def run(*args, **options):
        if not (always or torch._C._is_multithreading_enabled()):
            threads.add(threading.get_ident())
            return engine(*args, **options)

        def walk(_):
            threads.add(threading.get_ident())
            engine(*args, **options)

        side_by_side(1, walk)

    return run


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    threads = set()
    monkeypatch.setattr(tape, "engine", elsewhere(tape.engine, threads))
    return threads


@pytest.fixture
def deferred(monkeypatch):
    """The number of deferred pieces of work in each W."""
    found, run = [], Slot.run

    def count(slot, between=None):
        found.append(len(slot))
        run(slot, between)

    monkeypatch.setattr(Slot, "run", count)
    return found


@pytest.mark.parametrize("schedule", few(["1f1b", "zb-h1", "zb-v"], ("zb-h1",)))
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_rank_walks_its_graphs_itself(as_on_a_gpu, schedule, activations, model):
    plan = make_plan(make_program(schedule, 2, 4), keep=without_step, activations=activations, model=model)
    check_gradients(plan)
    assert len(as_on_a_gpu) == 2


def test_a_layer_whose_backward_walks_a_graph_of_its_own_leaves_its_work_to_w(as_on_a_gpu, deferred):
    plan = make_plan(make_program("zb-h1", 2, 4), keep=without_step, **REENTRANT)
    check_gradients(plan)
    ws = sum(op.kind is Kind.W for ops in plan.program.ranks for op in ops)
    assert ws > 0 and deferred == [4] * ws  # two layers of two linear layers each


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_work_is_deferred_from_any_thread_by_layers_that_took_their_slot_along(monkeypatch, deferred, model):
    monkeypatch.setattr(tape, "engine", elsewhere(tape.engine, set(), always=True))
    check_gradients(make_plan(make_program("zb-h1", 2, 4), keep=without_step, model=model))
    assert deferred and min(deferred) > 0


@pytest.mark.parametrize("engine", [None, tape.engine], ids=["public", "direct"])
def test_gradients_are_those_of_torch_whichever_function_walks_the_graph(engine, monkeypatch):
    monkeypatch.setattr(tape, "engine", engine)
    torch.manual_seed(3)
    layer, x, grad = nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True), torch.randn(2, 3)
    expected = torch.autograd.grad(layer(x).tanh(), [x, *layer.parameters()], grad)
    for times in (1, 2):  # gradients add up over microbatches
        tape.RecordedGraph(layer(x).tanh()).backward(grad)
        found = [x.grad, *(p.grad for p in layer.parameters())]
        assert all(torch.equal(a, times * b) for a, b in zip(found, expected, strict=True))
