"""Ops of a group in turn: the numbers of one after the other, sums in one order on all ranks, nobody left hanging."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from tests.listing import listing
from tests.lowered import lower
from tests.runtime.small_plans import make_plan
from tests.runtime.test_gradients import VECTORS
from tests.runtime.test_tensor_parallel import WIDE, numbers, plan_of
from tests.threads import run_threads
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.ir import Kind, groups
from zbc.runtime import tensor_parallel
from zbc.runtime.execute import run_step
from zbc.runtime.turns import Meter, Pair, Side, offer, settle
from zbc.training.recording.measure import Scale

SIX = {"layers": 6}
WAYS = {
    "braid-v": ("braid-v", {"m": 6}),
    "braid-v of few": ("braid-v", {"m": 3}),
    "dualpipe-v": ("dualpipe-v", {"m": 4, "schedule": {"overlap": True}}),
    "llama": ("braid-v", {"m": 6, "model": "llama"}),
    "heads with norms": ("braid-v", {"m": 6, "model": "qwen3"}),
    "recompute": ("braid-v", {"m": 6, "memory": {"activations": "recompute"}}),
    "a shared sequence": ("braid-v", {"m": 6, "more": {"tp_sequence": True}}),
    "bfloat16": ("braid-v", {"m": 6, "model_more": {"dtype": "bfloat16"}}),
    "replicas": ("braid-v", {"m": 6, "dp": 2}),
    "shared weights": ("braid-v", {"m": 6, "dp": 2, "more": {"shard": "weights"}}),
    "without a barrier": ("braid-v", {"m": 6, "optimizer": {"sync": "post-validate"}}),
    "copies to the host": ("braid-v", {"m": 6, "memory": {"activations": "offload"}, "costs": {"offload": 0.1}}),
}


def plan(folder, kind, **options):
    """A plan with groups."""
    options["model_more"] = {**SIX, **options.get("model_more", {})}
    return plan_of(folder, kind, pp=2, tp=2, **options)


def weights(workers):
    """All that are there between two steps."""
    found = [p.detach() for worker in workers for stage in worker.stages.values() for p in stage.parameters.values()]
    return [p.clone() for p in found if p.untyped_storage().nbytes()]


def apart(worker):
    worker.braids = False


@pytest.mark.parametrize("name", few(WAYS, ("braid-v", "dualpipe-v", "bfloat16")))
def test_numbers_are_those_of_one_after_the_other(name, tmp_path):
    kind, options = WAYS[name]
    made = plan(tmp_path, kind, **options)
    assert any(groups(ops) for ops in made.program.ranks)
    together, one_by_one = run_threads(made, 3), run_threads(made, 3, setup=apart)
    assert numbers(together) == numbers(one_by_one)
    assert all(map(torch.equal, weights(together), weights(one_by_one)))
    assert all(worker.side is not None for worker in together if groups(worker.plan.ops))
    assert all(worker.side is None for worker in one_by_one)


EVERY = """
    rank 0: F s0 m0, OVERLAP, F s0 m1, F s0 m2, B s0 m0, OVERLAP, F s0 m3, W s0 m0, B s0 m1, OVERLAP, W s0 m1, F s0 m4,
        OVERLAP, F s0 m5, BW s0 m2, OVERLAP, B s0 m3, F s0 m6, W s0 m3, BW s0 m4, BW s0 m5, BW s0 m6
"""


def test_every_pair_of_ops_in_layers_of_a_user(tmp_path):
    found = make_plan(replace(lower(listing(EVERY)), tp=2), model=WIDE, **VECTORS)
    together, one_by_one = run_threads(found, 3), run_threads(found, 3, setup=apart)
    assert numbers(together) == numbers(one_by_one)
    assert all(map(torch.equal, weights(together), weights(one_by_one)))


def test_layers_that_draw_numbers_run_one_after_the_other(tmp_path):
    def draw(worker):
        for stage in worker.stages.values():
            stage.draws = True

    workers = run_threads(plan(tmp_path, "braid-v", m=6), 1, setup=draw)
    assert all(worker.side is None for worker in workers)


def test_a_step_that_is_weighed_runs_one_after_the_other(tmp_path):
    """What looks at tensors sees those of one thread."""
    made = plan(tmp_path, "braid-v", m=6)

    def weighed(worker):
        def step(worker, number, *, stop=False):
            with Scale(worker) as scale:
                result = run_step(worker, number, stop=stop)
            assert len(scale.readings) > 0
            return result

        return step

    assert all(worker.side is None and worker.braids for worker in run_threads(made, 1, step=weighed))


@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
def test_an_op_that_fails_is_named_and_leaves_no_thread_waiting(which, tmp_path):
    made = plan(tmp_path, "braid-v", m=6)
    ops = made.program.ranks[0]
    mark = next(at for at, op in enumerate(ops) if op.kind is Kind.OVERLAP and ops[at + 1].kind is Kind.F)
    failing, workers = ops[mark + 1 + which], []

    def broken(worker):
        workers.append(worker)
        if worker.rank:
            return
        route = worker.routes[failing]
        layer, plain = route.stage.layers[-1].module, route.stage.layers[-1].module.forward
        turn = failing.mb if failing.kind is Kind.F else None

        def forward(x, *args):
            if turn is not None and worker.progress.op.count(str(failing)) and worker.step == 0:
                raise RuntimeError("planted")
            y = plain(x, *args)
            if turn is None:
                y.register_hook(lambda grad: fail(worker))
            return y

        def fail(worker):
            if str(failing) in worker.progress.op:
                raise RuntimeError("planted")

        layer.forward = forward

    with pytest.raises(RuntimeError, match="planted") as caught:
        run_threads(made, 1, setup=broken)
    assert str(failing) in " ".join(caught.value.__notes__)


def test_a_sum_goes_on_while_the_other_op_runs():
    """Two ops of three units of 20 ms with sums of 15 ms: the sums are over when the turn comes back."""
    meter, side, order = Meter(), Side(torch.device("cpu")), []

    class Sum:
        def __init__(self):
            self.end = time.perf_counter() + 0.015

        def ready(self):
            return time.perf_counter() >= self.end

        def wait(self):
            time.sleep(max(0.0, self.end - time.perf_counter()))

    def op(name):
        for unit in range(3):
            time.sleep(0.02)
            order.append(f"{name}{unit}")
            settle(Sum(), meter)

    pair = Pair(lambda: op("b"))
    side.take(pair)
    pair.run_first(lambda: op("a"))
    pair.finish()
    side.close()
    assert [name for name in order if name[0] == "a"] == ["a0", "a1", "a2"]
    assert order == ["b0", "a0", "b1", "a1", "b2", "a2"], "the second begins, here without an input to wait for"
    assert meter.all == 6 and meter.all_s < 0.03, "of 90 ms"


def test_a_piece_of_w_is_followed_by_the_other_op_as_soon_as_its_sum_is_over():
    order, side = [], Side(torch.device("cpu"))

    class Sum:
        def __init__(self):
            self.asked = 0

        def ready(self):
            self.asked += 1
            return self.asked == 2

        def wait(self):
            order.append("waits")

    def forward():
        settle(Sum(), Meter())
        order.append("F goes on")

    def weights_of():
        for piece in range(4):
            order.append(f"W{piece}")
            offer()

    pair = Pair(weights_of)
    side.take(pair)
    pair.run_first(forward)
    pair.finish()
    assert order == ["W0", "W1", "W2", "waits", "F goes on", "W3"], "asked behind W1 and W2"
    side.close()


def test_what_is_hidden_is_measured_against_sums_that_were_waited_for_alone():
    meter = Meter(alone=2, alone_s=0.2, all=10, all_s=0.4)
    assert meter.hidden == pytest.approx(0.6)
    assert Meter().hidden is None


@pytest.mark.parametrize("bug", ["no wait", "another order"])
def test_planted_bugs_in_turns_are_caught(bug, tmp_path, monkeypatch):
    """A sum that nobody waits for changes numbers; one rank that starts its sums in another order stops the run."""
    made = plan(tmp_path, "braid-v", m=6)
    meant = numbers(run_threads(made, 2, setup=apart))
    if bug == "no wait":

        def start(self, tensor):
            copy = tensor.clone()
            return self.transport.start_sum(copy, self.ranks)

        monkeypatch.setattr(tensor_parallel.Group, "start", start)
        assert numbers(run_threads(made, 2)) != meant
    else:

        def turned(worker):
            worker.braids = worker.rank != 1

        with pytest.raises(ZbcError, match=r"shape|size|order|meet"):
            run_threads(made, 2, setup=turned)
