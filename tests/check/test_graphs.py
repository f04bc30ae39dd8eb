"""Graphs of stages: proofs and the operational machine agree on programs, whole and damaged."""

import pytest

from tests.check.graphs import draw
from tests.check.pairs import verdicts
from tests.lowered import lower
from zbc.compiler.check import check_all
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement, Program

DIAMOND = Placement(((0, 1, 2, 3),), ((0, 1), (0, 2), (1, 3), (2, 3)))


def test_what_the_compiler_makes_of_graphs_runs():
    named = {True: 0, False: 0}
    for seed in range(40):
        program = draw(seed)
        if program.history[-1] == "optimizer-step":
            assert verdicts(program, seed) == (True, True), seed
            named[any(op.other >= 0 for _, _, op in program)] += 1
    assert all(named.values()), named


def diamond() -> Program:
    ranks = tuple((Op(Kind.F, s), Op(Kind.BW, s)) for s in range(4))
    return lower(Program(DIAMOND, 1, ranks, ("by hand",)))


def test_a_stage_with_several_inputs_names_who_sends_them():
    program = diamond()
    lines = [[DIAMOND.text(op) for op in ops if op.kind.is_transfer] for ops in program.ranks]
    sent = ["RECV_B s0 m0 from s1 <r1", "RECV_B s0 m0 from s2 <r2", "SEND_F s0 m0 to s1 >r1", "SEND_F s0 m0 to s2 >r2"]
    assert lines[0] == sent
    assert lines[1] == ["RECV_F s1 m0 <r0", "RECV_B s1 m0 <r3", "SEND_F s1 m0 >r3", "SEND_B s1 m0 >r0"]
    back = ["RECV_F s3 m0 from s1 <r1", "RECV_F s3 m0 from s2 <r2", "SEND_B s3 m0 to s1 >r1", "SEND_B s3 m0 to s2 >r2"]
    assert lines[3] == back


def test_a_missing_branch_is_named():
    program = diamond()
    ranks = [tuple(op for op in ops if str(op) != "SEND_F s2 m0") for ops in program.ranks]
    with pytest.raises(ZbcError) as caught:
        check_all(program.with_ranks(ranks, "broken"))
    error = caught.value.errors[0]
    assert error.code == "E203"
    assert error.message == "program: RECV_F s3 m0 from s2 <r2 has no SEND_F s2 m0 >r3"
