"""Jobs whose steps have no flush: what they do not go with, and what their plans say."""

from itertools import pairwise

import pytest

from tests.compiler import cycles
from tests.compiler.cycles import Work, wrong_cycle
from tests.jobs import job
from tests.refusals import refused
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.steps import period_of
from zbc.errors import ZbcError
from zbc.ir import NEXT

GIVEN = {"f": 1.0, "b": 1.0, "w": 1.0}
OTHERS = [
    {"parallel": {"tp": 2}},
    {"parallel": {"shard": "optimizer", "dp": 2}},
    {"parallel": {"vocabulary": "shared"}},
    {"model": {"tie_embeddings": True}},
    {"model": {"dtype": "bfloat16"}},
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
    with refused("E210") as found:
        compile_job(two(m=2))
    assert found.value.where is not None


@pytest.mark.parametrize("seeds", few([range(start, start + 20) for start in range(0, 100, 20)], 1), ids=str)
def test_periods_and_peaks_are_those_of_the_unrolled_steps(seeds):
    assert [found for found in map(wrong_cycle, seeds) if found is not None] == []


@pytest.mark.parametrize(("m", "comm", "steps"), [(3, 0.3, [10.2, 10.2, 10.2, 10.8]), (3, 0.1, [9.4, 9.4, 9.4, 9.6])])
def test_the_period_is_the_mean_of_steps_that_come_again(m, comm, steps):
    made = compile_job(two(m=m, costs={**GIVEN, "comm": comm}))
    ends = cycles.ends(
        [[str(op) for op in ops] for ops in made.program.ranks],
        m,
        range(4),
        Work([1.0] * 4, [2.0] * 4, [0.0] * 4, comm),
        30,
    )
    assert sorted(b - a for a, b in pairwise(ends[0][20:25])) == pytest.approx(steps)
    assert made.settled_ms == pytest.approx(sum(steps) / 4)


@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 2), (4, 3)])
def test_with_p_minus_1_microbatches_a_rank_holds_more_than_with_a_flush(p, m):
    made = compile_job(two(pp=p, m=m))
    assert [rank.units for rank in made.memory] == list(range(p, 0, -1))
    with refused("E302"):
        compile_job(two(pp=p, m=m, schedule={"memory_limit": f"{m / p}x"}))


@pytest.mark.parametrize("sync", ["two-versions", "asynchronous"])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 2), (4, 7), (5, 4), (4, 8)])
def test_receives_of_a_cycle_are_placed_by_order(p, m, sync):
    """Messages that wait for a buffer are the default where times are estimated."""
    made = compile_job(job(kind="1f1b", pp=p, m=m, optimizer={"sync": sync}))
    for ops in made.program.ranks:
        received = [op for op in ops if op.kind.is_recv]
        assert len(received) == len({(op.kind, op.stage, op.mb % NEXT) for op in received})
    eager = period_of(made.program, made.costs.over("eager"))
    assert made.settled_ms == pytest.approx(eager), "no message waits for its buffer"
