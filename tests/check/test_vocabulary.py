"""Vocabulary parallel: each rank has its ops once for each unit, in order; all ranks have one order of collectives."""

from dataclasses import replace

from tests.refusals import error_of
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Op, Placement, Program

ONE = (
    "I m0, GIVE m0, F s0 m0, SPREAD m0, S m0, MEET m0, T m0, BW s0 m0, TAKE m0, E m0",
    "I m0, GIVE m0, F s1 m0, SPREAD m0, S m0, MEET m0, BW s1 m0, T m0, TAKE m0, E m0",
)
TWO = tuple(
    text.replace("T m0, BW s0", "T m0, SUM m0, BW s0").replace("BW s1 m0, T m0", "T m0, SUM m0, BW s1 m0")
    for text in ONE
)


def program(ranks, sums=1, m=1, **how):
    lists = tuple(tuple(Op.parse(text.strip()) for text in one.split(",")) for one in ranks)
    return Program(Placement.linear(2), m, lists, ("test",), vocabulary=sums, **how)


def times(ranks, sums=1, m=1):
    one = program(ranks, sums, m)
    check_all(one)
    return simulate(one, Costs.uniform(one.placement).with_ms(s=(0.25, 0.25), t=(0.5, 0.5), meet=(0.125, 0.125)))


def test_the_last_backward_waits_for_all_ranks():
    found = {(span.rank, str(span.op)): (span.start, span.end) for span in times(ONE)}
    assert found[0, "S m0"] == found[1, "S m0"] == (2.0, 2.25)
    assert found[1, "BW s1 m0"] == (2.375, 4.375) and found[0, "T m0"] == (2.375, 2.875)
    found = {(span.rank, str(span.op)): (span.start, span.end) for span in times(TWO, 2)}
    assert found[1, "T m0"] == (2.375, 2.875) and found[1, "BW s1 m0"][0] == 2.875


def test_without_a_shared_vocabulary_its_ops_have_nothing_to_work_on():
    said = "S m0 has nothing to work on: the first and the last stage hold the vocabulary"
    assert said in str(error_of(check_all, replace(program(ONE), vocabulary=0)))
