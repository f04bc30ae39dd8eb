"""Plans with offload written by hand: proofs, refusals, times and memory."""

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
