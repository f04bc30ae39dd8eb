"""Passes, each shown as listing -> listing, and invariants of all passes."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.check import operational
from tests.check.each import check_deadlock, verdict
from tests.check.programs import any_order, placement
from tests.compiler.grid import FIXED, chunk_counts, make, timed
from tests.listing import listing
from tests.lowered import lower, ran
from zbc.compiler.check import check_all
from zbc.compiler.passes.fuse_backward import FuseBackward
from zbc.compiler.passes.insert_comm import InsertComm
from zbc.compiler.passes.optimizer_step import OptimizerStep
from zbc.compiler.passes.reduce_grads import ReduceGrads
from zbc.ir import Kind, Placement, Program
from zbc.ops import TIED

every = pytest.mark.parametrize("name", FIXED)


def lines(program):
    return [[program.placement.text(op) for op in ops] for ops in program.ranks]


def test_fuse_backward_joins_only_neighbours_of_one_microbatch():
    text = "rank 0: B s0 m0, W s0 m0, B s0 m1, F s0 m3, W s0 m1, B s0 m2, W s0 m1, B s1 m2, W s0 m2"
    after = ["BW s0 m0", "B s0 m1", "F s0 m3", "W s0 m1", "B s0 m2", "W s0 m1", "B s1 m2", "W s0 m2"]
    assert lines(ran(FuseBackward(), listing(text))) == [after]


def test_a_receive_is_posted_one_compute_op_ahead_and_a_send_follows_its_producer():
    before = listing("rank 0: F s0 m0, F s0 m1, BW s0 m0, BW s0 m1\nrank 1: F s1 m0, BW s1 m0, F s1 m1, BW s1 m1")
    assert lines(ran(InsertComm(), before)) == [
        ["F s0 m0", "SEND_F s0 m0 >r1", "RECV_B s0 m0 <r1", "F s0 m1", "SEND_F s0 m1 >r1"]
        + ["RECV_B s0 m1 <r1", "BW s0 m0", "BW s0 m1"],
        ["RECV_F s1 m0 <r0", "F s1 m0", "RECV_F s1 m1 <r0", "BW s1 m0", "SEND_B s1 m0 >r0"]
        + ["F s1 m1", "BW s1 m1", "SEND_B s1 m1 >r0"],
    ]


def test_transfers_stand_where_they_are_sent_and_wanted():
    # Rank 0 sends m1 before m0; rank 1 uses m0 first. The receive of m1 is posted before that of m0.
    before = listing("rank 0: F s0 m1, F s0 m0\nrank 1: F s1 m0, F s1 m1")
    assert lines(ran(InsertComm(), before))[1] == ["RECV_F s1 m1 <r0", "RECV_F s1 m0 <r0", "F s1 m0", "F s1 m1"]
    turn = listing("rank 0: F s0 m0, F s1 m0, BW s1 m0, BW s0 m0", Placement(((0, 0),)))
    assert ran(InsertComm(), turn).ranks == turn.ranks
    # Why insert-comm runs before fuse-backward: fused, the neighbour would wait for W too.
    split = listing("rank 0: F s0 m0, B s0 m0, W s0 m0\nrank 1: F s1 m0, B s1 m0, W s1 m0")
    rank0, rank1 = lines(lower(split))
    assert rank1[2:5] == ["B s1 m0", "SEND_B s1 m0 >r0", "W s1 m0"]
    assert "BW s0 m0" in rank0, "nobody waits for the gradient of stage 0"


def test_the_step_ends_with_one_agreement_and_one_step_per_stage():
    after = lines(ran(OptimizerStep(), Program(Placement.vshape(2), 1, ((), ()))))
    assert after == [["VALIDATE", "STEP s0", "STEP s3"], ["VALIDATE", "STEP s1", "STEP s2"]]


def test_without_a_barrier_the_step_before_is_closed_in_the_warm_up():
    """Rank 1 ends a unit after rank 0, so its verdict comes while rank 0 runs a forward; messages that rank 0 sends
    before REDO are received before REDO."""
    rank0, rank1 = lines(lower(make("zb-h2", 2, 3), "post-validate"))
    assert rank0[:6] == ["NORM", "F s0 m0", "SEND_F s0 m0 >r1", "VERDICT", "REDO", "F s0 m1"]
    assert rank0[rank0.index("COMMIT s0") - 1 :][:3] == ["SEND_F s0 m2 >r1", "COMMIT s0", "B s0 m0"]
    assert rank1[:6] == ["NORM", "VERDICT", "RECV_F s1 m0 <r0", "REDO", "F s1 m0", "COMMIT s1"]
    assert (rank0[-1], rank1[-1]) == ("TENTATIVE s0", "TENTATIVE s1")


def test_only_replicated_stages_are_reduced_and_every_holder_meets_in_one_order():
    """Stage 1 is complete first, so all start with it, although rank 1 has finished its copy of stage 0 before."""
    ops = listing("rank 0: F s0 m0, BW s0 m0\nrank 1: F s1 m0, BW s1 m0", Placement.bidirectional((0, 1)))
    assert lines(ran(ReduceGrads(), ops)) == [
        ["REDUCE s1", "F s0 m0", "BW s0 m0", "REDUCE s0"],
        ["F s1 m0", "BW s1 m0", "REDUCE s1", "REDUCE s0"],
    ]
    plain = make("1f1b", 2, 2)
    assert ran(ReduceGrads(), plain) is plain


def test_sums_stand_behind_the_last_weight_gradient_and_what_leaves_with_it():
    turn = listing("rank 0: F s0 m0, F s1 m0, B s1 m0, W s1 m0, B s0 m0, W s0 m0", Placement.vshape(1))
    after = ran(ReduceGrads(), replace(turn, dp=2))
    assert lines(after) == [
        ["F s0 m0", "F s1 m0", "B s1 m0", "W s1 m0", "REDUCE s1", "B s0 m0", "W s0 m0", "REDUCE s0"]
    ]
    rank1 = lines(lower(replace(make("1f1b", 2, 1), dp=2)))[1]
    assert rank1 == ["RECV_F s1 m0 <r0", "F s1 m0", "BW s1 m0", "SEND_B s1 m0 >r0", "REDUCE s1", "VALIDATE", "STEP s1"]


def test_a_weight_shared_by_two_stages_is_summed_behind_both():
    ends = lower(replace(make("1f1b", 3, 1), tied=True))
    assert [ops[-3:] for ops in lines(ends)] == [
        ["REDUCE t", "VALIDATE", "STEP s0"],
        ["SEND_B s1 m0 >r0", "VALIDATE", "STEP s1"],
        ["REDUCE t", "VALIDATE", "STEP s2"],
    ]
    turn = lower(replace(make("zb-v", 2, 2), tied=True))
    assert not any(op.stage == TIED for _, _, op in turn), "both stages are on rank 0, which shares the weight"
    assert sum(op.stage == TIED for _, _, op in lower(replace(make("zb-v", 2, 2), tied=True, dp=2))) == 1


def test_copies_that_step_parts_of_a_stage_gather_its_weights():
    after = lines(lower(replace(make("zb-v", 2, 2), dp=2, sharded=True)))
    first = ["GATHER s0", "GATHER s3", "F s0 m0"]
    assert [ops[:3] for ops in after] == [first, ["GATHER s1", "GATHER s2", "RECV_F s1 m0 <r0"]]
    assert [ops[-2:] for ops in after] == [["STEP s0", "STEP s3"], ["STEP s1", "STEP s2"]]
    alone = lower(replace(make("zb-v", 2, 2), sharded=True))
    assert not any(op.kind in (Kind.GATHER, Kind.REDUCE) for _, _, op in alone)


@every
@pytest.mark.parametrize(("copies", "tied", "sharded"), [(1, True, False), (2, False, False), (3, True, True)])
def test_sums_pass_all_checks_and_run_on_every_copy(name, copies, tied, sharded):
    for p, m in [(1, 2), (2, 3), (4, 5)]:
        for v in chunk_counts(name):
            made = make(name, p, m, v)
            made = replace(made, dp=copies, tied=tied and made.placement.stages > 1, sharded=sharded)
            after = lower(made)
            check_all(after)
            assert operational.run(after).ok


@pytest.mark.long
def test_sums_of_random_orders_and_placements_never_deadlock():
    """Also with several groups of ranks: pipes in both directions, a weight shared by the ends."""
    met = 0
    for seed in range(300):
        rng = random.Random(seed)
        made = any_order(rng, placement(rng), rng.randint(1, 4), 1)
        made = replace(made, dp=rng.choice([1, 2]), tied=made.placement.stages > 1 and rng.random() < 0.5)
        after = ran(OptimizerStep(), ran(ReduceGrads(), ran(InsertComm(), made)))
        met += sum(op.kind is Kind.REDUCE for _, _, op in after)
        if verdict(check_deadlock, ran(InsertComm(), made)) is None:  # sums cannot fix a deadlock of transfers
            check_all(after)
    assert met > 300


@every
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 5), (3, 4), (4, 8), (5, 3)])
def test_lowering_changes_neither_the_compute_order_nor_the_prediction(name, p, m):
    for v in chunk_counts(name):
        before = make(name, p, m, v)
        commed = ran(InsertComm(), before)
        kept = [tuple(op for op in ops if op.kind.computes) for ops in commed.ranks]
        assert kept == list(before.ranks)
        after = lower(before)
        for comm in (0.0, 0.25):
            times = (1.0, 2.0, 0.5, comm)
            assert timed(after, *times).makespan == pytest.approx(timed(before, *times).makespan)
        transfers = sum(op.kind.is_transfer for _, _, op in after)
        pipe = before.placement.pipes[0]
        assert transfers == 2 * 2 * sum(a != b for a, b in pairwise(pipe)) * m
        assert after.history[1:] == (InsertComm.name, FuseBackward.name, OptimizerStep.name)
