"""Layers that vary train as in one process: a trial does not predict later forwards."""

import random
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.small_plans import make_plan, make_program, reference
from tests.runtime.test_gradients import VECTORS, check_training, user
from tests.runtime.wavering import models
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.runtime import seeding
from zbc.runtime.core.execute import run_ops, run_step

WAYS = [("1f1b", 4, "keep"), ("zb-h1", 2, "recompute"), ("zb-v", 2, "keep"), ("interleaved-1f1b", 2, "recompute")]


def plan_of(kinds, schedule="1f1b", p=4, m=4, *, activations="keep", optimizer=None):
    model = {**user("", layers=len(kinds), kinds=kinds), "family": "tests.runtime.wavering:layers"}
    optimizer = optimizer or {"lr": 1e-2, "weight_decay": 0.1, "clip_grad_norm": 0.5}
    program = make_program(schedule, p, m)
    return make_plan(program, model=model, **VECTORS, activations=activations, optimizer=optimizer, size=2)


@pytest.mark.parametrize("examples", few([6, 150], (6,)))
def test_drawn_layers_train_as_in_one_process(examples):
    @settings(max_examples=examples, deadline=None)
    @given(models(8), st.sampled_from(WAYS))
    def check(kinds, way):
        schedule, p, activations = way
        check_training(plan_of(kinds, schedule, p, activations=activations), steps=2)

    check()


@pytest.mark.parametrize(("schedule", "p", "activations"), few(WAYS, 1))
def test_a_stage_whose_reader_is_left_out_keeps_training(schedule, p, activations):
    """With zeros for its gradient, weight decay would move it."""
    kinds = [("Plain", []), ("LeftOut", [0.5])] * 4
    check_training(plan_of(kinds, schedule, p, activations=activations))


@pytest.mark.parametrize("first", [("Expert", [0.5]), ("LeftOut", [0.9]), ("Masks", [0.5])])
def test_a_first_layer_that_a_trial_passes_by_trains(first):
    check_training(plan_of([first, ("Join" if first[0] == "Masks" else "Plain", []), ("Plain", []), ("Plain", [])]))


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_noise_that_begins_late_is_that_of_one_process(activations):
    check_training(plan_of([("Plain", []), ("Noisy", [2.5])] * 2, "zb-h1", 2, activations=activations))


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (
            [("Large", []), ("Masks", [10.0]), ("Join", []), ("Plain", [])],
            r"tensor 1 of layer layers.1 wants a gradient, which trials did not show",
        ),
        (
            [("Plain", []), ("OwnDraw", [0.5]), ("Plain", []), ("Plain", [])],
            r"layer layers.1 draws from numpy.random in its forward",
        ),
    ],
    ids=["a gradient", "a draw that nobody seeds"],
)
def test_what_no_trial_saw_is_refused_where_it_shows(kinds, text):
    with pytest.raises(ZbcError, match=text):
        run_threads(plan_of(kinds, p=2), 2)


def test_draws_of_others_stop_no_run():
    """For example of a logger: the layers are checked one by one, and none has drawn."""
    steps = []

    def drawing(worker, step, **how):
        steps.append(random.random())
        return run_step(worker, step, loop=lambda worker: (run_ops(worker), random.random())[0], **how)

    plan = plan_of([("Plain", [])] * 4, p=1)
    found, expected = run_threads(plan, 3, step=lambda worker: drawing), reference(plan, 3)
    assert losses_of(found) == expected.losses


def test_those_that_draw_do_not_wait_forever_for_a_forward_that_hangs(monkeypatch):
    monkeypatch.setattr(seeding, "PATIENCE", 0.05)
    here = torch.device("cpu")
    hung, other, late = (seeding.Look(here) for _ in range(3))
    for look in (hung, other):
        look.__enter__()
    with seeding.seeded(1):
        torch.rand(3)
    late.__enter__()
    for look in (hung, other):
        look.__exit__(None)
    assert not hung.drew, "what was drawn is put back"
    began = time.monotonic()
    monkeypatch.setattr(seeding, "PATIENCE", 20.0)
    threading.Timer(0.1, late.__exit__, (None,)).start()
    with seeding.seeded(1):
        assert 0.05 < time.monotonic() - began < 10, "the one that looks now is waited for"


def test_a_forward_that_fails_is_not_looked_at(monkeypatch):
    """There may be no memory left for it; and layers that draw do not wait for it."""
    positions = iter([(b"", 0)])  # it begins, and no more
    monkeypatch.setattr(seeding, "_position", lambda device: next(positions))
    with pytest.raises(ValueError, match="its own"), seeding.Look(torch.device("cpu")):
        raise ValueError("its own")
    began = time.monotonic()
    with seeding.seeded(1):
        assert time.monotonic() - began < seeding.PATIENCE


def test_what_data_seed_meanwhile_is_nobodys_draw():
    """Ranks may be threads of one process: one reads data while others check whether a forward drew."""
    seen, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            with seeding.reading() as seed:
                seed(7)
                random.random()

    before = seeding.unseeded()
    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(300):
        seen.append(seeding.moved(before))
        time.sleep(1e-4)
    stop.set()
    reader.join()
    assert set(seen) == {None}
