"""Models whose stages are a graph train as in one process."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import zbc
from tests.jobs import job, stored
from tests.refusals import refused
from tests.runtime.graph_models import GRAPHS
from tests.runtime.small_plans import parameters
from tests.threads import losses_of, run_threads, scaled
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.ir import Kind
from zbc.plan.directory import StoredPlan
from zbc.runtime.seeding import seed_of, seeded
from zbc.training.building.context import Settings, layer_plans
from zbc.training.data.data import Batches, build_samples, build_validation

ROOT = Path(__file__).parents[2]
ALL = [(name, kind, kept) for name in GRAPHS for kind in ("1f1b", "zb-h1") for kept in ("keep", "recompute")]
ALL += [("three readers", kind, "keep") for kind in ("gpipe", "eager-1f1b", "zb-h2")]


def plan_of(name, kind="1f1b", *, family="layers", named=True, dropout=0.0, limit=None, data=None, **sections):
    """A plan; `named`: each group without sources has data of its own."""
    graph, counts, ranks = GRAPHS[name]
    args = {"of": [group for group, reads in graph.items() if not reads]} if named else {}
    model = {"family": f"tests.runtime.graph_models:{family}", "layers": sum(counts.values()), "loss": "mse"}
    model |= {"graph": graph, "groups": counts, "args": {"counts": counts, "dropout": dropout}}
    schedule = {"kind": kind, "microbatches": 4, "microbatch_size": 2, **({"memory_limit": limit} if limit else {})}
    sections |= {"data": {"kind": "tests.runtime.graph_models:Vectors", "args": args, **(data or {})}}
    return stored(compile_job(job(model=model, parallel={"pp": ranks}, schedule=schedule, **sections)))


def without_step(plan):
    ranks = tuple(tuple(op for op in ops if op.kind is not Kind.STEP) for ops in plan.program.ranks)
    return replace(plan, program=replace(plan.program, ranks=ranks))


def gradients(plan):
    """Mean loss and the gradients of a step by the ranks of a plan, as threads."""
    workers = run_threads(without_step(plan), 1)
    return workers[0].results[0].loss, {name: p.grad for name, p in parameters(workers).items()}


def forward(model, modules, read, *seeds):
    ends = {}
    for group, reads in model.reads.items():
        x = [ends[one] for one in reads] or [batch[group] if isinstance(batch := read(), dict) else batch]
        for i in range(model.groups[group]):
            with seeded(seed_of(*seeds, f"{group}.{i}")):
                x = [modules[f"{group}.{i}"](*x)]
        ends[group] = x[0]
    return x[0]


def by_autograd(plan):
    """The same by plain autograd in one process, group after group."""
    manifest, settings = plan.manifest, Settings.of(plan.manifest)
    seed, count = settings.train.seed, manifest.topology.batch
    modules = {one.name: one.build(seed) for one in layer_plans(settings)}
    samples = build_samples(settings.data, settings.model, seed)
    batches = Batches(samples, seed=seed, microbatches=count, size=manifest.microbatch_size)
    total = 0.0
    for mb in range(count):
        output = forward(settings.model, modules, partial(batches.inputs, 0, mb), seed, 0, mb)
        loss = torch.nn.functional.mse_loss(output, batches.targets(0, mb))
        loss.backward(loss.new_tensor(1.0 / count))
        total += loss.item()
    grads = {f"{name}.{local}": p.grad for name, one in modules.items() for local, p in one.named_parameters()}
    return total / count, grads


@pytest.mark.long("one and three-zb-h1-keep")
@pytest.mark.parametrize(
    ("name", "kind", "kept"), few(ALL, [one for one in ALL if one[0] in ("one and three", "skip")])
)
def test_loss_and_gradients_are_those_of_one_process_bit_by_bit(name, kind, kept):
    plan = plan_of(name, kind, memory={"activations": kept})
    loss, found = gradients(plan)
    alone, wanted = by_autograd(plan)
    assert loss == pytest.approx(alone, rel=1e-12)
    assert found.keys() == wanted.keys()
    # Of three gradients of one output autograd adds the first two that it comes to.
    three = name == "three readers"
    for key, grad in wanted.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-5 if three else 0, atol=1e-7 if three else 0, msg=key)


def test_one_input_may_go_to_all_groups_and_dropout_draws_alike():
    plan = plan_of("two branches", "zb-h1", named=False, dropout=0.5)
    loss, found = gradients(plan)
    alone, wanted = by_autograd(plan)
    assert loss == pytest.approx(alone, rel=1e-12)
    assert all(torch.equal(found[key], grad) for key, grad in wanted.items())


@pytest.mark.long
def test_a_memory_limit_holds_for_it():
    plan = plan_of("one and three", "zb-h1", limit="0.7x")
    assert losses_of(run_threads(plan, 2)) == losses_of(run_threads(plan_of("one and three", "zb-h1"), 2))
    with refused("E302", match="rank 0 holds 3.429 activation units", hint="0.8572x"):
        plan_of("skip", limit="0.6x")


def test_a_group_read_beside_others_that_ends_in_several_tensors_is_refused():
    with refused("E505", match=r"layer c.0 reads several groups, of which one ends in \{'one': float32 \[2, 8\]"):
        run_threads(plan_of("two branches", family="ends_in_two"), 1)


@pytest.mark.parametrize("name", ["two branches", "skip"])
def test_evaluation_is_that_of_one_process(name):
    """For weights that a step with a rate of 0 has left unchanged."""
    how = {"train": {"steps": 1, "eval_every": 1, "seed": 1}, "optimizer": {"kind": "sgd", "lr": 1e-30}}
    plan = plan_of(name, data={"validation": 0.25}, **how)
    workers = run_threads(plan, 1)
    (found,) = {worker.evaluation.results[0].loss for worker in workers}
    settings = Settings.of(plan.manifest)
    modules = {one.name: one.build(settings.train.seed) for one in layer_plans(settings)}
    kept = build_validation(settings.data, settings.model, settings.train.seed)
    every = range(len(kept))
    output = forward(settings.model, modules, partial(kept.inputs, every), 0)
    assert found == pytest.approx(torch.nn.functional.mse_loss(output, kept.targets(every)).item(), rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "steps", "least"),
    few([("towers", 60, 0.6), ("translator", 20, 2.7), ("skip", 20, 3.1), ("convnet", 20, 0.4)], 2),
)
def test_examples_learn(name, steps, least, tmp_path):
    zbc.plan(zbc.load(ROOT / f"plans/{name}.toml")).write(tmp_path)
    losses = [one.loss for one in run_threads(StoredPlan.read(tmp_path), steps)[-1].results]
    assert sum(losses[-5:]) / 5 < least < losses[0]


@pytest.mark.long
def test_a_rank_that_reads_one_of_several_inputs_can_be_weighed():
    """As in a trace of a step."""
    _, scales = scaled(plan_of("two branches", "zb-h1"))
    assert len(scales) == 6 and all(scale.readings for scale in scales)
