"""Passes, each shown as listing -> listing, and what all of them leave alone."""

from __future__ import annotations

from itertools import pairwise
from textwrap import dedent

import pytest

from tests.compiler.grid import FIXED, chunk_counts, make, timed
from zbc.compiler.passes import PASSES, lower
from zbc.compiler.passes.fuse_backward import fuse_backward
from zbc.compiler.passes.insert_comm import insert_comm
from zbc.compiler.passes.optimizer_step import optimizer_step
from zbc.compiler.passes.reduce_grads import reduce_grads
from zbc.ir import Op, Placement, Program

every = pytest.mark.parametrize("name", FIXED)


def program(*ranks, placement=None):
    ops = tuple(tuple(Op.parse(line) for line in dedent(text).strip().splitlines()) for text in ranks)
    return Program(placement or Placement.linear(len(ranks)), 8, ops)


def listing(program):
    return [[program.placement.text(op) for op in ops] for ops in program.ranks]


def test_fuse_backward_joins_only_neighbours_of_one_microbatch():
    before = program("B s0 m0\nW s0 m0\nB s0 m1\nF s0 m3\nW s0 m1\nB s0 m2\nW s0 m1\nB s1 m2\nW s0 m2")
    after = ["BW s0 m0", "B s0 m1", "F s0 m3", "W s0 m1", "B s0 m2", "W s0 m1", "B s1 m2", "W s0 m2"]
    assert listing(fuse_backward(before)) == [after]


def test_a_receive_is_posted_one_compute_op_ahead_and_a_send_follows_its_producer():
    before = program("F s0 m0\nF s0 m1\nBW s0 m0\nBW s0 m1", "F s1 m0\nBW s1 m0\nF s1 m1\nBW s1 m1")
    assert listing(insert_comm(before)) == [
        ["F s0 m0", "SEND_F s0 m0 >r1", "RECV_B s0 m0 <r1", "F s0 m1", "SEND_F s0 m1 >r1"]
        + ["RECV_B s0 m1 <r1", "BW s0 m0", "BW s0 m1"],
        ["RECV_F s1 m0 <r0", "F s1 m0", "RECV_F s1 m1 <r0", "BW s1 m0", "SEND_B s1 m0 >r0"]
        + ["F s1 m1", "BW s1 m1", "SEND_B s1 m1 >r0"],
    ]


def test_receives_of_a_channel_are_posted_in_the_order_they_are_sent():
    """Rank 0 sends m1 before m0; rank 1 uses m0 first. The post of m1 moves ahead of that of m0."""
    before = program("F s0 m1\nF s0 m0", "F s1 m0\nF s1 m1")
    assert listing(insert_comm(before))[1] == ["RECV_F s1 m1 <r0", "RECV_F s1 m0 <r0", "F s1 m0", "F s1 m1"]


def test_no_transfer_inside_a_rank():
    turn = program("F s0 m0\nF s1 m0\nBW s1 m0\nBW s0 m0", placement=Placement(((0, 0),)))
    assert insert_comm(turn).ranks == turn.ranks


def test_a_gradient_leaves_before_the_weight_gradient_that_follows_it():
    """Why insert-comm runs before fuse-backward: fused, the neighbour would wait for W too."""
    split = program("F s0 m0\nB s0 m0\nW s0 m0", "F s1 m0\nB s1 m0\nW s1 m0")
    rank0, rank1 = listing(lower(split))
    assert rank1[2:5] == ["B s1 m0", "SEND_B s1 m0 >r0", "W s1 m0"]
    assert "BW s0 m0" in rank0, "nobody waits for the gradient of stage 0"


def test_the_step_ends_with_one_agreement_and_one_step_per_stage():
    placement = Placement.vshape(2)
    after = listing(optimizer_step(Program(placement, 1, ((), ()))))
    assert after == [["VALIDATE", "STEP s0", "STEP s3"], ["VALIDATE", "STEP s1", "STEP s2"]]


def test_only_replicated_stages_are_reduced_and_every_holder_meets_in_one_order():
    mirrored = Placement.bidirectional((0, 1))
    ops = program("F s0 m0\nBW s0 m0", "F s1 m0\nBW s1 m0", placement=mirrored)
    assert [ops[-2:] for ops in listing(reduce_grads(ops))] == [["REDUCE s0", "REDUCE s1"]] * 2
    plain = make("1f1b", 2, 2)
    assert reduce_grads(plain) is plain


@every
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 5), (3, 4), (4, 8), (5, 3)])
def test_lowering_changes_neither_the_compute_order_nor_the_prediction(name, p, m):
    for v in chunk_counts(name):
        before = make(name, p, m, v)
        commed = insert_comm(before)
        kept = [tuple(op for op in ops if op.kind.is_compute) for ops in commed.ranks]
        assert kept == list(before.ranks)
        after = lower(before)
        for comm in (0.0, 0.25):
            times = (1.0, 2.0, 0.5, comm)
            assert timed(after, *times).makespan == pytest.approx(timed(before, *times).makespan)
        transfers = sum(op.kind.is_transfer for _, _, op in after)
        pipe = before.placement.pipes[0]
        crossings = sum(a != b for a, b in pairwise(pipe))
        assert transfers == 2 * 2 * crossings * m
        assert after.history[1:] == tuple(step for step in PASSES if step != "reduce-grads")
