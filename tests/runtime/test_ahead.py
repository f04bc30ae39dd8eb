"""Training without a barrier is bitwise equal to training with one, after every step, for any verdicts."""

import math
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from tests.lowered import lower
from tests.runtime.small_plans import make_plan, make_worker
from tests.runtime.test_gradients import VECTORS, user
from tests.threads import each_layer, last_of, run_threads, side_by_side, watch
from tests.tiers import dealt, few
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules import Request, find
from zbc.ir import Kind, Op
from zbc.plan import dealing
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.ending import leftovers
from zbc.runtime.core.execute import finish, run_step
from zbc.runtime.core.state import Worker
from zbc.runtime.features.ahead import Ahead
from zbc.runtime.transports.hub import Hub
from zbc.runtime.transports.transport import Signal

MICROBATCHES, LAYERS = 5, 8
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"kind": "adamw", "lr": 0.003, "schedule": {"kind": "cosine", "warmup_steps": 4}},
    "adam": {"kind": "adam", "lr": 0.003, "weight_decay": 0.01},
    "sgd": {"kind": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 0.0},
}
LOW = {"dtype": "bfloat16", "parameters": "bfloat16"}
SYNCS = ("post-validate", "before-step")
LARGEST = 100.0  # far above the norms of this model


def verdicts(steps: int, first: str) -> list[str]:
    """Verdicts forced on steps: one in five clipped, one in seven not finite, the first step as given."""
    found = ["nan" if k % 7 == 3 else "clip" if k % 5 == 1 else "fine" for k in range(steps)]
    return [first, *found[1:]]


def plan_for(
    schedule: str, p: int, sync: str, optimizer: str, m: int = MICROBATCHES, copies: int = 1, **model: Any
) -> StoredPlan:
    found = find(schedule)
    order = replace(found.make(Request(p=p, m=m, v=found.default_chunks)), dp=copies)
    costs = Costs.uniform(order.placement).with_ms(hop=(0.8,))  # so that the verdict comes late in the warm-up
    program = lower(order, sync, costs)
    check_all(program)
    made = {**user("residual", layers=LAYERS, count=LAYERS, dropout=0.1), **model}
    options = {**KINDS[optimizer], "clip_grad_norm": LARGEST, "sync": sync}
    return make_plan(program, model=made, **VECTORS, optimizer=options, size=1)


@pytest.fixture(autouse=True)
def several_batches(monkeypatch):
    """Tentative steps copy the masters and state of a few parameters at a time."""
    monkeypatch.setattr(dealing, "BATCH", 600)


class Watched:
    """A run with spoiled gradients, and its weights and states after each step was final."""

    def __init__(self, plan: StoredPlan, what: list[str]) -> None:
        self.what = what
        self.after: list[dict[str, torch.Tensor]] = [{} for _ in what]
        self.workers = run_threads(plan, len(what), setup=self.watch)
        for worker in self.workers:
            if isinstance(worker.phase_run.ending, Ahead):
                self.remember(worker, len(what) - 1)
        self.results = self.workers[0].results

    def watch(self, worker: Worker) -> None:
        ahead = any(op.kind is Kind.COMMIT for _, op, _ in worker.script)
        last = worker.script[last_of(worker, Kind.COMMIT if ahead else Kind.STEP)][1]
        watch(worker, after=lambda worker, op: self.remember(worker, worker.step - ahead), of=lambda op: op == last)
        if 0 in worker.stages:
            first = worker.script[last_of(worker, Kind.W, Kind.BW, stage=0)][1]
            watch(worker, after=lambda worker, op: self.spoil(worker), of=lambda op: op == first)

    def spoil(self, worker: Worker) -> None:
        grad = next(p.grad for p in worker.stages[0].parameters.values() if p.grad is not None)
        if self.what[worker.step] == "nan":
            grad.view(-1)[0] = math.inf if worker.step % 2 else math.nan
        elif self.what[worker.step] == "clip":
            grad.view(-1)[0] += 3 * LARGEST

    def remember(self, worker: Worker, step: int) -> None:
        for optimizer in worker.optimizers.values() if step >= 0 else ():
            masters = getattr(optimizer, "masters", optimizer.parameters)
            for name, parameter in optimizer.parameters.items():
                kept = {name: parameter, f"{name} master": masters[name]}
                state = optimizer.optimizer.state.get(masters[name], {})
                kept |= {f"{name} {key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
                self.after[step] |= {key: value.detach().clone() for key, value in kept.items()}


@cache
def synchronous(optimizer: str, low: bool, steps: int, first: str, m: int = MICROBATCHES) -> Watched:
    """The run with a barrier, on one rank, as the reference for any schedule and partition."""
    plan = plan_for("1f1b", 1, "before-step", optimizer, m, **(LOW if low else {}))
    return Watched(plan, verdicts(steps, first))


def again(plan: StoredPlan) -> int:
    """The number of forwards that run again when a step is rejected."""
    return sum(op.kind is Kind.F for ops in plan.program.ranks for op in ops[: ops.index(Op(Kind.REDO, 0))])


def same(run: Watched, wanted: Watched) -> None:
    for step, (found, expected) in enumerate(zip(run.after, wanted.after, strict=True)):
        assert found.keys() == expected.keys()
        differ = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not differ, f"after step {step} ({run.what[step]}): {differ[:5]}"
    assert [r.step for r in run.results] == list(range(len(run.what)))
    for a, b in zip(run.results, wanted.results, strict=True):
        assert (a.loss, a.skipped) == (b.loss, b.skipped)
        assert a.grad_norm == b.grad_norm or (math.isnan(a.grad_norm) and math.isnan(b.grad_norm))
        assert a.redone is (a.skipped or a.grad_norm + 1e-6 > LARGEST)
        assert a.redone or run.what[a.step] == "fine"


@pytest.mark.always("1f1b-False-2")
@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "low", "p"),
    few(product(["1f1b", "zb-h1", "zb-v"], [False, True], [2, 4]), [("1f1b", False, 2), ("zb-v", True, 4)]),
)
def test_steps_with_clips_and_nans_have_the_bits_of_the_synchronous_run(schedule, low, p):
    steps, first = 16, "clip" if p == 2 else "nan"
    plan = plan_for(schedule, p, "post-validate", "adamw", **(LOW if low else {}))
    assert again(plan) > 0
    run = Watched(plan, verdicts(steps, first))
    same(run, synchronous("adamw", low, steps, first))
    assert run.what.count("clip") >= steps // 6 and run.what.count("nan") >= steps // 8


OTHERS = [
    ("gpipe", 3, "adam", False, 5),
    ("interleaved-1f1b", 2, "sgd", False, 4),
    ("zb-h2", 4, "sgd", True, 5),
    ("zb-v", 2, "adam", True, 5),
    ("1f1b", 1, "adamw", False, 5),
    ("1f1b", 4, "adamw", False, 1),
    ("zb-v", 2, "sgd", False, 1),
    ("eager-1f1b", 4, "adam", False, 5),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "p", "optimizer", "low", "m", "first"), few(dealt(OTHERS, ["clip", "nan"]), ("interleaved-1f1b",))
)
def test_steps_ahead_of_every_schedule_optimizer_and_size_are_those_with_a_barrier(
    schedule, p, optimizer, low, m, first
):
    run = Watched(plan_for(schedule, p, "post-validate", optimizer, m, **(LOW if low else {})), verdicts(12, first))
    same(run, synchronous(optimizer, low, 12, first, m))


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "p", "m"),
    few([("chimera", 4, 4), ("bitpipe", 2, 4), ("dualpipe", 4, 8), ("dualpipe-v", 2, 6)], ("dualpipe",)),
)
def test_steps_ahead_with_copies_of_stages_and_groups_are_those_with_a_barrier(schedule, p, m):
    """Compared with the same schedule with a barrier: sums over copies have another order than in one process."""
    ahead, sync = (Watched(plan_for(schedule, p, how, "adamw", m), verdicts(10, "clip")) for how in SYNCS)
    same(ahead, sync)


def test_statistics_that_forwards_keep_count_each_of_them_once():
    """A forward that runs again finds its buffers as they were."""
    model = {"family": "tests.runtime.zoo:grows", "args": {}, "layers": 4}
    plans = [plan_for("1f1b", 2, sync, "adamw", 4, **model) for sync in SYNCS]
    assert again(plans[0]) > 0
    runs = [run_threads(plan, 8, setup=lambda worker: setattr(worker, "clip", 0.5)) for plan in plans]
    assert any(result.redone for result in runs[0][0].results)
    found, wanted = ([one for layer in each_layer(run) for one in layer.module.buffers()] for run in runs)
    assert found and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_nothing_is_kept_of_a_step_when_it_is_over():
    for worker in run_threads(plan_for("zb-v", 2, "post-validate", "adamw"), 2):
        assert worker.phase_run.ending.pending is None and not leftovers(worker) and not worker.renamed
        assert all(p.grad is None for stage in worker.stages.values() for p in stage.parameters.values())


def test_a_rank_that_asks_to_stop_is_heard_by_all_one_step_later():
    plan = plan_for("1f1b", 3, "post-validate", "adamw")
    hub = Hub(3)
    workers = [make_worker(plan, rank, hub) for rank in range(3)]

    def train(rank: int) -> list[tuple[int, bool]]:
        results = [run_step(workers[rank], step, stop=rank == 1 and step >= 2) for step in range(6)]
        results.append(finish(workers[rank]))
        workers[rank].transport.close()
        return [(result.step, result.stop) for result in results if result is not None]

    assert side_by_side(3, train) == [[(k, k >= 1) for k in range(6)]] * 3


@pytest.mark.long
def test_signals_are_posted_for_right_before_they_are_waited_for():
    calls = {0: [], 1: []}

    def listen(worker):
        transport, noted = worker.transport, calls[worker.rank]
        post, wait = transport.post, transport.wait
        transport.post = lambda message, *how: noted.append(("post", message)) or post(message, *how)
        transport.wait = lambda message: noted.append(("wait", message)) or wait(message)

    run_threads(plan_for("zb-h1", 2, "post-validate", "adamw"), 3, setup=listen)
    for noted in calls.values():
        at = [i for i, (what, message) in enumerate(noted) if what == "post" and isinstance(message, Signal)]
        assert len(at) == 3 and all(noted[i + 1] == ("wait", noted[i][1]) for i in at)
