"""Ranks that wait for each other forever: E201."""

from itertools import product

import pytest

from tests import refusals
from tests.check.certificate import check_circle, check_places, circles
from tests.check.each import check_complete, check_deadlock, survives_blocking_sends
from tests.compiler.grid import chunk_counts
from tests.listing import listing
from tests.lowered import lower
from tests.refusals import facts, refused
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement, Program

CROSSED = """
    rank 0: F s0 m0, SEND_F s0 m0 >r1, F s0 m1, SEND_F s0 m1 >r1, RECV_B s0 m0 <r1, BW s0 m0, RECV_B s0 m1 <r1, BW s0 m1
    rank 1: RECV_F s1 m0 <r0, F s1 m0, BW s1 m0, SEND_B s1 m0 >r0, RECV_F s1 m1 <r0, F s1 m1, BW s1 m1, SEND_B s1 m1 >r0
"""


def error_of(program: Program, **how: bool) -> ZbcError:
    """The error of check_deadlock for a program; its cycles are verified as proofs."""
    error = refusals.error_of(check_deadlock, program, **how)
    check_places(error, program)
    for lines in circles(error):
        check_circle(lines, program, blocking=how.get("blocking_sends", False))
    return error


def test_two_blocking_sends_that_cross_are_named_with_the_receives_they_wait_for():
    program = listing(CROSSED)
    check_all(program)
    error = error_of(program, blocking_sends=True)
    assert not survives_blocking_sends(program)
    assert error.render() == "\n".join(
        [
            "error[E201] deadlock: 2 transfers wait for each other",
            "   rank 0 step 3: SEND_F s0 m1 >r1  waits for  rank 1 step 4: RECV_F s1 m1 <r0, after step 3",
            "   rank 1 step 3: SEND_B s1 m0 >r0  waits for  rank 0 step 4: RECV_B s0 m0 <r1, after step 3",
            "   10 of 16 ops never run",
            "   = post RECV_B s0 m0 <r1 on rank 0 before step 3, in the order of its channel",
        ]
    )


STEPS = """
    rank 0: F s0 m0, SEND_F s0 m0, RECV_B s0 m0, BW s0 m0, VALIDATE, STEP s0
    rank 1: RECV_F s1 m0, F s1 m0, BW s1 m0, {}
"""
PAIR = "2 ops wait for each other"
WAIT = "{}  waits for  {}, after step {}"
SUMS = """
    rank 0: F s0 m0, SEND_F s0 m0, RECV_B s0 m0, BW s0 m0, REDUCE s0, REDUCE s1, VALIDATE, STEP s0, STEP s1
    rank 1: RECV_F s1 m0, F s1 m0, BW s1 m0, SEND_B s1 m0, REDUCE s1, REDUCE s0, VALIDATE, STEP s0, STEP s1
"""
FAULTS = {  # a listing, and what its first error tells
    "sums in two orders": (
        SUMS,
        PAIR,
        WAIT.format("rank 0 step 4: REDUCE s0", "rank 1 step 5: REDUCE s0", 4),
        WAIT.format("rank 1 step 4: REDUCE s1", "rank 0 step 5: REDUCE s1", 4),
        "let all ranks meet in the same order, each after the work it closes",
    ),
    "a schedule, whose ranks wait for ops of others": (
        "rank 0: F s0 m0, BW s0 m0, F s0 m1, BW s0 m1\nrank 1: F s1 m0, F s1 m1, BW s1 m0, BW s1 m1",
        PAIR,
        WAIT.format("rank 0 step 1: BW s0 m0", "rank 1 step 2: BW s1 m0", 1),
        WAIT.format("rank 1 step 1: F s1 m1", "rank 0 step 2: F s0 m1", 1),
        "on rank 0, bring step 2 and what it needs before step 1",
    ),
    "a message after the barrier, needed before it": (
        STEPS.format("VALIDATE, SEND_B s1 m0, STEP s1"),
        PAIR,
        WAIT.format("rank 0 step 3: BW s0 m0", "rank 1 step 4: SEND_B s1 m0 >r0", 3),
        WAIT.format("rank 1 step 3: VALIDATE", "rank 0 step 4: VALIDATE", 3),
    ),
    "a missing op of a schedule": (
        "rank 0: BW s0 m0\nrank 1: F s1 m0, BW s1 m0",
        "3 of 3 ops never run",
        "rank 0 step 0: BW s0 m0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_with_those_that_wait(fault):
    text, said, *more = FAULTS[fault]
    first, *others = facts(error_of(listing(text, Placement.bidirectional([0, 1]) if text == SUMS else None)).errors[0])
    assert first == f"E201 {said}" and {*more} <= {*others}


def test_norms_that_wait_in_a_circle_are_a_deadlock():
    """Rank 1 takes the norm only after a forward whose input rank 0 sends after the verdict."""
    with refused("E201", "wait for each other"):
        check_deadlock(
            listing("""
            rank 0: NORM, VERDICT, REDO, F s0 m0, SEND_F s0 m0, RECV_B s0 m0, COMMIT s0, BW s0 m0, TENTATIVE s0
            rank 1: RECV_F s1 m0, F s1 m0, NORM, VERDICT, REDO, COMMIT s1, BW s1 m0, SEND_B s1 m0, TENTATIVE s1
        """)
        )


def test_the_shortest_of_several_circles_is_named():
    """Ranks 0, 1, 2 wait in a ring of three, and further on ranks 2 and 3 for each other."""
    program = listing("""
        rank 0: F s0 m0, F s0 m1, BW s0 m1, F s0 m2, BW s0 m0, BW s0 m2
        rank 1: F s1 m0, F s1 m1, F s1 m2, BW s1 m0, BW s1 m1, BW s1 m2
        rank 2: F s2 m0, F s2 m1, BW s2 m0, BW s2 m1, F s2 m2, BW s2 m2
        rank 3: F s3 m0, F s3 m1, F s3 m2, BW s3 m0, BW s3 m1, BW s3 m2
    """)
    check_complete(program)
    [lines] = circles(error_of(program))
    assert len(lines) == 2
    with_gap = error_of(program).details
    assert "rank 0 step 2: BW s0 m1  waits for  rank 1 step 4: BW s1 m1, after step 2" in with_gap


def ring(p: int) -> Program:
    """A ring of waits: each rank's first op depends on the last forward of the rank before; pipe k starts on rank k."""
    ranks = []
    for r in range(p):
        held = [(s, (r - s) % p) for s in (p - 1, *range(p - 1))]  # (stage, pipe), the last stage first
        forward = [Op(Kind.F, s, pipe, pipe) for s, pipe in held]
        ranks.append((*forward, *(op._replace(kind=Kind.BW) for op in reversed(forward))))
    pipes = tuple(tuple((start + s) % p for s in range(p)) for start in range(p))
    return Program(Placement(pipes), p, tuple(ranks))


def test_a_long_circle_is_shown_by_its_beginning_and_its_end():
    error = refusals.error_of(check_deadlock, ring(16))
    assert error.message == "deadlock: 16 ops wait for each other"
    assert len(error.details) == 14 and error.details[10] == "... 4 more waits, each for the next ..."


@pytest.mark.long("gis", "hanayo", "braid-v", "chimera-zb", "breadth-first", "interleaved-1f1b")
@pytest.mark.parametrize(
    "name",
    few(SCHEDULES, lambda n: n not in ("v-half", "v-min", "v-auto", "1f1b-v", "bitpipe", "bitpipe-zb", "looped-zb")),
)
def test_every_schedule_is_proven_before_and_after_lowering(name):
    """Every stage runs every microbatch once, on its own rank; public generators lose microbatches from 3p on."""
    schedule = SCHEDULES[name]
    for p in (p for p in (1, 2, 3, 4, 8) if p % schedule.ranks_in == 0):
        for m, v in product((1, 3, 8, 13), chunk_counts(name)):
            program = schedule.make(Request(p, m, v))
            check_all(program)
            check_all(lower(program))
