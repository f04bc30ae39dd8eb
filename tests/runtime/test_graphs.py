"""Models whose stages are a graph train as in one process."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import zbc
from tests.jobs import job
from tests.refusals import refused
from tests.runtime.graph_models import GRAPHS
from tests.threads import losses_of, run_threads, scaled
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.ir import Kind
from zbc.plan.directory import StoredPlan
from zbc.runtime.core import route
from zbc.runtime.seeding import seed_of, seeded
from zbc.training.building.context import Settings, layer_plans
from zbc.training.data.data import Batches, build_samples, build_validation
from zbc.training.models import compiled

ROOT = Path(__file__).parents[2]
M, SIZE = 4, 2
ALL = [(name, kind, kept) for name in GRAPHS for kind in ("1f1b", "zb-h1") for kept in ("keep", "recompute")]
ALL += [("three readers", kind, "keep") for kind in ("gpipe", "eager-1f1b", "zb-h2")]


def plan_of(
    name,
    kind="1f1b",
    *,
    family="layers",
    named=True,
    dropout=0.0,
    dp=1,
    compiles=False,
    parallel=None,
    limit=None,
    batches=M,
    **sections,
):
    """A plan; `named`: each group without sources has data of its own."""
    graph, counts, ranks = GRAPHS[name]
    data = {"kind": "tests.runtime.graph_models:Vectors"}
    if named:
        data["args"] = {"of": [group for group, reads in graph.items() if not reads]}
    model = {"family": f"tests.runtime.graph_models:{family}", "layers": sum(counts.values()), "loss": "mse"}
    model |= {"graph": graph, "groups": counts, "args": {"counts": counts, "dropout": dropout}}
    model |= {"compile": compiles}
    schedule = {"kind": kind, "microbatches": batches, "microbatch_size": SIZE} | (
        {"memory_limit": limit} if limit else {}
    )
    changes = {"data": data, **sections}
    compiled = compile_job(
        job(model=model, parallel={"pp": ranks, "dp": dp, **(parallel or {})}, schedule=schedule, **changes)
    )
    return StoredPlan(compiled.assemble()[0], compiled.program)


def without_step(plan):
    ranks = tuple(tuple(op for op in ops if op.kind is not Kind.STEP) for ops in plan.program.ranks)
    return replace(plan, program=replace(plan.program, ranks=ranks))


def gradients(plan):
    """Mean loss and the gradients of a step by the ranks of a plan, as threads; all replicas agree."""
    workers = run_threads(without_step(plan), 1)
    found = {}
    for worker in workers:
        for optimizer in worker.optimizers.values():
            for name, parameter in optimizer.parameters.items():
                assert name not in found or torch.equal(found[name], parameter.grad)
                found[name] = parameter.grad
    return workers[0].results[0].loss, found


def forward(model, modules, read, *seeds):
    ends = {}
    for group, reads in model.reads.items():
        x = [ends[one] for one in reads] or [batch[group] if isinstance(batch := read(), dict) else batch]
        for i in range(model.groups[group]):
            with seeded(seed_of(*seeds, f"{group}.{i}")):
                x = [modules[f"{group}.{i}"](*x)]
        ends[group] = x[0]
    return x[0]


def by_autograd(plan, step=0, modules=None):
    """The same by plain autograd in one process, group after group."""
    manifest, settings = plan.manifest, Settings.of(plan.manifest)
    seed, count = settings.train.seed, manifest.topology.batch
    modules = modules or {one.name: one.build(seed) for one in layer_plans(settings)}
    samples = build_samples(settings.data, settings.model, seed)
    batches = Batches(samples, seed=seed, microbatches=count, size=manifest.microbatch_size)
    total = 0.0
    for mb in range(count):
        output = forward(settings.model, modules, partial(batches.inputs, step, mb), seed, step, mb)
        loss = torch.nn.functional.mse_loss(output, batches.targets(step, mb))
        loss.backward(loss.new_tensor(1.0 / count))
        total += loss.item()
    grads = {f"{name}.{local}": p.grad for name, one in modules.items() for local, p in one.named_parameters()}
    return total / count, grads, modules


@pytest.mark.parametrize(
    ("name", "kind", "kept"), few(ALL, [one for one in ALL if one[0] in ("one and three", "skip")])
)
def test_loss_and_gradients_are_those_of_one_process_bit_by_bit(name, kind, kept):
    plan = plan_of(name, kind, memory={"activations": kept})
    loss, found = gradients(plan)
    alone, wanted, _ = by_autograd(plan)
    assert loss == pytest.approx(alone, rel=1e-12)
    assert found.keys() == wanted.keys()
    # Of three gradients of one output autograd adds the first two that it comes to.
    three = name == "three readers"
    for key, grad in wanted.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-5 if three else 0, atol=1e-7 if three else 0, msg=key)


def test_one_input_may_go_to_all_groups_and_dropout_draws_alike():
    plan = plan_of("two branches", "zb-h1", named=False, dropout=0.5)
    loss, found = gradients(plan)
    alone, wanted, _ = by_autograd(plan)
    assert loss == pytest.approx(alone, rel=1e-12)
    assert all(torch.equal(found[key], grad) for key, grad in wanted.items())


def test_replicas_agree_and_sum():
    plan = plan_of("skip", "zb-h1", dp=2)
    _, found = gradients(plan)
    _, wanted, _ = by_autograd(plan)
    for key, grad in wanted.items():
        torch.testing.assert_close(found[key], grad)


@pytest.mark.parametrize("name", few(["three readers", "skip", "one and three"], 1))
def test_activations_that_move_change_no_bit(name, moved):
    costs = {"f": 1.0, "b": 1.0, "w": 1.0, "comm": 0.1, "offload": 0.3}
    plan = plan_of(name, "1f1b", memory={"activations": "offload"}, limit="0.7x", costs=costs, batches=8)
    _, found = gradients(plan)
    _, wanted = gradients(plan_of(name, "1f1b", costs=costs, batches=8))
    assert sum(moved) > 0 and all(torch.equal(found[key], grad) for key, grad in wanted.items())


@pytest.mark.parametrize(("name", "kind"), few([("skip", "zb-h1"), ("two branches", "1f1b")], 1))
def test_ranks_that_share_its_layers_have_the_loss_and_norm_of_one_process(name, kind):
    plan = plan_of(name, kind, family="cut", parallel={"tp": 2})
    workers = run_threads(plan, 1)
    loss, wanted, _ = by_autograd(plan)
    assert workers[0].results[0].loss == pytest.approx(loss, rel=1e-6)
    norm = sum(float(grad.double().square().sum()) for grad in wanted.values()) ** 0.5
    assert workers[0].results[0].grad_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("zero1", [False, True])
def test_training_goes_on_from_a_checkpoint_and_is_that_of_one_process(tmp_path, zero1):
    sections = {"checkpoint": {"every": 2}, "train": {"steps": 4, "seed": 3}}
    sections |= {"optimizer": {"kind": "adamw", "lr": 1e-2, "zero1": zero1}}
    plan = plan_of("one and three", "zb-h1", dp=1 + zero1, **sections)
    whole = losses_of(run_threads(plan, 4))
    first = run_threads(plan, 2, folder=tmp_path / "a")
    after = run_threads(plan, 4, resume=next((tmp_path / "a").glob("step*")))
    assert [one.loss for one in (*first[0].results, *after[0].results)] == whole
    settings, modules, alone = Settings.of(plan.manifest), None, []
    optimizer = None
    for step in range(4):
        loss, _, modules = by_autograd(plan, step, modules)
        alone.append(loss)
        weights = [p for one in modules.values() for p in one.parameters()]
        decay = settings.optimizer.weight_decay
        betas, eps = settings.optimizer.betas, settings.optimizer.eps
        optimizer = optimizer or torch.optim.AdamW(weights, lr=1e-2, weight_decay=decay, betas=betas, eps=eps)
        optimizer.step()
        optimizer.zero_grad()
    assert whole == pytest.approx(alone, rel=1e-5)


SHARDS = [("weights", {Kind.GATHER, Kind.FREE}), ("gradients", {Kind.GATHER}), ("all", {Kind.GATHER, Kind.FREE})]


@pytest.mark.parametrize("kind", few(["1f1b", "zb-h1"], 1))
@pytest.mark.parametrize(("shard", "kinds"), SHARDS)
def test_replicas_share_out_its_weights_and_gradients(shard, kinds, kind):
    how = {"optimizer": {"kind": "adamw", "lr": 1e-2}, "dp": 2, "kind": kind}
    plan = plan_of("skip", parallel={"shard": shard}, **how)
    assert kinds <= {op.kind for ops in plan.program.ranks for op in ops}
    assert losses_of(run_threads(plan, 3)) == losses_of(run_threads(plan_of("skip", **how), 3))


def test_its_layers_are_compiled(monkeypatch):
    plain, made = torch.compile, []
    monkeypatch.setattr(compiled, "BACKEND", {"backend": "aot_eager"})
    monkeypatch.setattr(torch, "compile", lambda *args, **how: made.append(args) or plain(*args, **how))
    loss, found = gradients(plan_of("skip", "zb-h1", compiles=True))
    assert made
    wanted, own = gradients(plan_of("skip", "zb-h1"))
    assert loss == wanted and all(torch.equal(found[name], grad) for name, grad in own.items())


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
    of = [group for group, reads in GRAPHS[name][0].items() if not reads]
    how = {"train": {"steps": 1, "eval_every": 1, "seed": 1}, "optimizer": {"kind": "sgd", "lr": 1e-30}}
    data = {"kind": "tests.runtime.graph_models:Vectors", "validation": 0.25, "args": {"count": 64, "of": of}}
    plan = plan_of(name, data=data, **how)
    workers = run_threads(plan, 1)
    (found,) = {worker.evaluation.results[0].loss for worker in workers}
    settings = Settings.of(plan.manifest)
    modules = {one.name: one.build(settings.train.seed) for one in layer_plans(settings)}
    kept = build_validation(settings.data, settings.model, settings.train.seed)
    every = range(len(kept))
    output = forward(settings.model, modules, partial(kept.inputs, every), 0)
    assert found == pytest.approx(torch.nn.functional.mse_loss(output, kept.targets(every)).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "steps", "least"), few([("towers", 60, 0.6), ("translator", 20, 2.7), ("skip", 20, 3.1)], 2)
)
def test_examples_learn(name, steps, least, tmp_path):
    zbc.plan(zbc.load(ROOT / f"plans/{name}.toml")).write(tmp_path)
    losses = [one.loss for one in run_threads(StoredPlan.read(tmp_path), steps)[-1].results]
    assert sum(losses[-5:]) / 5 < least < losses[0]


def test_a_gradient_that_is_not_added_shows(monkeypatch):
    """The planted bug: only the first of several gradients of an output counts."""

    plan = plan_of("skip")
    monkeypatch.setattr(route, "total", lambda found: found[0])
    _, found = gradients(plan)
    _, wanted, _ = by_autograd(plan)
    assert not torch.equal(found["a.0.linear.weight"], wanted["a.0.linear.weight"])
    assert torch.equal(found["c.0.linear.weight"], wanted["c.0.linear.weight"])


def test_a_rank_that_reads_one_of_several_inputs_can_be_weighed():
    """As in a trace of a step."""
    _, scales = scaled(plan_of("two branches", "zb-h1"))
    assert len(scales) == 6 and all(scale.readings for scale in scales)
