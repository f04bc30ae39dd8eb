"""Error feedback: compared with one process by hand, for any partition of the optimizer, and over a restart."""

import pytest
import torch

from tests.composed import planned, settings
from tests.jobs import job
from tests.refusals import refused
from tests.threads import losses_of, run_threads


def tables(*traits, **optimizer):
    found = settings("two versions", *traits)
    found["optimizer"] |= {"feedback": 1.0, **optimizer}
    found["parallel"]["pp"] = 2
    return found


def test_an_update_makes_good_what_the_last_one_was_off_by(tmp_path):
    """In plain gradient descent, step by step: u(t) is -0.1 times the gradient at W(t)."""
    plan = planned(tables(kind="sgd", lr=0.1, weight_decay=0.0))
    workers = run_threads(plan, 5)
    losses, weights = by_hand(plan, 5, share=1.0)
    assert losses_of(workers) == pytest.approx(losses, rel=1e-6)
    plain = by_hand(plan, 5, share=0.0)[0]
    assert losses_of(workers)[3:] != pytest.approx(plain[3:], rel=1e-6)
    found = {name: p for worker in workers for s in worker.stages.values() for name, p in s.parameters.items()}
    for name, p in found.items():
        torch.testing.assert_close(p.detach(), weights[name], rtol=1e-5, atol=1e-6)


def by_hand(plan, steps, share):
    from tests.runtime.small_plans import Batches, Phases, Settings, build_samples, model

    manifest, chosen = plan.manifest, Settings.of(plan.manifest)
    m, size, seed = manifest.microbatches, manifest.microbatch_size, chosen.train.seed
    samples = build_samples(chosen.data, chosen.model, seed)
    batches = Batches(samples, seed=seed, microbatches=m, size=size, phases=Phases.of(manifest))
    layers = [(layer.name, layer.build(seed)) for layer in model.layers(chosen.model, seed)]
    weights = {f"{name}.{local}": p for name, module in layers for local, p in module.named_parameters()}
    loss_of = model.loss(chosen.model.loss)
    newest = {name: p.detach().clone() for name, p in weights.items()}
    older, fed, losses = dict(newest), None, []
    for step in range(steps):
        for name, p in weights.items():
            p.data, p.grad = older[name].clone(), None
        total = 0.0
        for mb in range(m):
            x = batches.inputs(step, mb)
            for _, module in layers:
                x = module(x)
            loss = loss_of(x, batches.targets(step, mb)) / m
            loss.backward()
            total += loss.item()
        losses.append(total)
        moved = {name: -0.1 * p.grad for name, p in weights.items()}
        off = {name: moved[name] - fed[name] for name in moved} if fed is not None else None
        older = dict(newest)
        newest = {n: newest[n] + moved[n] + (share * off[n] if off else 0.0) for n in newest}
        fed = moved
    return losses, newest


def test_it_is_refused_where_gradients_are_not_a_step_late():
    with refused("E110", "feedback"):
        job(optimizer={"feedback": 0.5})
