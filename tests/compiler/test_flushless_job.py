"""Jobs whose steps have no flush: what they do not go with, and what their plans say."""

from __future__ import annotations

import pytest

from tests.jobs import job
from zbc.compiler.compile import compile_job
from zbc.errors import ZbcError

GIVEN = {"f": 1.0, "b": 1.0, "w": 1.0}
OTHERS = [
    {"parallel": {"tp": 2}},
    {"parallel": {"shard": "optimizer", "dp": 2}},
    {"parallel": {"vocabulary": "shared"}},
    {"model": {"tie_embeddings": True}},
    {"model": {"dtype": "bfloat16"}},
    {"model": {"compile": True}},
    {"memory": {"activations": "offload"}},
    {"freeze": {"most": 0.5}},
    {"schedule": {"slices": 2}},
    {"kind": "auto"},
]


def two(**changes):
    optimizer = {"sync": "two-versions", **changes.pop("optimizer", {})}
    return job(**{"kind": "1f1b", "costs": GIVEN, **changes}, optimizer=optimizer)


def codes(**changes):
    with pytest.raises(ZbcError) as found:
        two(**changes)
    return {one.code for one in found.value.errors}


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_what_excludes_it_is_refused(changes):
    assert "E118" in codes(**changes)


def test_the_norm_of_all_gradients_is_refused():
    assert codes(optimizer={"clip_grad_norm": 1.0}) == {"E125"}
    two(optimizer={"clip_stage_norm": 1.0})


@pytest.mark.parametrize("key", [{"every": 2}, {"lookahead": True}])
def test_what_is_for_stages_on_their_own_is_refused_elsewhere(key):
    assert codes(optimizer=key) == {"E118"}
    two(optimizer={**key, "sync": "asynchronous"})


def test_a_number_of_microbatches_that_does_not_divide_those_of_a_step():
    assert codes(m=8, optimizer={"sync": "asynchronous", "every": 3}) == {"E118"}


def test_a_limit_of_a_stage_is_for_steps_without_a_flush():
    assert codes(optimizer={"sync": "before-step", "clip_stage_norm": 1.0}) == {"E118"}


def test_its_report_says_the_period_the_flush_and_the_delay():
    made = compile_job(two(m=8))
    steps = made.report.flushless
    assert (steps.period_ms, steps.delay, steps.alone) == (24.0, (1, 1, 1, 1), False)
    assert made.settled_ms == 24.0 < steps.flush_ms
    alone = compile_job(two(m=8, optimizer={"sync": "asynchronous"})).report.flushless
    assert (alone.period_ms, alone.delay, alone.alone) == (24.0, (3, 2, 1, 0), True)


def test_memory_counts_a_second_copy_of_the_weights():
    plain = compile_job(two(m=8, optimizer={"sync": "before-step"}))
    both = compile_job(two(m=8))
    for one, other in zip(plain.memory, both.memory, strict=True):
        assert other.weights == pytest.approx(2 * one.weights, rel=0.02)  # constants are there once
        assert other.units == one.units


def test_too_few_microbatches_are_named_with_their_place():
    with pytest.raises(ZbcError) as found:
        compile_job(two(m=2))
    assert found.value.code == "E210"
    assert found.value.where is not None
