"""Layers that vary train as in one process: a trial does not predict later forwards."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.runtime.small_plans import CPU, make_plan, make_program, make_worker, reference
from tests.runtime.test_gradients import VECTORS, check_training, user
from tests.runtime.wavering import DREW, models
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.runtime import seeding
from zbc.runtime.core.execute import run_ops, run_step

WAYS = [("1f1b", 4, "keep"), ("zb-h1", 2, "recompute"), ("zb-v", 2, "keep"), ("interleaved-1f1b", 2, "recompute")]


def plan_of(kinds, schedule="1f1b", p=4, m=4, *, activations="keep", optimizer=None, tp=1, **more):
    model = {**user("", layers=len(kinds), kinds=kinds), "family": "tests.runtime.wavering:layers"}
    optimizer = optimizer or {"lr": 1e-2, "weight_decay": 0.1, "clip_grad_norm": 0.5}
    program = make_program(schedule, p, m, tp=tp)
    more = {**VECTORS, **more}
    return make_plan(program, model=model, **more, activations=activations, optimizer=optimizer, size=2)


@pytest.mark.long
@pytest.mark.parametrize("examples", few([6, 150], (6,)))
def test_drawn_layers_train_as_in_one_process(examples):
    @settings(max_examples=examples, deadline=None)
    @example([("Plain", []), ("LeftOut", [0.5])] * 4, WAYS[0])  # a stage whose reader is left out has a gradient of 0
    @example([("Masks", [0.5]), ("Join", []), *[("Plain", [])] * 6], WAYS[0])  # no trial sees that the first one trains
    @given(models(8), st.sampled_from(WAYS))
    def check(kinds, way):
        schedule, p, activations = way
        check_training(plan_of(kinds, schedule, p, activations=activations), steps=2)

    check()


@pytest.mark.long
@pytest.mark.parametrize("examples", few([8, 150], (8,)))
def test_an_unexpected_draw_is_refused_by_the_name_of_its_layer(examples):
    """By that of a layer that draws in the same step of one process; without draws the numbers are those of it."""

    @settings(max_examples=examples, deadline=None)
    @given(
        models(5),
        st.lists(st.tuples(st.integers(0, 4), st.floats(0.3, 4.0)), min_size=1, max_size=3),
        st.sampled_from(WAYS),
    )
    def check(kinds, hidden, way):
        for place, above in hidden:
            kinds = [*kinds[:place], ("Hidden", [above]), *kinds[place:]] if _alone(kinds, place) else kinds
        kinds = [*kinds, *([("Plain", [])] * (-len(kinds) % 8))]
        kinds = [(name, [*numbers, n] if name == "Hidden" else numbers) for n, (name, numbers) in enumerate(kinds)]
        plan = plan_of(kinds, way[0], way[1], activations=way[2])
        expected = None
        for steps in (1, 2):
            DREW.clear()
            expected = reference(plan, steps)
            drew = {n for n in DREW if kinds[n][0] == "Hidden"}
            if drew:
                break
        if not drew:
            assert losses_of(run_threads(plan, 2)) == expected.losses
            return
        with pytest.raises(ZbcError, match="draws random numbers") as caught:
            run_threads(plan, 2)
        assert caught.value.code == "E509" and "zbc_random = True" in str(caught.value.hint)
        assert any(f"layer layers.{n} draws" in str(caught.value) for n in drew), (drew, str(caught.value))

    check()


def _alone(kinds, place):
    """Whether a single tensor reaches a place."""
    return place >= len(kinds) or kinds[place][0] not in ("Join", "Skip")


def test_a_rank_of_its_own_refuses_it_too():
    """It looks at the generators, since no other thread draws."""
    worker = make_worker(plan_of([("Plain", []), ("LeftOut", [0.3]), ("Hidden", [0.01]), ("Plain", [])], p=1))
    with pytest.raises(ZbcError, match=r"layer layers.2 draws"):
        run_step(worker, 0)


def test_a_seeded_draw_of_another_thread_is_not_a_draw_of_a_layer():
    def seeded(x):
        with seeding.seeded(1):
            return torch.rand_like(x)

    def layer(x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(seeded, x).result()

    assert seeding.Watch(CPU, loss=False).run("layer layers.0", layer, torch.zeros(3)).any()


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_noise_that_begins_late_is_that_of_one_process(activations):
    """It says that it draws, as the refusal of `Hidden` advises."""
    check_training(plan_of([("Plain", []), ("Noisy", [2.5])] * 2, "zb-h1", 2, activations=activations))


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        ([("Large", []), ("Masks", [10.0]), ("Join", []), ("Plain", [])], "layer layers.1 wants a gradient"),
        ([("Plain", []), ("OwnDraw", [0.5]), ("Plain", []), ("Plain", [])], "layers.1 draws from numpy.random"),
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


@pytest.mark.parametrize("above", [2.5, 100.0])
def test_ranks_that_share_layers_as_threads_neither_hang_nor_draw_unseen(above):
    """One draws, and the other one waits for it in a sum."""
    plan = plan_of([("Sums", [above])] * 4, p=2, tp=2)
    if above > 10:
        assert len(losses_of(run_threads(plan, 2))) == 2
        return
    with pytest.raises(ZbcError, match=r"layer layers.\d draws"):
        run_threads(plan, 2)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_layers_that_draw_and_sum_do_not_hang_as_threads(activations):
    """One lets the other draw while it waits for it; both draw as one process does."""
    kinds = [("SumsNoise", [100.0])] * 4
    shared, alone = (plan_of(kinds, p=2, tp=tp, activations=activations) for tp in (2, 1))
    found, expected = run_threads(shared, 3), reference(alone, 3)
    assert losses_of(found) == pytest.approx(expected.losses, rel=1e-6)


def test_a_loss_that_draws_says_so_too():
    """Else it is refused; its draws are the same whatever the order."""
    model = {**user("", layers=4, kinds=[("Plain", [])] * 4), "family": "tests.runtime.wavering:layers"}
    plans = [
        make_plan(make_program(*way), model={**model, "loss": "tests.runtime.wavering:noisy_loss"}, **VECTORS)
        for way in (("1f1b", 1, 4), ("zb-h1", 2, 4))
    ]
    alone, piped = (losses_of(run_threads(plan, 2)) for plan in plans)
    assert alone == piped
    hidden = make_plan(
        make_program("1f1b", 2, 4), model={**model, "loss": "tests.runtime.wavering:hidden_loss"}, **VECTORS
    )
    with pytest.raises(ZbcError, match=r"model.loss draws random numbers"):
        run_threads(hidden, 1)


def test_a_layer_that_draws_in_evaluation_only_is_refused_there():
    kinds = [("Plain", []), ("Evaluates", []), ("Plain", []), ("Plain", [])]
    plan = plan_of(kinds, p=2, train={"eval_every": 1, "eval_batches": 1}, data=VECTORS["data"] | {"validation": 0.5})
    with pytest.raises(ZbcError, match=r"layer layers.1 draws"):
        for worker in run_threads(plan, 1):
            raise AssertionError(worker.evaluation)


@pytest.mark.long
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
