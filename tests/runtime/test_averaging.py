"""Replicas that average their weights: equal to replicas in one process, each with its own optimizer."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.check import operational
from tests.jobs import job, stored
from tests.refusals import refused
from tests.runtime.small_plans import make_worker
from tests.runtime.test_tensor_parallel import plan_of
from tests.threads import each_parameter, losses_of, run_threads, scaled
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.compile import compile_job
from zbc.runtime.core.execute import run_step

M, STEPS, READS = 4, 9, ("inputs", "targets", "weight")
ADAM = {"kind": "adamw", "lr": 1e-2}


def plan(folder, asked, *, kind="1f1b", pp=2, dp=2, **options):
    options.setdefault("optimizer", ADAM)
    options.setdefault("train", {"steps": STEPS})
    return plan_of(folder, kind, pp=pp, dp=dp, m=M, more={"average": asked, **options.pop("more", {})}, **options)


def alone(folder, dp, average, **options):
    """One process per replica, in turn; `average` changes the weights of all of them before each step."""

    def worker(m, name):
        return make_worker(plan_of(folder / name, pp=1, m=m, optimizer=ADAM, train={"steps": STEPS}, **options))

    def shifted(inner, first):
        """The microbatches of one replica, out of a step's microbatches of all."""
        of = {what: lambda step, mb, what=what: getattr(inner, what)(step, mb + first) for what in READS}
        return SimpleNamespace(count=inner.count, close=inner.close, **of)

    workers = []
    for replica in range(dp):
        workers.append(one := worker(M, f"one{replica}"))
        one.batches = shifted(worker(M * dp, f"all{replica}").batches, M * replica)
    for step in range(STEPS):
        average(step, [dict(one.stages[0].parameters) for one in workers])
        for one in workers:
            one.results.append(run_step(one, step))
    return workers


def formula(stages, *, every=1, share=1.0, delay=1, ema=0.0):
    """The formula of the page, on whole models: `stages` are lists of names."""
    parts, sent, last = math.ceil(1 / share), {}, {}

    def average(step, models):
        for stage, names in enumerate(stages):
            flats = [torch.cat([model[name].detach().reshape(-1) for name in names]) for model in models]
            if stage in sent:
                low, high, part, were = sent.pop(stage)
                mean = sum(were[1:], were[0]) / len(were)
                for replica, (flat, was) in enumerate(zip(flats, were, strict=True)):
                    got = (mean - was) * (1 - ema) + ema * last.get((stage, part, replica), torch.zeros(high - low))
                    last[stage, part, replica] = got
                    flat[low:high] += got
            if step % every == 0:
                part, size = step // every % parts, len(flats[0])
                low, high = size * part // parts, size * (part + 1) // parts
                were = [flat[low:high].clone() for flat in flats]
                if delay:
                    sent[stage] = low, high, part, were
                else:
                    for flat in flats:
                        flat[low:high] = sum(were[1:], were[0]) / len(were)
            for flat, model in zip(flats, models, strict=True):
                at = 0
                for name in names:
                    count = model[name].numel()
                    model[name].detach().copy_(flat[at : at + count].view(model[name].shape))
                    at += count

    return average


WAYS = {
    "at once": {"share": 1.0, "delay": 0},
    "a quarter at once": {"share": 0.25, "delay": 0},
    "a step later": {"share": 1.0, "ema": 0.0},
    "a rotating share": {"share": 0.3, "ema": 0.0},
    "smoothed": {"share": 0.5, "ema": 0.5},
    "every second step": {"share": 0.5, "every": 2, "ema": 0.25},
}


@pytest.mark.long
@pytest.mark.parametrize("name", few(WAYS, ("at once", "smoothed")))
@pytest.mark.parametrize("kind", few(["1f1b", "zb-h1", "zb-v"], ("1f1b",)))
def test_weights_are_those_of_replicas_in_one_process(name, kind, tmp_path):
    asked = WAYS[name]
    more = {"model_more": {"layers": 6}}
    pipelined = run_threads(plan(tmp_path / "p", asked, kind=kind, **more), STEPS)
    holders = [worker for worker in pipelined if worker.replica == 0]
    stages = [sorted(one.stages[s].parameters) for one in holders for s in sorted(one.stages)]
    single = alone(tmp_path, 2, formula(stages, **asked), **more)
    for worker, key, parameter in each_parameter(pipelined):
        assert torch.equal(parameter, single[worker.replica].stages[0].parameters[key]), key
    for worker in pipelined:
        assert [one.grad_norm for one in worker.results] == [one.grad_norm for one in single[worker.replica].results]
    losses = [sum(pair) / 2 for pair in zip(*([r.loss for r in one.results] for one in single), strict=True)]
    assert losses_of(pipelined) == pytest.approx(losses, rel=1e-12)


def test_one_replica_without_a_finite_gradient_skips_alone(tmp_path):
    def spoil(worker):
        if worker.replica == 1 and worker.plan.rank == 0:
            parameter = next(iter(worker.stages[0].parameters.values()))
            parameter.register_hook(lambda grad: grad * (float("inf") if worker.step == 1 else 1.0))

    workers = run_threads(plan(tmp_path, {"share": 0.5}), 3, setup=spoil)
    skipped = [[result.skipped for result in worker.results] for worker in workers]
    assert skipped[0] == skipped[1] == [False] * 3 and skipped[2] == skipped[3] == [False, True, False]


def test_tied_weights_are_averaged_too(tmp_path):
    """With a learning rate of 0 in the end all weights are their averages."""
    how = {"optimizer": {**ADAM, "schedule": {"kind": "linear", "decay_steps": 2}}, "model_more": {"ties": True}}
    found = {}
    for _, key, parameter in each_parameter(run_threads(plan(tmp_path, {"share": 1.0, "delay": 0}, **how), 4)):
        assert torch.equal(parameter, found.setdefault(key, parameter)), key


BROKEN = {
    "behind an op that uses the weights": (lambda ops: [ops[1], ops[0], *ops[2:]], "E206"),
    "missing on one rank": (lambda ops: ops[1:], "E202"),
    "twice": (lambda ops: [ops[0], *ops], "E202"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_averages_in_wrong_places_are_refused(name, tmp_path):
    change, code = BROKEN[name]
    program = plan(tmp_path, {"share": 0.1}).program
    broken = program.with_ranks([change(list(program.ranks[0])), *map(list, program.ranks[1:])], by="test")
    with refused(code):
        check_all(broken)
    assert not operational.run(broken).ok


@pytest.mark.repeats
def test_a_plan_knows_what_averages_hold_once_all_parts_have_come():
    """Parts are equal: four where shares are of 30%."""
    made = compile_job(job(kind="1f1b", pp=2, m=2, layers=2, parallel={"dp": 2, "average": {"share": 0.3}}))
    held = [scale.held for scale in scaled(stored(made), 6)[1]]
    for predicted, found in zip(made.memory, held[:2], strict=True):
        sent = found.activations - predicted.activations
        assert predicted.optimizer == pytest.approx(found.optimizer + sent, rel=0.01)
