"""Ranks that share a link to the host: one copy out and one back at a time, in simulation, pass and by the clock."""

import random
from dataclasses import replace

import pytest

from tests.check import clocked
from tests.cli.test_offload import planned
from tests.compiler.test_offload import ALL, MOVED, case, keeps, moved, with_copies
from zbc.compiler.lowering import Lowering
from zbc.compiler.passes.offload import Offload
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim import simulate
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.links import Links, by_time


def lowered(name, p=4, m=8, k=0.7, limit=2.0, **changes):
    """A complete program whose ranks keep to a limit, at costs with `changes`."""
    card = SCHEDULES[name]
    program = card.make(Request(p, m, card.default_chunks))
    costs = replace(with_copies(program, 1.0, 1.1, 0.9, 0.05, k=k), **changes)
    return Lowering(offload=Offload((limit,) * p, ALL)).lower(Context(program, costs))


@pytest.mark.parametrize("name", ["1f1b", "gis", "interleaved-1f1b", "gpipe"])
@pytest.mark.parametrize("rendezvous", [False, True])
def test_walked_by_time_a_program_takes_as_long_as_in_any_order(name, rendezvous):
    found = lowered(name, rendezvous=rendezvous)
    plain, costs = found.timeline, found.costs
    length = simulate.lengths(found.graph, costs)
    start, end = [0.0] * len(length), [0.0] * len(length) + [0.0] * 5
    order = by_time(found.graph, end, posted=rendezvous)
    simulate._slowly(found.graph, costs, order, length, start, end, Links(found.graph, costs))
    assert start == pytest.approx(plain.start) and end == pytest.approx(plain.end)


@pytest.mark.parametrize("shared", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "gis"])
def test_no_two_copies_of_a_direction_are_on_a_link_at_once(name, shared):
    found = lowered(name, shared=shared)
    assert keeps(found, 2.0)
    assert clocked.problems(found.timeline, found.costs) == []


def test_the_clock_finds_copies_that_share_a_link_and_do_not_know_it():
    alone = lowered("1f1b")
    assert clocked.problems(alone.timeline, alone.costs) == []
    assert clocked.problems(alone.timeline, replace(alone.costs, shared=2)) != []


def test_a_pass_that_knows_of_the_link_is_faster_than_one_that_does_not():
    blind = lowered("gis", p=8, m=24, k=0.4, limit=3.0)
    told = lowered("gis", p=8, m=24, k=0.4, limit=3.0, shared=2)
    late = Context(blind.program, told.costs).timeline.makespan
    assert blind.timeline.makespan <= told.timeline.makespan < late


def beside_published(rows):
    """How much longer than the published lists take when pairs of ranks run them in lock step, as shares."""
    for row in rows:
        plain = case(row)
        context = Context(plain.program, replace(plain.costs, shared=2, alone=0.7))
        found = moved(context.program, context, float(row["peak_after"]))
        assert clocked.problems(found.timeline, found.costs) == []
        yield found.timeline.makespan / float(row["makespan_replayed"]) - 1


def test_pairs_on_a_link_are_mostly_as_fast_as_published_lists_replayed():
    late = [*beside_published(random.Random(3).sample([row for row in MOVED if int(row["p"]) <= 6], 24))]
    assert sum(one <= 1e-4 for one in late) >= 0.9 * len(late) and max(late) < 0.092


@pytest.mark.repeats
@pytest.mark.parametrize("part", range(8))
def test_pairs_on_a_link_in_every_row_of_the_reference(part):
    late = [*beside_published(MOVED[part::8])]
    assert sum(one <= 1e-4 for one in late) >= 0.8 * len(late) and max(late) < 0.092


def test_a_job_says_how_many_ranks_share_a_link(tmp_path):
    alone = planned(tmp_path, "gis")
    both = planned(tmp_path, "gis", hardware={"host_shared": 4})
    assert (alone.costs.shared, both.costs.shared) == (1, 4)
    assert both.timeline.makespan > alone.timeline.makespan
