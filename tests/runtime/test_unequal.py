"""Replicas with unequal numbers of microbatches train as one process that sees each sample alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program
from tests.threads import run_threads
from tests.tiers import few
from zbc.compiler.check.orders import order_problems
from zbc.job import spec
from zbc.plan.balancing import Shape
from zbc.plan.directory import StoredPlan
from zbc.plan.manifest import RampPlan, Unequal
from zbc.runtime.optimizer import torch_optimizer
from zbc.training.data.documents import RandomDocuments
from zbc.training.data.unequal import Dealer
from zbc.training.models import model as models
from zbc.training.worker import Settings

STEPS = 3
SGD = {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "clip_grad_norm": 0.5}
DATA = {"kind": "synthetic", "balance": "length"}


def unequal(schedule="1f1b", p=2, copies=2, most=8, mean=4, *, rows=1, zero1=False, model=GPT, **how):
    """The plan of `mean` microbatches with those of all other numbers."""

    def one(m):
        program = make_program(schedule, p, m, copies=copies, sharded=zero1)
        return make_plan(program, model=model, data=DATA, optimizer={**SGD, "zero1": zero1}, size=rows, **how)

    plans = {m: one(m) for m in range(1, most + 1)}
    assert not [*order_problems([plan.program for plan in plans.values()])]
    main = plans.pop(mean)
    parts = [RampPlan(folder=f"m{m}", microbatches=m, steps=0, sha256="") for m in plans]
    balance = Unequal(room=model["seq_len"], most=most, quadratic=0.001)
    manifest = main.manifest.model_copy(update={"ramp": parts, "balance": balance})
    return StoredPlan(manifest, main.program, tuple(plans.values()))


def train_alone(plan, steps):
    """Losses, norms and weights of plain autograd in one process, a sample at a time."""
    settings = Settings.of(plan.manifest)
    documents = RandomDocuments(settings.model.vocab, settings.model.seq_len, settings.train.seed)
    manifest = plan.manifest
    shape = Shape(manifest.copies, manifest.balance.room, manifest.microbatch_size, manifest.balance.most)
    dealer = Dealer(documents, shape, manifest.microbatches, settings.train.seed, "")  # which samples a step has
    layers = {}
    for layer in models.layers(settings.model, settings.train.seed):
        layers[layer.name] = layer.build(settings.train.seed)
    parameters = {f"{name}.{local}": p for name, layer in layers.items() for local, p in layer.named_parameters()}
    optimizer = torch_optimizer(spec.Optimizer.model_validate(SGD), parameters.values())
    losses, norms = [], []
    for step in range(steps):
        work = dealer.step(step)
        total = 0.0
        for number in work.samples:
            x, y = documents.pair(number)
            h = x[None]
            for layer in layers.values():
                h = layer(h)
            loss = functional.cross_entropy(h[0], y, reduction="sum") / sum(work.lengths)
            loss.backward()
            total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), SGD["clip_grad_norm"])))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: p.detach() for name, p in parameters.items()}


def as_one_process(workers, plan, steps=STEPS):
    losses, norms, weights = train_alone(plan, steps)
    found = [(r.loss, r.grad_norm) for r in workers[0].results]
    assert all([(r.loss, r.grad_norm) for r in w.results] == found for w in workers)
    assert [loss for loss, _ in found] == pytest.approx(losses, abs=1e-6)
    assert [norm for _, norm in found] == pytest.approx(norms, rel=1e-5)
    for worker in workers:
        for stage in worker.stages.values():
            for name, p in stage.parameters.items():
                torch.testing.assert_close(p.detach(), weights[name], rtol=0, atol=1e-6, msg=name)


def dealt_as(counts):
    """Microbatches of one row each: so many for each replica, whatever samples cost."""

    def deal(lengths, shape):
        rows = [[] for _ in range(sum(counts))]
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            least = min(rows, key=lambda row: sum(lengths[k] for k in row))
            least.append(i)
        assert max(sum(lengths[k] for k in row) for row in rows) <= shape.room
        mbs = [(tuple(row),) if row else () for row in rows]
        return [mbs[: counts[0]], mbs[counts[0] :]]

    return deal


COUNTS = [(5, 3), (6, 2), (7, 1), (1, 3)]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    ("schedule", "zero1"),
    few([("1f1b", False), ("zb-h1", True), ("zb-v", False), ("breadth-first", True)], [("1f1b", True)]),
)
def test_replicas_with_unequal_counts_train_as_one_process(schedule, zero1, counts, monkeypatch):
    """Also replicas whose samples do not fill their microbatches."""
    monkeypatch.setattr("zbc.training.data.unequal.deal", dealt_as(counts))
    monkeypatch.setattr("zbc.training.data.unequal.samples_of_step", lambda lengths, shape, m: sum(counts) + 1)
    plan = unequal(schedule, zero1=zero1)
    runs = []
    workers = run_threads(plan, STEPS, setup=lambda worker: runs.append(worker))
    for worker in workers:
        assert worker.plan.manifest.microbatches == counts[worker.replica]
    as_one_process(workers, plan)


MODELS = {
    "learned positions": GPT,
    "rotary positions": {**GPT, "positions": "rotary"},
    "llama": LLAMA,
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_samples_of_a_row_do_not_see_each_other(name, rows):
    """Balanced as they come: every step other counts; one process runs each sample alone."""
    plan = unequal("1f1b", rows=rows, model=MODELS[name])
    workers = run_threads(plan, STEPS)
    as_one_process(workers, plan)
