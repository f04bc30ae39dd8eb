"""Ranks that differ: the costs of their ops, their layers, and their memory limits."""

from dataclasses import replace
from operator import sub

import pytest

from tests.jobs import job
from tests.refusals import refused
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import estimate
from zbc.ir import Kind

EVEN = {"layers_per_stage": "equal"}


def planned(**changes):
    return compile_job(job(**{"layers": 12, "pp": 4, "m": 8, "kind": "1f1b", **changes}), budget=0.0, suggest=False)


def blocks(made):
    return [sum(name.startswith("layers.") for name in part) for part in made.layers]


@pytest.mark.long("interleaved-1f1b")
@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "interleaved-1f1b", "zb-v"])
def test_a_rank_that_is_slow_gets_fewer_layers(kind):
    slow = {"hardware": {"slow": [1, 1, 2, 1]}}
    made, even = planned(kind=kind, **slow), planned(kind=kind, partition=EVEN, **slow)
    count, before = blocks(made), blocks(planned(kind=kind))
    mine = [s for s, rank in enumerate(made.program.placement.pipes[0]) if rank == 2]
    assert sum(count[s] for s in mine) < sum(before[s] for s in mine)
    assert made.settled_ms < even.settled_ms


def test_ops_of_a_rank_take_as_much_longer_and_nothing_else():
    """Messages are no work of its own."""
    plain, slow = planned(partition=EVEN), planned(partition=EVEN, hardware={"slow": [1, 1.5, 1, 1]})
    for name in ("f", "b", "w", "step"):
        around = plain.costs.column("messages") if name in "fb" else (0.0,) * 4
        one, other = ([*map(sub, each.costs.column(name), around)] for each in (plain, slow))
        assert other == pytest.approx([ms * (1.5 if s == 1 else 1) for s, ms in enumerate(one)])
    assert slow.costs.links == plain.costs.links


def test_a_slow_rank_makes_no_collective_of_a_shared_vocabulary_slower():
    plain, slow = (
        planned(partition=EVEN, parallel={"pp": 4, "vocabulary": "shared"}, hardware=hardware).costs
        for hardware in ({}, {"slow": [1, 1.5, 1, 1]})
    )
    for name in ("spread", "meet", "give", "take"):
        assert slow.column(name) == plain.column(name) and plain.of(name) > 0, name
    for name in ("s", "t", "i", "e"):
        assert slow.column(name) == pytest.approx(
            [ms * (1.5 if r == 1 else 1) for r, ms in enumerate(plain.column(name))]
        )


def test_rates_by_rank_are_the_machines_they_stand_for(no_launches):
    """On a rank with half the arithmetic and half the bandwidth ops take twice as long, except for their starts."""
    rates = {"tflops": [1.0, 0.5, 1.0, 1.0], "memory_gbps": [20.0, 10.0, 20.0, 20.0]}
    asked = job(layers=12, pp=4, kind="1f1b", hardware=rates)
    assert estimate.slowness(asked) == pytest.approx([1, 2, 1, 1])
    alike = {"tflops": 1.0, "memory_gbps": 20.0}
    one = compile_job(replace(asked), budget=0.0, suggest=False)
    other = planned(hardware={**alike, "slow": [1, 2, 1, 1]}, m=asked.schedule.microbatches)
    assert one.settled_ms == pytest.approx(other.settled_ms)
    assert one.layers == other.layers


@pytest.mark.parametrize("kind", ["chimera", "bitpipe"])
def test_ops_of_copies_of_a_stage_take_what_they_take_on_their_own_ranks(kind):
    slow = {"slow": [1, 1, 2, 1]}
    plain, slow = (planned(kind=kind, partition=EVEN, hardware=hardware) for hardware in ({}, slow))
    usual = {(span.op.kind, span.op.stage): span.end - span.start for span in plain.timeline}
    for rank, op, start, end in slow.timeline:
        around = plain.costs.of("messages", op.stage) if op.kind in (Kind.F, Kind.B, Kind.BW) else 0.0
        own = usual[op.kind, op.stage] - around
        assert end - start == pytest.approx(own * (2 if rank == 2 else 1) + around), (rank, op)
    assert plain.settled_ms < slow.settled_ms < 2 * plain.settled_ms
    least = plain.report.lower_bound_makespan_ms, slow.report.lower_bound_makespan_ms, slow.timeline.makespan
    assert [*least] == pytest.approx(sorted(least), rel=1e-9)


def test_layers_go_by_the_pace_of_ranks_unless_times_of_ranks_are_given():
    # Ranks 0 and 3 of a bidirectional pipeline have stages 0 and 3.
    count = blocks(planned(kind="chimera", hardware={"slow": [1, 1, 2, 1]}))
    assert sum(count[1:3]) < sum(blocks(planned(kind="chimera"))[1:3])
    given = {"f": [1.0, 2.0, 1.0, 1.0], "b": 1.0, "w": 1.0}
    made = planned(costs=given, hardware={"slow": [3, 1, 1, 1]})
    assert made.costs.column("f") == (1.0, 2.0, 1.0, 1.0)


def test_each_rank_is_held_to_its_own_memory_and_layers_move_off_one_with_little():
    each = [rank.bytes / 2**30 for rank in planned(partition=EVEN).memory]
    enough = [1.01 * one for one in each]
    assert planned(partition=EVEN, hardware={"memory_gib": enough}).memory
    less = [*enough[:2], 0.9 * each[2], enough[3]]
    with refused("E301", "rank 2"):
        planned(partition=EVEN, hardware={"memory_gib": less})
    held = [rank.bytes / 2**30 for rank in planned().memory]
    made = planned(hardware={"memory_gib": [2 * held[0], 0.75 * held[1], 2 * held[0], 2 * held[0]]})
    assert blocks(made)[1] < blocks(planned())[1]
