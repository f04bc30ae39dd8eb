"""The learning rate of every step, by formula; and that the optimizer uses it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zbc.job.learning_rate import RateSchedule, rate


def rates(steps, lr=1.0, **schedule):
    made = RateSchedule.model_validate(schedule)
    return [rate(lr, made, steps, step) for step in range(steps)]


def test_rates_are_constant_after_a_warm_up_or_end_at_the_least():
    assert rates(3) == [1.0, 1.0, 1.0]
    assert rates(6, lr=2.0, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(6, kind="linear", warmup_steps=2) == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(5, kind="linear", decay_steps=2, min_lr=0.5) == [0.75, 0.5, 0.5, 0.5, 0.5]


def test_cosine_is_that_of_torch():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    peer = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.1)
    expected = []
    for _ in range(20):
        optimizer.step()
        peer.step()
        expected.append(peer.get_last_lr()[0])
    assert rates(25, kind="cosine", warmup_steps=5, min_lr=0.1)[5:] == pytest.approx(expected)
    assert rates(25, kind="cosine", warmup_steps=5, min_lr=0.1)[4] == 1.0


def test_wsd_stays_and_falls_at_the_end():
    assert rates(20, kind="wsd", warmup_steps=2, decay_steps=4) == [0.5] + [1.0] * 15 + [0.75, 0.5, 0.25, 0.0]
    assert rates(20, kind="wsd").count(1.0) == 18


@pytest.mark.parametrize("warmup", [18, 19, 20])
def test_the_way_down_of_wsd_waits_for_the_end_of_a_long_warm_up(warmup):
    found = rates(20, kind="wsd", warmup_steps=warmup)
    assert found[:warmup] == [pytest.approx(step / warmup) for step in range(1, warmup + 1)]
    assert found[warmup:] == [[0.5, 0.0], [0.0], []][warmup - 18]


@given(
    kind=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    steps=st.integers(1, 300),
    warmup=st.integers(0, 300),
    decay=st.none() | st.integers(1, 300),
    step=st.integers(0, 1000),
)
def test_a_rate_is_always_between_the_least_and_the_largest(kind, steps, warmup, decay, step):
    schedule = RateSchedule(kind=kind, warmup_steps=warmup, decay_steps=decay, min_lr=0.125)
    found = rate(1.0, schedule, steps, step)
    assert 0.0 < found <= 1.0 and math.isfinite(found)
    assert found >= 0.125 or step + 1 < warmup
