"""Activations that go to the host and back leave every bit of a training as it is, and leave the device in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.runtime import user_models
from tests.runtime.moving import Poisoning, moved
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program, make_worker
from tests.threads import run_threads
from tests.tiers import few
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.runtime import parcels
from zbc.runtime.execute import run_step
from zbc.runtime.parcels import Parcel, slabs

HERE = "tests.runtime.user_models"
VECTORS = {"kind": f"{HERE}:Vectors"}
BF16 = {**GPT, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch):
    """Models of tests are small."""
    monkeypatch.setattr(parcels, "SMALL", 256)


def train(program, *, copier=None, steps=3, **options):
    """Results and weights; `copier()` makes each rank's."""
    copiers = []

    def setup(worker):
        if copier is not None:
            worker.pool.copier = copier()
        if worker.phase_run.moves:
            copiers.append(worker.pool.copier)

    workers = run_threads(make_plan(program, **options), steps, setup=setup)
    results = [[(r.loss, r.grad_norm, r.redone) for r in worker.results] for worker in workers]
    weights = [p.detach().clone() for w in workers for s in w.stages.values() for p in s.parameters.values()]
    return results, weights, copiers


def same(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def late():
    return Poisoning(late=True)


def early():
    return Poisoning(late=False)


def hold(program, copier=late, **options):
    """Train with copies and without, and compare."""
    there = train(moved(program), copier=copier, **options)
    assert same(train(program, **options), there)
    if copier is not None:
        assert sum(one.released for one in there[2]) > 0


@pytest.mark.parametrize("schedule", few(sorted(SCHEDULES)))
def test_every_schedule_trains_to_the_same_bits(schedule):
    hold(make_program(schedule, 2, 4))


@pytest.mark.parametrize("copier", [late, early, None], ids=["late", "early", "thread"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("model", [GPT, BF16, LLAMA], ids=["fp32", "bf16", "llama"])
def test_fused_and_split_in_both_types(schedule, model, copier):
    hold(make_program(schedule, 2, 3), copier, model=model)


@pytest.mark.parametrize("model", [GPT, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_inputs_of_layers_that_run_again(schedule, model):
    hold(make_program(schedule, 2, 3), model=model, activations="recompute")


def test_two_pipes():
    hold(make_program("dualpipe", 2, 4))


def test_without_a_barrier_and_with_steps_that_do_not_stand():
    hold(make_program("zb-h1", 2, 6, sync="post-validate"), optimizer={"lr": 1e-2, "clip_grad_norm": 0.5})


def test_evaluation_between_steps_has_no_parcels():
    hold(make_program("1f1b", 2, 3), train={"eval_every": 1}, data={"kind": "synthetic", "validation": 0.2})


@pytest.mark.parametrize("wait", ["release", "arrive"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_missing_wait_shows(monkeypatch, wait, activations):
    program = make_program("zb-h1", 2, 3)
    plain = train(program, activations=activations)
    true = getattr(Parcel, wait)

    def hasty(parcel, op):
        ticket, parcel._ticket = parcel._ticket, Over()
        found = true(parcel, op)
        parcel._ticket = ticket
        return found

    monkeypatch.setattr(Parcel, wait, hasty)
    assert not same(plain, train(moved(program), copier=late, activations=activations))


class Over:
    def result(self):
        pass

    def done(self):
        return True


def ops(text):
    return [Op.parse(one) for one in text.split(", ")]


def test_slabs_are_counted_from_the_ops():
    text = "F s0 m0, OFFLOAD s0 m0, F s0 m1, OFFLOAD s0 m1, RELEASE s0 m0, RELOAD s0 m0, BW s0 m0, BW s0 m1"
    assert slabs(ops(text)) == {0: 2}
    assert slabs(ops("F s0 m0, BW s0 m0")) == {}


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
    "F s0 m0, OFFLOAD s0 m0, RELEASE s0 m0": "what F s0 m0 left went to the host and was never fetched back",
}


@pytest.mark.parametrize("text", WRONG)
def test_ops_out_of_turn_are_named(text):
    with pytest.raises(ZbcError, match=WRONG[text]) as caught:
        run_step(alone(text), 0)
    assert caught.value.code == "E703"


def test_a_pool_that_was_counted_too_small_is_an_error():
    worker = alone("F s0 m0, OFFLOAD s0 m0, RELEASE s0 m0, RELOAD s0 m0, BW s0 m0")
    worker.pool._left[0] = 0
    with pytest.raises(ZbcError, match="no slab of host memory is left for stage 0"):
        run_step(worker, 0)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_nothing_that_moves_is_left_on_the_device(schedule):
    """But the small ones: each storage of a parcel dies at RELEASE, the stage's input too."""
    worker = alone("F s0 m0, OFFLOAD s0 m0, RELEASE s0 m0, RELOAD s0 m0, BW s0 m0")
    copier = worker.pool.copier = early()
    run_step(worker, 0)
    assert copier.released > 0 and copier.copied == 2 * copier.released


def test_compiled_layers_and_slices_are_refused():
    for options, code in (({"model": {**GPT, "compile": True}}, "E515"),):
        with pytest.raises(ZbcError) as caught:
            alone("F s0 m0, OFFLOAD s0 m0, RELEASE s0 m0, RELOAD s0 m0, BW s0 m0", **options)
        assert caught.value.code == code


assert user_models and VECTORS
