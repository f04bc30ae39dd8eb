"""Plans written by hand, with offload or a shared vocabulary: proofs, times and memory."""

from dataclasses import replace

from tests.listing import listing
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.ledger import over_time
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Placement

LINES = "F s0 m0, OFFLOAD s0 m0, F s0 m1, RELEASE s0 m0, F s0 m2, BW s0 m2, BW s0 m1, RELOAD s0 m0, BW s0 m0"


def program(lines=LINES):
    return listing(f"rank 0: {lines}")


def costs(out=0.0, back=0.0):
    return Costs.uniform(Placement.linear(1)).with_ms(out=(out,), back=(back,))


def test_copies_are_proven_and_free_memory_between_release_and_reload():
    check_all(program())
    assert peaks(program(), costs())[0].units == 2.0
    plain = LINES.replace("OFFLOAD s0 m0, ", "").replace("RELEASE s0 m0, ", "").replace("RELOAD s0 m0, ", "")
    assert peaks(program(plain), costs())[0].units == 3.0
    assert max(point.units for point in over_time(simulate(program(), costs()), 0, costs())) == 2.0


def test_the_wait_of_release_and_that_of_the_backward_take_time():
    assert simulate(program(), costs(1.0, 0.0)).makespan == 9.0, "hidden behind F s0 m1"
    assert simulate(program(), costs(3.0, 0.0)).makespan == 11.0, "RELEASE waits from 2 to 4"
    assert simulate(program(), costs(1.0, 5.0)).makespan == 14.0


def test_a_rank_copies_one_thing_at_a_time():
    lines = """F s0 m0, OFFLOAD s0 m0, F s0 m1, OFFLOAD s0 m1, RELEASE s0 m0, RELOAD s0 m0, RELEASE s0 m1, BW s0 m0,
    RELOAD s0 m1, BW s0 m1, F s0 m2, BW s0 m2"""
    check_all(program(lines))
    timeline = simulate(program(lines), costs(4.0, 2.0))
    copies = sorted((timeline.start[e], timeline.end[e]) for e in timeline.graph.met)
    assert copies == [(1.0, 5.0), (5.0, 9.0), (9.0, 11.0), (13.0, 15.0)]


ONE = (
    "I m0, GIVE m0, F s0 m0, SPREAD m0, S m0, MEET m0, T m0, BW s0 m0, TAKE m0, E m0",
    "I m0, GIVE m0, F s1 m0, SPREAD m0, S m0, MEET m0, BW s1 m0, T m0, TAKE m0, E m0",
)
TWO = tuple(
    text.replace("T m0, BW s0", "T m0, SUM m0, BW s0").replace("BW s1 m0, T m0", "T m0, SUM m0, BW s1 m0")
    for text in ONE
)


def shared(ranks, sums=1):
    return replace(listing(f"rank 0: {ranks[0]}\nrank 1: {ranks[1]}"), vocabulary=sums)


def taken(ranks, sums=1):
    one = shared(ranks, sums)
    check_all(one)
    costs = Costs.uniform(one.placement).with_ms(s=(0.25, 0.25), t=(0.5, 0.5), meet=(0.125, 0.125))
    return {(span.rank, str(span.op)): (span.start, span.end) for span in simulate(one, costs)}


def test_the_last_backward_waits_for_all_ranks():
    found = taken(ONE)
    assert found[0, "S m0"] == found[1, "S m0"] == (2.0, 2.25)
    assert found[1, "BW s1 m0"] == (2.375, 4.375) and found[0, "T m0"] == (2.375, 2.875)
    found = taken(TWO, 2)
    assert found[1, "T m0"] == (2.375, 2.875) and found[1, "BW s1 m0"][0] == 2.875
