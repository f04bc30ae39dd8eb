"""Kernels and groups are used before the first step, without a change of the training."""

import pytest
import torch

from tests.runtime.moving import moved
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program, make_worker
from tests.runtime.test_gradients import VECTORS, user
from tests.runtime.test_modules import zoo
from tests.threads import begun, each_layer, losses_of, norms_of, run_threads
from tests.tiers import few
from zbc.runtime.core.ending import leftovers
from zbc.runtime.features.offload import parcels
from zbc.runtime.features.offload.offload import Offloads
from zbc.runtime.transports.hub import Hub
from zbc.runtime.transports.transport import Signal
from zbc.training.warm import warm

HELD = {"data": {**VECTORS["data"], "validation": 0.3}}
CLIP = {"clip_grad_norm": 0.1}
CASES = {
    "B and W apart": {"schedule": "zb-h1", "model": LLAMA},
    "recompute": {"schedule": "zb-v", "activations": "recompute"},
    "no barrier": {"schedule": "zb-h1", "sync": "post-validate", "optimizer": CLIP},
    "replicas": {"schedule": "1f1b", "copies": 2, "tied": True},
    "ZeRO-1": {"schedule": "zb-h1", "copies": 2, "sharded": True, "sync": "post-validate"},
    "two pipes": {"schedule": "chimera", "optimizer": {"kind": "sgd", "momentum": 0.9}},
    "low precision": {"schedule": "1f1b", "model": {**GPT, "dtype": "bfloat16", "parameters": "bfloat16"}},
    "dropout": {"schedule": "zb-h1", "model": user("residual", dropout=0.3), **VECTORS},
    "buffers": {"schedule": "1f1b", "model": user("mixed", layers=4), **VECTORS},
    "attributes": {"schedule": "zb-h1", **zoo("carries_graph")},
    "attributes that wait for their backward": {"schedule": "1f1b", "p": 1, **zoo("reuses_output")},
    "frozen": {"schedule": "zb-h1", "model": user("frozen", which=(0, 3)), **VECTORS},
    "evaluated": {"schedule": "1f1b", "model": user("mixed", layers=4), **HELD, "train": {"eval_every": 1}},
    "to the host": {"schedule": "zb-h1", "moves": True},
    "to the host, recompute": {"schedule": "zb-v", "moves": True, "activations": "recompute"},
    "rows of unequal length": {
        "schedule": "zb-h1",
        "tokens": (4, 16, 9, 2),
        "data": {"kind": "synthetic", "validation": 0.01},
        "train": {"eval_every": 2, "eval_batches": 1},
    },
    "samples dealt": {"schedule": "1f1b", "tokens": (4, 16, 9, 2), "data": {"kind": "synthetic", "balance": "tokens"}},
    "one rank": {"schedule": "1f1b", "p": 1, "sync": "post-validate", "copies": 2},
}


def plan_for(case):
    how = dict(case)
    parts = ("model", "optimizer", "activations", "data", "train", "tokens")
    made, moves = {name: how.pop(name) for name in parts if name in how}, how.pop("moves", False)
    program = make_program(how.pop("schedule"), how.pop("p", 2), 4, **how)
    return make_plan(moved(program) if moves else program, **made)


def warm_up(worker):
    warm(worker)
    assert not leftovers(worker)
    assert all(p.grad is None for one in worker.optimizers.values() for p in one.parameters.values())


@pytest.mark.long("ZeRO-1", "replicas")
@pytest.mark.parametrize("case", few(CASES, ("no barrier", "ZeRO-1", "replicas", "buffers", "attributes", "two pipes")))
def test_a_training_that_was_warmed_up_has_the_same_bits(case):
    plan = plan_for(CASES[case])
    plain = run_threads(plan, 3)
    found = run_threads(plan, 3, step=begun(warm_up))
    assert losses_of(found) == losses_of(plain)
    assert norms_of(found) == norms_of(plain)
    for one, other in zip(found, plain, strict=True):
        if one.evaluation is not None:
            assert [r.loss for r in one.evaluation.results] == [r.loss for r in other.evaluation.results] != []
    for layer, its in zip(each_layer(found), each_layer(plain), strict=True):
        wanted = its.module.state_dict()
        for name, value in layer.module.state_dict().items():
            assert torch.equal(value, wanted[name]), name


@pytest.mark.long
@pytest.mark.parametrize("case", few(["replicas", "ZeRO-1", "no barrier"], ("ZeRO-1",)))
def test_every_way_of_every_group_is_used_at_its_real_size(case):
    """All requests of a step to the transport were made before, with tensors of the same size."""
    plan = plan_for(CASES[case])
    calls = {}

    def listen(worker):
        noted = calls[worker.rank] = []
        transport = worker.transport
        for name in ("send", "post", "start_sum", "start_scatter", "start_gather"):
            inner = getattr(transport, name)

            def call(*args, name=name, inner=inner):
                tensors = tuple((tuple(t.shape), t.dtype) for t in args if isinstance(t, torch.Tensor))
                noted.append((name, tensors, args[-1], isinstance(args[0], Signal)))
                return inner(*args)

            setattr(transport, name, call)

    before = {}

    def first(worker):
        warm(worker)
        before[worker.rank] = set(calls[worker.rank])
        calls[worker.rank].clear()

    run_threads(plan, 3, setup=listen, step=begun(first))
    for rank, noted in calls.items():
        assert noted and {call for call in noted if call[0].startswith("start") or call[3]} <= before[rank]
        ways, used = ({(name, *way) for name, _, *way in some} for some in (noted, before[rank]))
        assert ways <= used


@pytest.mark.long("keep")
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_no_slab_is_made_in_a_step(monkeypatch, activations):
    monkeypatch.setattr(parcels, "SMALL", 256)
    program = moved(make_program("zb-h1", 2, 4))
    made = {}

    def first(worker):
        warm(worker)
        copier, made[worker.rank] = worker.features.of(Offloads).pool.copier, []
        slab = copier.slab
        monkeypatch.setattr(copier, "slab", lambda size: made[worker.rank].append(size) or slab(size))

    workers = run_threads(make_plan(program, activations=activations), 2, step=begun(first))
    assert made == {0: [], 1: []} and all(worker.features.of(Offloads).pool._free for worker in workers)


def test_what_goes_wrong_says_that_kernels_ran_for_the_first_time():
    plan = make_plan(make_program("1f1b", 1, 2), model=user("residual"), **VECTORS)
    worker = make_worker(plan, hub=Hub(1))
    worker.stages[0].layers[1].module.up.weight = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(RuntimeError) as caught:
        warm(worker)
    assert "while rank 0 ran its kernels for the first time" in caught.value.__notes__
