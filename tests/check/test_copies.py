"""Plans written by hand, with offload or a shared vocabulary: proofs, refusals, times and memory."""

from dataclasses import replace

import pytest

from tests.refusals import error_of
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.ledger import over_time
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Op, Placement, Program

LINES = """F s0 m0; OFFLOAD s0 m0; F s0 m1; RELEASE s0 m0; F s0 m2; BW s0 m2; BW s0 m1; RELOAD s0 m0; BW s0 m0"""


def program(lines=LINES):
    ops = tuple(Op.parse(line.strip()) for line in lines.split(";"))
    return Program(Placement.linear(1), 3, (ops,), ("hand",))


def costs(out=0.0, back=0.0):
    return Costs.uniform(Placement.linear(1)).with_ms(out=(out,), back=(back,))


def test_copies_are_proven_and_free_memory_between_release_and_reload():
    check_all(program())
    assert peaks(program(), costs())[0].units == 2.0
    plain = LINES.replace("OFFLOAD s0 m0; ", "").replace("RELEASE s0 m0; ", "").replace("RELOAD s0 m0; ", "")
    assert peaks(program(plain), costs())[0].units == 3.0
    assert max(point.units for point in over_time(simulate(program(), costs()), 0, costs())) == 2.0


def test_the_wait_of_release_and_that_of_the_backward_take_time():
    assert simulate(program(), costs(1.0, 0.0)).makespan == 9.0, "hidden behind F s0 m1"
    assert simulate(program(), costs(3.0, 0.0)).makespan == 11.0, "RELEASE waits from 2 to 4"
    assert simulate(program(), costs(1.0, 5.0)).makespan == 14.0


def test_a_rank_copies_one_thing_at_a_time():
    lines = """F s0 m0; OFFLOAD s0 m0; F s0 m1; OFFLOAD s0 m1; RELEASE s0 m0; RELOAD s0 m0; RELEASE s0 m1; BW s0 m0;
    RELOAD s0 m1; BW s0 m1; F s0 m2; BW s0 m2"""
    check_all(program(lines))
    timeline = simulate(program(lines), costs(4.0, 2.0))
    copies = sorted((timeline.start[e], timeline.end[e]) for e in timeline.graph.met)
    assert copies == [(1.0, 5.0), (5.0, 9.0), (9.0, 11.0), (13.0, 15.0)]


FAULTS = {
    "a RELOAD dropped": ("RELOAD s0 m0; ", "", "no rank runs RELOAD s0 m0"),
    "an OFFLOAD dropped": ("OFFLOAD s0 m0; ", "", "no rank runs OFFLOAD s0 m0"),
    "a RELEASE dropped": ("RELEASE s0 m0; ", "", "no rank runs RELEASE s0 m0"),
    "RELEASE before its OFFLOAD": (
        "OFFLOAD s0 m0; F s0 m1; RELEASE s0 m0",
        "RELEASE s0 m0; F s0 m1; OFFLOAD s0 m0",
        "RELEASE s0 m0 comes before OFFLOAD s0 m0",
    ),
    "OFFLOAD before its F": ("F s0 m0; OFFLOAD s0 m0", "OFFLOAD s0 m0; F s0 m0", "OFFLOAD s0 m0 comes before F s0 m0"),
    "BW before RELOAD": ("RELOAD s0 m0; BW s0 m0", "BW s0 m0; RELOAD s0 m0", "BW s0 m0 comes before RELOAD s0 m0"),
    "RELEASE after RELOAD": (
        "RELEASE s0 m0; F s0 m2; BW s0 m2; BW s0 m1; RELOAD s0 m0",
        "F s0 m2; BW s0 m2; BW s0 m1; RELOAD s0 m0; RELEASE s0 m0",
        "RELOAD s0 m0 comes before RELEASE s0 m0",
    ),
    "two OFFLOADs": ("OFFLOAD s0 m0; ", "OFFLOAD s0 m0; OFFLOAD s0 m0; ", "OFFLOAD s0 m0 runs a second time"),
    "out and back twice": (
        "RELOAD s0 m0; BW s0 m0",
        "RELOAD s0 m0; OFFLOAD s0 m0; RELEASE s0 m0; RELOAD s0 m0; BW s0 m0",
        "OFFLOAD s0 m0 runs a second time",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_copies_is_named(fault):
    old, new, text = FAULTS[fault]
    assert LINES.count(old) == 1
    first = error_of(check_all, program(LINES.replace(old, new))).errors[0]
    assert first.code == "E206" and text in first.message


def test_an_f_is_missed_and_not_a_copy_that_would_bring_the_same():
    error = error_of(check_all, program(LINES.replace("F s0 m1; ", "")))
    assert (error.code, error.message) == ("E202", "program: no rank runs F s0 m1")
    assert error_of(check_all, program(LINES + "; OFFLOAD s0 m7")).errors[0].code == "E202"


ONE = (
    "I m0, GIVE m0, F s0 m0, SPREAD m0, S m0, MEET m0, T m0, BW s0 m0, TAKE m0, E m0",
    "I m0, GIVE m0, F s1 m0, SPREAD m0, S m0, MEET m0, BW s1 m0, T m0, TAKE m0, E m0",
)
TWO = tuple(
    text.replace("T m0, BW s0", "T m0, SUM m0, BW s0").replace("BW s1 m0, T m0", "T m0, SUM m0, BW s1 m0")
    for text in ONE
)


def shared(ranks, sums=1, m=1, **how):
    lists = tuple(tuple(Op.parse(text.strip()) for text in one.split(",")) for one in ranks)
    return Program(Placement.linear(2), m, lists, ("test",), vocabulary=sums, **how)


def taken(ranks, sums=1, m=1):
    one = shared(ranks, sums, m)
    check_all(one)
    return simulate(one, Costs.uniform(one.placement).with_ms(s=(0.25, 0.25), t=(0.5, 0.5), meet=(0.125, 0.125)))


def test_the_last_backward_waits_for_all_ranks():
    found = {(span.rank, str(span.op)): (span.start, span.end) for span in taken(ONE)}
    assert found[0, "S m0"] == found[1, "S m0"] == (2.0, 2.25)
    assert found[1, "BW s1 m0"] == (2.375, 4.375) and found[0, "T m0"] == (2.375, 2.875)
    found = {(span.rank, str(span.op)): (span.start, span.end) for span in taken(TWO, 2)}
    assert found[1, "T m0"] == (2.375, 2.875) and found[1, "BW s1 m0"][0] == 2.875


def test_without_a_shared_vocabulary_its_ops_have_nothing_to_work_on():
    said = "S m0 has nothing to work on: the first and the last stage hold the vocabulary"
    assert said in str(error_of(check_all, replace(shared(ONE), vocabulary=0)))
