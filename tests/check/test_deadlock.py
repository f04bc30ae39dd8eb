"""Ranks that wait for each other forever: E201."""

import subprocess
import sys

import pytest

from tests.check import operational
from tests.check.certificate import check_circle, check_places, circles
from tests.listing import listing
from tests.lowered import lower
from tests.refusals import facts
from tests.tiers import few
from zbc.compiler.check import check_all, check_complete, check_deadlock, check_pairing, survives_blocking_sends
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement, Program

CROSSED = """
    rank 0
      F s0 m0
      SEND_F s0 m0 >r1
      F s0 m1
      SEND_F s0 m1 >r1
      RECV_B s0 m0 <r1
      BW s0 m0
      RECV_B s0 m1 <r1
      BW s0 m1
    rank 1
      RECV_F s1 m0 <r0
      F s1 m0
      BW s1 m0
      SEND_B s1 m0 >r0
      RECV_F s1 m1 <r0
      F s1 m1
      BW s1 m1
      SEND_B s1 m1 >r0
"""


def error_of(program: Program, **how: bool) -> ZbcError:
    """The error of check_deadlock for a program; its cycles are verified as proofs."""
    with pytest.raises(ZbcError) as raised:
        check_deadlock(program, **how)
    check_places(raised.value, program)
    for lines in circles(raised.value):
        check_circle(lines, blocking=how.get("blocking_sends", False))
    return raised.value


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


def test_the_hint_opens_the_circle():
    receive, step_3 = "      RECV_B s0 m0 <r1\n", "      SEND_F s0 m1 >r1\n"
    text = CROSSED.replace(receive, "").replace(step_3, receive + step_3)
    assert survives_blocking_sends(listing(text))


def test_ranks_that_keep_back_what_the_other_needs_deadlock_without_blocking():
    """Rank 0 sends m1 only after the gradient of m0, which rank 1 makes only after it has m1."""
    program = listing("""
        rank 0
          RECV_B s0 m0 <r1, RECV_B s0 m1 <r1
          F s0 m0, SEND_F s0 m0 >r1, F s0 m1
          BW s0 m0
          SEND_F s0 m1 >r1
          BW s0 m1
        rank 1
          RECV_F s1 m0 <r0, RECV_F s1 m1 <r0
          F s1 m0, F s1 m1
          BW s1 m0, SEND_B s1 m0 >r0, BW s1 m1, SEND_B s1 m1 >r0
    """)
    check_complete(program)
    check_pairing(program)
    assert error_of(program).render() == "\n".join(
        [
            "error[E201] deadlock: 2 ops wait for each other",
            "   rank 0 step 5: BW s0 m0  waits for  rank 1 step 5: SEND_B s1 m0 >r0, after step 3",
            "   rank 1 step 3: F s1 m1  waits for  rank 0 step 6: SEND_F s0 m1 >r1, after step 5",
            "   8 of 16 ops never run",
            "   = on rank 0, bring step 6 and what it needs before step 5",
        ]
    )


STEPS = """
    rank 0: F s0 m0, SEND_F s0 m0, RECV_B s0 m0, BW s0 m0, VALIDATE, STEP s0
    rank 1: RECV_F s1 m0, F s1 m0, BW s1 m0, {}
"""
FIRST, SECOND = "      RECV_F s1 m0 <r0\n", "      RECV_F s1 m1 <r0\n"
SWAPPED = CROSSED.replace(SECOND, "").replace(FIRST, SECOND + FIRST)
HALVES = """
    rank 0: F s0 m0, SEND_F s0 m0, F s0 m0.1, SEND_F s0 m0.1
    rank 1: RECV_F s1 m0, RECV_F s1 m0.1, F s1 m0.1, F s1 m0
"""
PAIR, ONE = "2 ops wait for each other", "an op waits for a later op of its own rank"
WAIT = "{}  waits for  {}, after step {}"
FAULTS = {  # a listing, and what its first error tells
    "a schedule, whose ranks wait for ops of others": (
        "rank 0: F s0 m0, BW s0 m0, F s0 m1, BW s0 m1\nrank 1: F s1 m0, F s1 m1, BW s1 m0, BW s1 m1",
        PAIR,
        WAIT.format("rank 0 step 1: BW s0 m0", "rank 1 step 2: BW s1 m0", 1),
        WAIT.format("rank 1 step 1: F s1 m1", "rank 0 step 2: F s0 m1", 1),
    ),
    "a message after the barrier, needed before it": (
        STEPS.format("VALIDATE, SEND_B s1 m0, STEP s1"),
        PAIR,
        WAIT.format("rank 0 step 3: BW s0 m0", "rank 1 step 4: SEND_B s1 m0 >r0", 3),
        WAIT.format("rank 1 step 3: VALIDATE", "rank 0 step 4: VALIDATE", 3),
    ),
    "a rank that stays away": (
        STEPS.format("SEND_B s1 m0"),
        "VALIDATE never comes on rank 1",
        "rank 0 step 4: VALIDATE  waits for it",
    ),
    "a message that nobody receives": (
        CROSSED + "      SEND_B s1 m0 >r0\n",
        "a second RECV_B s0 m0 <r1 never comes on rank 0",
        "rank 1 step 8: SEND_B s1 m0 >r0  waits for it",
    ),
    "a missing op of a schedule": (
        "rank 0: BW s0 m0\nrank 1: F s1 m0, BW s1 m0",
        "F s0 m0 never comes on rank 0",
        "rank 0 step 0: BW s0 m0  waits for it",
        "rank 1 step 0: F s1 m0  waits for it",
    ),
    "a channel whose ends disagree": (
        SWAPPED,
        "channel r0 -> r1 stands still at message 0: rank 0 sends SEND_F s0 m0 >r1, rank 1 receives RECV_F s1 m1 <r0",
        "rank 0 step 1: SEND_F s0 m0 >r1  waits for it",
    ),
    "a backward first": (
        "rank 0: BW s0 m0, F s0 m0",
        ONE,
        WAIT.format("rank 0 step 0: BW s0 m0", "rank 0 step 1: F s0 m0", 0),
        "on rank 0, bring step 1 and what it needs before step 0",
    ),
    "a slice that came for one that did not": (
        HALVES,
        ONE,
        WAIT.format("rank 1 step 2: F s1 m0.1", "rank 1 step 3: F s1 m0", 2),
    ),
} | {
    f"{first} first": (
        f"rank 0: F s0 m0, BW s0 m0, {first}, {second}{rest}",
        ONE,
        WAIT.format(f"rank 0 step 2: {first}", f"rank 0 step 3: {second}", 2),
    )
    for first, second, rest in (("STEP s0", "VALIDATE", ""), ("VALIDATE", "REDUCE s0", ", STEP s0"))
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_with_those_that_wait(fault):
    text, said, *more = FAULTS[fault]
    first, *others = facts(error_of(listing(text)).errors[0])
    assert first == f"E201 {said}" and {*more} <= {*others}


def test_an_op_that_waits_for_the_last_op_of_the_rank_before_is_not_taken_for_its_neighbour():
    """The first op of rank 1 depends on the last op of rank 0, whose number is one less."""
    program = listing("rank 0: BW s0 m0, F s0 m0\nrank 1: F s1 m0, BW s1 m0")
    assert circles(error_of(program))


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


def test_a_ring_is_followed_through_all_its_ranks():
    program = ring(4)
    check_complete(program)
    error = error_of(program)
    assert error.message == "deadlock: 4 ops wait for each other"
    [lines] = circles(error)
    assert sorted(line[1] for line in lines) == ["0", "1", "2", "3"]


def test_a_long_circle_is_shown_by_its_beginning_and_its_end():
    with pytest.raises(ZbcError) as raised:
        check_deadlock(ring(16))
    assert raised.value.message == "deadlock: 16 ops wait for each other"
    assert len(raised.value.details) == 14
    assert raised.value.details[10] == "... 4 more waits, each for the next ..."


def test_ranks_that_sum_in_different_orders_deadlock():
    both = Placement.bidirectional([0, 1])
    text = """
        rank 0: F s0 m0, SEND_F s0 m0, RECV_B s0 m0, BW s0 m0, REDUCE s0, REDUCE s1, VALIDATE, STEP s0, STEP s1
        rank 1: RECV_F s1 m0, F s1 m0, BW s1 m0, SEND_B s1 m0, {}, VALIDATE, STEP s0, STEP s1
    """
    check_all(listing(text.format("REDUCE s0, REDUCE s1"), both))
    error = error_of(listing(text.format("REDUCE s1, REDUCE s0"), both))
    assert error.details[:2] == (
        "rank 0 step 4: REDUCE s0  waits for  rank 1 step 5: REDUCE s0, after step 4",
        "rank 1 step 4: REDUCE s1  waits for  rank 0 step 5: REDUCE s1, after step 4",
    )
    assert error.hint.startswith("let all ranks meet in the same order")


def test_a_sum_is_started_and_does_not_hold_up_its_rank():
    """Rank 0 starts the sum of stage 0 before it sends a tensor that rank 1 needs before its own sum."""
    both = Placement.bidirectional([0, 1])
    program = listing(
        """
        rank 0
          RECV_F s1 m1 up, RECV_B s0 m0
          F s0 m0, SEND_F s0 m0, BW s0 m0, REDUCE s0
          F s1 m1 up, BW s1 m1 up, SEND_B s1 m1 up, REDUCE s1
        rank 1
          RECV_F s1 m0, RECV_B s0 m1 up
          F s0 m1 up, SEND_F s0 m1 up, F s1 m0, BW s1 m0, SEND_B s1 m0, BW s0 m1 up, REDUCE s0, REDUCE s1
        """,
        both,
    )
    check_all(program)
    assert operational.run(program).ok


def test_a_rank_that_judges_waits_for_the_sums_its_own_stand_behind():
    """VALIDATE of rank 1 waits for REDUCE s0, queued on rank 0 after REDUCE s1, which rank 1 starts after VALIDATE."""
    program = listing(
        """
        rank 0: F s0 m0, SEND_F s0 m0, RECV_B s0 m0, BW s0 m0, REDUCE s1, REDUCE s0, VALIDATE, STEP s0, STEP s1
        rank 1: RECV_F s1 m0, F s1 m0, BW s1 m0, SEND_B s1 m0, REDUCE s0, VALIDATE, REDUCE s1, STEP s0, STEP s1
        """,
        Placement.bidirectional([0, 1]),
    )
    assert not operational.run(program).ok
    error = error_of(program)
    assert error.details[0] == "rank 1 step 5: VALIDATE  waits for  rank 1 step 6: REDUCE s1, after step 5"


# ---- programs the other checks reject ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dropped", "waiter"),
    [
        ("SEND_F s0 m1 >r1", "rank 1 step 4: RECV_F s1 m1 <r0  waits for it"),
        ("SEND_F s0 m1 >r1", "rank 1 step 5: F s1 m1  waits for it"),
        ("RECV_F s1 m1 <r0", "rank 1 step 4: F s1 m1  waits for it"),
        ("RECV_F s1 m1 <r0", "rank 0 step 3: SEND_F s0 m1 >r1  waits for it"),
        ("SEND_B s1 m0 >r0", "rank 0 step 4: RECV_B s0 m0 <r1  waits for it"),
        ("F s0 m1", "rank 0 step 2: SEND_F s0 m1 >r1  waits for it"),
    ],
)
def test_what_never_comes_is_named_with_the_ops_that_wait_for_it(dropped, waiter):
    error = error_of(listing(CROSSED.replace(f"      {dropped}\n", "")))
    rank = 0 if " s0 " in dropped else 1
    assert error.message == f"deadlock: {dropped} never comes on rank {rank}"
    assert waiter in error.details


def test_a_circle_and_what_never_comes_are_both_reported():
    text = """
        rank 0: F s0 m0, BW s0 m0, F s0 m1, BW s0 m1, BW s0 m2
        rank 1: F s1 m0, F s1 m1, BW s1 m0, BW s1 m1, F s1 m2, BW s1 m2
    """
    messages = [error.message for error in error_of(listing(text)).errors]
    assert messages == ["deadlock: 2 ops wait for each other", "deadlock: F s0 m2 never comes on rank 0"]


@pytest.mark.parametrize("op", ["F s9 m0", "SEND_F s1 m0", "RECV_F s0 m0", "F s0 m1 up", "REDUCE s7", "STEP s0"])
def test_any_program_gets_an_answer(op):
    program = listing(CROSSED + f"      {op}\n", Placement.linear(2))
    for blocking in (False, True):
        try:
            check_deadlock(program, blocking_sends=blocking)
        except ZbcError as error:
            assert {problem.code for problem in error.errors} == {"E201"}


# ---- what is right passes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    few(SCHEDULES, lambda n: n not in ("v-half", "v-min", "v-auto", "1f1b-v", "bitpipe", "bitpipe-zb", "looped-zb")),
)
def test_every_schedule_is_proven_before_and_after_lowering(name):
    schedule = SCHEDULES[name]
    for p in (p for p in (1, 2, 3, 4, 8) if p % schedule.ranks_in == 0):
        for m in (1, 2, 3, 5, 8, 16):
            program = schedule.make(Request(p, m, schedule.default_chunks))
            check_all(program)
            check_all(lower(program))


def test_programs_that_pass_do_not_import_networkx_or_torch():
    code = (
        "import sys\n"
        "from zbc.compiler.check import check_all\n"
        "from zbc.ir import Kind, Op, Placement, Program\n"
        "check_all(Program(Placement.linear(1), 1, ((Op(Kind.F, 0), Op(Kind.BW, 0)),)))\n"
        "print(sorted({'networkx', 'torch'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
