"""A training with a growing batch switches to another plan at a step, and equals one process with these batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.small_plans import hold, make_plan, make_program, parameters, ramped, reference
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.job.learning_rate import RateSchedule
from zbc.plan.phases import Phases, PhaseStart
from zbc.training.checkpoint.folder import folder_of
from zbc.training.data.data import Batches, RandomTokens

FAST = {"lr": 1e-2, "clip_grad_norm": 0.5, "schedule": {"kind": "linear", "by": "samples"}}
PHASES = ((1, 2), (3, 1))  # microbatches, steps; then FULL
FULL = 4
STEPS = 5


def growing(schedule, p=2, *, sync="before-step", copies=1, **how):
    """A plan with 1, 3, then 4 microbatches per step."""

    def plan(m):
        program = make_program(schedule, p, m, sync=sync, copies=copies)
        return make_plan(program, **{"optimizer": FAST, "steps": STEPS, **how})

    return ramped(plan(FULL), *((plan(m), steps) for m, steps in PHASES))


ORDERS = ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "chimera", "dualpipe", "dualpipe-v"]


@pytest.mark.long("zb-v")
@pytest.mark.parametrize("schedule", few(ORDERS, ("1f1b", "zb-v", "dualpipe")))
def test_a_growing_batch_trains_as_one_process_does(schedule):
    plan = growing(schedule)
    workers, expected = run_threads(plan, STEPS), reference(plan, STEPS)
    exact = len(plan.manifest.placement[0]) == 1  # the pipes of others add their gradients in another order
    assert all([(r.step, r.loss) for r in w.results] == [(r.step, r.loss) for r in workers[0].results] for w in workers)
    hold(workers, expected, tolerance=1e-5, near=1e-6)
    assert not exact or losses_of(workers) == expected.losses


def reading(seen, *, count, microbatches):
    """Makes ranks read from `count` samples, and records which ones."""

    class Noted(RandomTokens):
        def rows(self, indices, which):
            if which:
                seen.append(tuple(indices))
            return super().rows(indices, which)

    def setup(worker):
        if worker.batches is not None:
            samples = Noted(61, 16, seed=7, count=count)
            worker.batches = Batches(samples, seed=7, microbatches=microbatches, size=2, phases=worker.phases)

    return setup


@pytest.mark.long
def test_no_sample_is_read_twice_and_none_is_left_out():
    """Over copies and steps, through the end of an epoch within a batch."""
    read = []
    run_threads(growing("1f1b", copies=2), STEPS, setup=reading(read, count=21, microbatches=8))
    seen = [index % 21 for indices in read for index in indices]
    assert len(seen) == 2 * 2 * (1 + 1 + 3 + 4 + 4)
    counts = [seen.count(index) for index in range(21)]
    assert sum(counts) == 52 and set(counts) == {2, 3}, "two epochs of 21, and 10 more"


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4), st.integers(0, 40))
def test_a_course_is_the_sum_of_its_steps(parts, step):
    phases = Phases.made(parts)
    assert phases.position(step) == sum(phases.samples(before) for before in range(step))
    assert phases.position(step + 1) - phases.position(step) == phases.samples(step)
    later = phases.resumed(step, 1000)
    taken = phases.samples(step) + phases.samples(step + 1)
    assert later.position(step) == 1000 and later.position(step + 2) == 1000 + taken
    assert later.resumed(step, phases.position(step)) == phases


def test_a_rate_by_samples_counts_what_was_read():
    phases = Phases((PhaseStart(0, 0, 2), PhaseStart(4, 8, 4)))
    falling = RateSchedule(kind="linear", by="samples", warmup_steps=1)
    rates = [phases.rate(8.0, falling, 8, step) for step in range(8)]
    assert rates == pytest.approx([4.0, 8.0, 7.2, 6.4, 4.8, 3.2, 1.6, 0.0])
    assert [phases.full(step) for step in range(6)] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0]


BROKEN_OFF = [(1, "before-step"), (3, "before-step"), (2, "post-validate"), (3, "post-validate")]


@pytest.mark.long
@pytest.mark.parametrize(("after", "sync"), few(BROKEN_OFF, [(2, "post-validate")]))
def test_a_checkpoint_in_the_middle_of_a_ramp_is_gone_on_from(tmp_path, after, sync):
    """With another schedule and other ranks: step, position in the data and rate equal the uninterrupted run's."""
    how = {"sync": sync, "checkpoint": {"every": 1, "keep": 9}}
    whole = run_threads(growing("1f1b", **how), STEPS, folder=tmp_path)
    rest = run_threads(growing("zb-v", p=3, **how), STEPS, folder=tmp_path / "rest", resume=folder_of(tmp_path, after))
    assert losses_of(rest) == losses_of(whole)[after:]
    assert rest[0].phases.position(STEPS) == whole[0].phases.position(STEPS) == 2 * 13
    before, now = parameters(whole), parameters(rest)
    assert all(torch.equal(before[name], now[name]) for name in before)


@pytest.mark.long
def test_a_plan_with_other_batches_goes_on_behind_the_last_sample_that_was_read(tmp_path):
    seen = []
    note = reading(seen, count=40, microbatches=4)
    run_threads(growing("1f1b", checkpoint={"every": 3, "keep": 9}), 3, folder=tmp_path, setup=note)
    plain = make_plan(make_program("1f1b", 2, 2), optimizer=FAST, steps=STEPS)
    run_threads(plain, STEPS, resume=folder_of(tmp_path, 3), setup=note)
    order = Batches(RandomTokens(61, 16, seed=7, count=40), seed=7, microbatches=1, size=2)
    assert seen == [tuple(order.numbers(step, 0)) for step in range(5 + 2 * 2)], "5 microbatches, then 2 a step"
