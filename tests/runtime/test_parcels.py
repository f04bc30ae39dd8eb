"""Offload changes no bit of a training, and activations leave the device in between."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.refusals import refused
from tests.runtime import user_models
from tests.runtime.moving import Poisoning, moved
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program, make_worker
from tests.threads import run_threads
from tests.tiers import few
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.runtime.core.execute import run_step
from zbc.runtime.features.offload import parcels
from zbc.runtime.features.offload.offload import Offloads
from zbc.runtime.features.offload.parcels import Parcel

HERE = "tests.runtime.user_models"
VECTORS = {"kind": f"{HERE}:Vectors"}
CLIPPED = {"lr": 1e-2, "clip_grad_norm": 0.5, "sync": "post-validate"}
BF16 = {**GPT, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch):
    monkeypatch.setattr(parcels, "SMALL", 256)


def train(program, *, copier=None, steps=3, **options):
    """Trains; returns results and weights. `copier()` makes each rank's copier."""
    copiers = []

    def setup(worker):
        if copier is not None:
            worker.features.of(Offloads).pool.copier = copier()
        if worker.features.of(Offloads).of(worker.phase_run):
            copiers.append(worker.features.of(Offloads).pool.copier)

    workers = run_threads(make_plan(program, **options), steps, setup=setup)
    results = [[(r.loss, r.grad_norm, r.redone) for r in worker.results] for worker in workers]
    weights = [p.detach().clone() for w in workers for s in w.stages.values() for p in s.parameters.values()]
    return results, weights, copiers


def same(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


late, early = partial(Poisoning, late=True), partial(Poisoning, late=False)


def hold(program, copier=late, **options):
    there = train(moved(program), copier=copier, **options)
    assert same(train(program, **options), there)
    if copier is not None:
        assert sum(one.released for one in there[2]) > 0


@pytest.mark.long("zb-v", "1f1b")
@pytest.mark.parametrize("schedule", few(sorted(SCHEDULES)))
def test_every_schedule_trains_to_the_same_bits(schedule):
    hold(make_program(schedule, 2, 4))


@pytest.mark.long("fp32-1f1b-late", "fp32-1f1b-early", "bf16-zb-h1-thread", "llama-zb-h1-early")
@pytest.mark.parametrize("copier", [late, early, None], ids=["late", "early", "thread"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("model", [GPT, BF16, LLAMA], ids=["fp32", "bf16", "llama"])
def test_fused_and_split_in_both_types(schedule, model, copier):
    hold(make_program(schedule, 2, 3), copier, model=model)


@pytest.mark.long("zb-v", "1f1b-fp32")
@pytest.mark.parametrize("model", [GPT, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_inputs_of_layers_that_run_again(schedule, model):
    hold(make_program(schedule, 2, 3), model=model, activations="recompute")


EVALUATED = {"train": {"eval_every": 1, "eval_batches": 1}, "data": {"kind": "synthetic", "validation": 0.2}}
BESIDE = {
    "evaluation between steps, without parcels": ({"schedule": "1f1b", "m": 3}, EVALUATED),
    "steps that do not stand": ({"schedule": "zb-h1", "m": 6, "sync": "post-validate"}, {"optimizer": CLIPPED}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_comes_between_and_again(name):
    how, options = BESIDE[name]
    hold(make_program(p=2, **how), **options)


ROUND = "F s0 m0, OFFLOAD s0 m0, RELEASE s0 m0, RELOAD s0 m0, BW s0 m0"


def ops(text):
    return [Op.parse(one) for one in text.split(", ")]


def alone(text, **options):
    """A worker of one stage, with these ops."""
    program = make_program("1f1b", 1, 1)
    closing = [op for op in program.ranks[0] if op.kind in (Kind.VALIDATE, Kind.STEP)]
    program = replace(program, ranks=((*ops(text), *closing),))
    return make_worker(make_plan(program, **options))


WRONG = {
    "F s0 m0, OFFLOAD s0 m0, BW s0 m0": "BW s0 m0: what F left is going, it must be coming",
    "F s0 m0, OFFLOAD s0 m0, RELOAD s0 m0, BW s0 m0": "RELOAD s0 m0: what F left is going, it must be away",
    "F s0 m0, OFFLOAD s0 m0, OFFLOAD s0 m0": "OFFLOAD s0 m0: what F left is going, it must be kept",
    "F s0 m0, RELEASE s0 m0, BW s0 m0": "RELEASE s0 m0: there is nothing that it could move",
    "F s0 m0, OFFLOAD s0 m0, RELEASE s0 m0, BW s0 m0": "BW s0 m0: its F has not run",
    "F s0 m0, OFFLOAD s0 m0, RELEASE s0 m0": r"away\[s0 m0\]",
}


@pytest.mark.parametrize("text", WRONG)
def test_ops_out_of_turn_are_named(text):
    with refused("E703", match=WRONG[text]):
        run_step(alone(text), 0)


def test_a_pool_that_was_counted_too_small_is_an_error():
    worker = alone(ROUND)
    worker.features.of(Offloads).pool._counts[0] = 0
    with pytest.raises(ZbcError, match="no slab of host memory is left for stage 0"):
        run_step(worker, 0)


def test_a_parcel_goes_with_its_graph(monkeypatch):
    """Immediately: in a reference cycle it would keep the gradient of the stage's input until garbage collection."""
    made, init = [], Parcel.__init__
    monkeypatch.setattr(Parcel, "__init__", lambda self, *args: (init(self, *args), made.append(weakref.ref(self)))[0])
    gc.disable()
    try:
        run_threads(make_plan(moved(make_program("zb-h1", 2, 3))), 1)
        assert len(made) == 6 and not any(ref() for ref in made)
    finally:
        gc.enable()


USERS = ["residual", "twice", "frozen", "several", "scales", "checkpointed", "masks"]


@pytest.mark.long("several")
@pytest.mark.parametrize("factory", USERS)
def test_layers_of_users(monkeypatch, factory):
    """Some return several tensors, some freeze weights, some split on their own."""
    monkeypatch.setattr(parcels, "SMALL", 16)
    layers = len(getattr(user_models, factory)())
    if layers < 2:
        pytest.skip("one layer is no pipeline")
    model = {"family": f"{HERE}:{factory}", "layers": layers, "loss": "mse"}
    hold(make_program("zb-h1", 2, 3), model=model, data=VECTORS)


class Overwrites(torch.nn.Module):
    def forward(self, x):
        y = torch.sin(x * 2)
        z = y * y
        y.add_(1.0)
        return z


def test_what_changes_after_it_was_saved_is_named():
    worker = alone(ROUND)
    stage = worker.stages[0]
    stage.layers = (stage.layers[0], replace(stage.layers[1], module=Overwrites()), *stage.layers[2:])
    with refused("E509", match=r"layer layers\.0: a tensor that its backward needs"):
        run_step(worker, 0)
