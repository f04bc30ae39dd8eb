"""Completeness, ranks and order of ops, transfers in pairs: E202 to E206; and agreement with the job."""

import re
from dataclasses import replace

import pytest

from tests.check.each import check_complete
from tests.check.test_copies import LINES, ONE, shared
from tests.jobs import job
from tests.listing import listing
from tests.lowered import lower
from tests.refusals import error_of, facts
from zbc.compiler.check import check_all
from zbc.compiler.check.asked import missing_problems
from zbc.compiler.check.faults import op_faults
from zbc.compiler.compile import compile_job
from zbc.compiler.graph import build
from zbc.ir import Kind, Op, Placement, Program
from zbc.ops import ROWS, Ref, rows_with

TWO_RANKS = """
    rank 0: F s0 m0, F s0 m1, B s0 m0, W s0 m0, BW s0 m1
    rank 1: F s1 m0, BW s1 m0, F s1 m1, BW s1 m1
"""

STEPPING = """
    rank 0: RECV_B s0 m0 <r1, F s0 m0, SEND_F s0 m0 >r1, BW s0 m0, VALIDATE, STEP s0
    rank 1: RECV_F s1 m0 <r0, F s1 m0, BW s1 m0, SEND_B s1 m0 >r0, VALIDATE, STEP s1
"""

BOTH_WAYS = """
    rank 0: F s0 m0, F s1 m1 up, BW s1 m1 up, BW s0 m0, REDUCE s0, REDUCE s1, VALIDATE, STEP s0, STEP s1
    rank 1: F s0 m1 up, F s1 m0, BW s1 m0, BW s0 m1 up, REDUCE s0, REDUCE s1, VALIDATE, STEP s1, STEP s0
"""
SUMMING = re.sub(", VALIDATE, STEP .*", "", BOTH_WAYS)


PIPELINE = """
    rank 0: F s0 m0, SEND_F s0 m0 >r1, RECV_B s0 m0 <r1, F s0 m1, SEND_F s0 m1 >r1, RECV_B s0 m1 <r1, BW s0 m0, BW s0 m1
    rank 1: RECV_F s1 m0 <r0, RECV_F s1 m1 <r0, F s1 m0, BW s1 m0, SEND_B s1 m0 >r0, F s1 m1, BW s1 m1, SEND_B s1 m1 >r0
"""

AHEAD = """
    rank 0: NORM, VERDICT, F s0 m0, SEND_F s0 m0 >r1, REDO, RECV_B s0 m0 <r1, COMMIT s0, BW s0 m0, TENTATIVE s0
    rank 1: NORM, VERDICT, RECV_F s1 m0 <r0, F s1 m0, REDO, COMMIT s1, BW s1 m0, SEND_B s1 m0 >r0, TENTATIVE s1
"""
DIAMOND = Placement(((0, 1, 2, 3),), ((0, 1), (0, 2), (1, 3), (2, 3)))


def diamond() -> Program:
    ranks = tuple((Op(Kind.F, s), Op(Kind.BW, s)) for s in range(4))
    return lower(Program(DIAMOND, 1, ranks, ("by hand",)))


V, ONE_RANK = Placement.vshape(1), Placement.linear(1)
BOTH, ALONE = Placement.bidirectional([0, 1]), Placement.bidirectional([0])
UP = "rank 0: F s0 m0, BW s0 m0, F s0 m1 up, BW s0 m1 up, VALIDATE, STEP s0"
FOLDED = "rank 0: F s0 m0, F s1 m0, BW s1 m0, BW s0 m0"
SLICED = "rank 0: F s0 m0, F s0 m0.1, BW s0 m0.1, BW s0 m0"
BARE = "rank 0: F s0 m0, BW s0 m0\nrank 1: F s1 m0, BW s1 m0"
THREE = """
    rank 0
      F s0 m0, SEND_F s0 m0, F s0 m1, SEND_F s0 m1, F s0 m2, SEND_F s0 m2
      RECV_B s0 m0, RECV_B s0 m1, RECV_B s0 m2, BW s0 m0, BW s0 m1, BW s0 m2
    rank 1
      RECV_F s1 m0, RECV_F s1 m1, RECV_F s1 m2, F s1 m0, F s1 m1, F s1 m2
      BW s1 m0, SEND_B s1 m0, BW s1 m1, SEND_B s1 m1, BW s1 m2, SEND_B s1 m2
"""
COPYING = f"rank 0: {LINES}"
PLACES = {BOTH_WAYS: BOTH, SUMMING: BOTH, UP: ALONE, FOLDED: V}


@pytest.mark.parametrize("text", [TWO_RANKS, STEPPING, PIPELINE, AHEAD, UP, FOLDED, SLICED, BARE, THREE])
def test_what_is_complete_passes(text):
    """Backwards may be split or not, microbatches take different pipes, a schedule has no transfers or all of them."""
    check_all(listing(text, PLACES.get(text)))


@pytest.mark.parametrize("text", [BOTH_WAYS, SUMMING.replace(", REDUCE s1", "")])
def test_copies_of_a_stage_have_microbatches_of_their_own(text):
    check_complete(listing(text, BOTH))


EARLY = "E206 {} comes before {}, which it needs"
OUTSIDE = "E202 {} is outside the program, which has {} stages, {} microbatches{}"
NEVER = "E202 rank {} never runs {}"
NOBODY = "E202 no rank runs {}"
WHOLE = " (or its B and W)"
AGAIN = "E206 {} s0 m0 runs a second time"
MISSING = "E203 {} has no {}"
NEITHER = "E203 SEND_F s0 m0 >r1 and RECV_F s1 m0 <r0 are missing"
MIXED = "E204 channel r0 -> r1 message {}: rank 0 sends SEND_F s0 m{} >r1, rank 1 receives RECV_F s1 m{} <r0"
NOTHING = "E203 {} carries nothing: no stage reads the output of stage 1"
CUT = "E206 {} comes before REDO and {} after it"
FAULTS = [  # a text, a part of it and what stands there instead; all errors, those that tell more as tuples
    (
        *(TWO_RANKS, "BW s1 m1", "BW s1 m1, F s1 m0"),
        ("E202 F s1 m0 runs a second time", "rank 1 step 4", "first at rank 1 step 0: F s1 m0"),
    ),
    (
        *(TWO_RANKS, "BW s1 m1", "BW s1 m1, W s1 m0"),
        ("E202 W s1 m0 repeats a part of BW s1 m0", "rank 1 step 4", "also rank 1 step 1: BW s1 m0"),
    ),
    (TWO_RANKS, " F s0 m1,", "", (NOBODY.format("F s0 m1"), "add it on rank 0")),
    (TWO_RANKS, ", BW s1 m1", "", (NOBODY.format("BW s1 m1" + WHOLE), "add it on rank 1")),
    (TWO_RANKS, " B s0 m0,", "", (NOBODY.format("B s0 m0"), "add it on rank 0")),
    (TWO_RANKS, " W s0 m0,", "", (NOBODY.format("W s0 m0"), "add it on rank 0")),
    (TWO_RANKS, "BW s1 m1", "BW s1 m1, F s2 m0", (OUTSIDE.format("F s2 m0", 2, 2, ""), "rank 1 step 4")),
    (TWO_RANKS, "BW s1 m1", "BW s1 m1, F s1 m0 up", (OUTSIDE.format("F s1 m0 up", 2, 2, ", 1 pipes"), "rank 1 step 4")),
    (STEPPING, "VALIDATE, STEP s1", "STEP s1", NEVER.format(1, "VALIDATE")),  # they come all or not at all
    (STEPPING, ", STEP s1", "", NEVER.format(1, "STEP s1")),
    (STEPPING, "STEP s1", "STEP s1, STEP s2", (OUTSIDE.format("STEP s2", 2, 1, ""), "rank 1 step 6")),
    (UP, "STEP s0", "STEP s0, STEP s0", "E202 STEP s0 runs a second time"),
    # Stages of one rank go in the order of the pipeline, its slices in theirs, backwards in reverse.
    (FOLDED, "F s0 m0, F s1 m0", "F s1 m0, F s0 m0", EARLY.format("F s1 m0", "F s0 m0")),
    (FOLDED, "BW s1 m0, BW s0 m0", "BW s0 m0, BW s1 m0", EARLY.format("BW s0 m0", "BW s1 m0")),
    (SLICED, "F s0 m0, F s0 m0.1", "F s0 m0.1, F s0 m0", EARLY.format("F s0 m0.1", "F s0 m0")),
    (SLICED, "BW s0 m0.1, BW s0 m0", "BW s0 m0, BW s0 m0.1", EARLY.format("BW s0 m0", "BW s0 m0.1")),
    # A sum waits for the last weight gradient of its stage in both pipes; all holders sum, wherever a step ends.
    (
        *(BOTH_WAYS, "BW s0 m0, REDUCE s0", "REDUCE s0, BW s0 m0"),
        (EARLY.format("REDUCE s0", "BW s0 m0"), "move step 4 before step 3"),
    ),
    (BOTH_WAYS, "REDUCE s1, VALIDATE", "VALIDATE, REDUCE s1", EARLY.format("VALIDATE", "REDUCE s1")),
    (BOTH_WAYS, "REDUCE s1, VALIDATE, STEP s1", "VALIDATE, STEP s1", NEVER.format(1, "REDUCE s1")),
    (SUMMING, "REDUCE s0, REDUCE s1", "REDUCE s0", NEVER.format(0, "REDUCE s1")),
    (
        *(BOTH_WAYS, "rank 0: F s0 m0,", "rank 0: F s0 m0, F s1 m0 up,"),
        ("E202 microbatch 0 runs in 2 pipes", "pipe 0: rank 0 step 0: F s0 m0", "pipe 1: rank 0 step 1: F s1 m0 up"),
        NOBODY.format("BW s1 m0 up" + WHOLE),
    ),
    # Channels are not numbered by guess where messages are missing.
    (PIPELINE, " SEND_F s0 m1 >r1,", "", (MISSING.format("RECV_F s1 m1 <r0", "SEND_F s0 m1 >r1"), "rank 1 step 1")),
    (PIPELINE, " RECV_B s0 m0 <r1,", "", (MISSING.format("SEND_B s1 m0 >r0", "RECV_B s0 m0 <r1"), "rank 1 step 4")),
    (
        *(PIPELINE, "SEND_B s1 m1 >r0", "SEND_B s1 m1, SEND_B s1 m0"),
        ("E203 SEND_B s1 m0 >r0 runs a second time", "rank 1 step 8"),
    ),
    (PIPELINE, "SEND_B s1 m1 >r0", "SEND_B s1 m1, SEND_F s1 m0", NOTHING.format("SEND_F s1 m0")),
    (PIPELINE, "SEND_B s1 m1 >r0", "SEND_B s1 m1, RECV_B s1 m1", NOTHING.format("RECV_B s1 m1")),
    (
        *(PIPELINE, "RECV_F s1 m0 <r0, RECV_F s1 m1 <r0", "RECV_F s1 m1 <r0, RECV_F s1 m0 <r0"),
        (MIXED.format(0, 0, 1), "rank 0 step 1: SEND_F s0 m0 >r1", "rank 1 step 0: RECV_F s1 m1 <r0"),
    ),
    (THREE, "RECV_F s1 m1, RECV_F s1 m2", "RECV_F s1 m2, RECV_F s1 m1", MIXED.format(1, 1, 2)),
    (
        *(FOLDED, "F s1 m0,", "SEND_F s0 m0, RECV_F s1 m0, F s1 m0,"),
        "E203 SEND_F s0 m0 carries nothing: stages 0 and 1 are both on rank 0",
        "E203 RECV_F s1 m0 carries nothing: stages 1 and 0 are both on rank 0",
    ),
    # Of a step without a barrier both ends of a message come before REDO or after it.
    (
        *(AHEAD, "RECV_F s1 m0 <r0, F s1 m0, REDO,", "REDO, RECV_F s1 m0 <r0, F s1 m0,"),
        CUT.format("SEND_F s0 m0 >r1", "RECV_F s1 m0 <r0"),
    ),
    (
        *(AHEAD, "F s0 m0, SEND_F s0 m0 >r1, REDO,", "REDO, F s0 m0, SEND_F s0 m0 >r1,"),
        CUT.format("RECV_F s1 m0 <r0", "SEND_F s0 m0 >r1"),
    ),
    (
        *(AHEAD, "REDO, RECV_B s0 m0 <r1,", "RECV_B s0 m0 <r1, REDO,"),
        EARLY.format("RECV_B s0 m0", "REDO"),
        CUT.format("RECV_B s0 m0 <r1", "SEND_B s1 m0 >r0"),
    ),
    (
        *(AHEAD, "TENTATIVE s1", "TENTATIVE s1, VALIDATE"),
        "E202 VALIDATE repeats a part of VERDICT",
        "E202 NORM belongs to a step without a barrier, which this one has",
        *(NEVER.format(*each) for each in ((0, "VALIDATE"), (0, "STEP s0"), (1, "STEP s1"))),
    ),
    (COPYING, "RELOAD s0 m0, ", "", "E206 no rank runs RELOAD s0 m0"),
    (COPYING, "OFFLOAD s0 m0, ", "", "E206 no rank runs OFFLOAD s0 m0"),
    (COPYING, "RELEASE s0 m0, ", "", "E206 no rank runs RELEASE s0 m0"),
    (COPYING, "F s0 m1, ", "", NOBODY.format("F s0 m1")),  # and no copy is missed that would bring the same
    (COPYING, "F s0 m0, OFFLOAD s0 m0", "OFFLOAD s0 m0, F s0 m0", EARLY.format("OFFLOAD s0 m0", "F s0 m0")),
    (COPYING, "RELOAD s0 m0, BW s0 m0", "BW s0 m0, RELOAD s0 m0", EARLY.format("BW s0 m0", "RELOAD s0 m0")),
    (
        *(COPYING, "OFFLOAD s0 m0, F s0 m1, RELEASE s0 m0", "RELEASE s0 m0, F s0 m1, OFFLOAD s0 m0"),
        EARLY.format("RELEASE s0 m0", "OFFLOAD s0 m0"),
        EARLY.format("OFFLOAD s0 m0", "RELOAD s0 m0"),
    ),
    (
        *(
            COPYING,
            "RELEASE s0 m0, F s0 m2, BW s0 m2, BW s0 m1, RELOAD s0 m0",
            "F s0 m2, BW s0 m2, BW s0 m1, RELOAD s0 m0, RELEASE s0 m0",
        ),
        EARLY.format("RELOAD s0 m0", "RELEASE s0 m0"),
    ),
    (COPYING, "OFFLOAD s0 m0, ", "OFFLOAD s0 m0, OFFLOAD s0 m0, ", AGAIN.format("OFFLOAD")),
    (
        *(COPYING, "RELOAD s0 m0,", "RELOAD s0 m0, OFFLOAD s0 m0, RELEASE s0 m0, RELOAD s0 m0,"),
        *map(AGAIN.format, ("OFFLOAD", "RELEASE", "RELOAD")),
    ),
]
PROGRAMS = [
    (Program(Placement.linear(2), 1, ((), ())), "E202 microbatch 0 never runs"),
    (listing(TWO_RANKS, microbatches=3), "E202 microbatch 2 never runs"),
    (listing(TWO_RANKS, microbatches=10**12), "E202 9 ops are too few for 2 stages and 1000000000000 microbatches"),
    (
        listing("rank 0: F s0 m0\nrank 1: F s1 m0", microbatches=40),
        *(f"E202 microbatch {mb} never runs" for mb in range(1, 8)),
        ("E202 microbatch 8 never runs", "and 33 more problems"),
    ),
    (listing(SLICED, slices=3), NOBODY.format("F s0 m0.2"), NOBODY.format("BW s0 m0.2" + WHOLE)),
    *(
        (listing(f"{TWO_RANKS}, {op}", microbatches=2, slices=1), (OUTSIDE.format(op, 2, 2, more), "rank 1 step 4"))
        for op, more in (("F s1 m2", ""), ("SEND_F s0 m7", ""), ("F s1 m0.1", ", 1 slices"))
    ),
    (
        Program(Placement.linear(1), 1, ((Op(Kind.F, -1), Op(Kind.F, 0, -1), Op(Kind.F, 0), Op(Kind.BW, 0)),)),
        ("E202 F v m0 has nothing to work on: there is one replica, or stages hold the vocabulary", "rank 0 step 0"),
        (OUTSIDE.format("F s0 m-1", 1, 1, ""), "rank 0 step 1"),
    ),
    (
        listing("rank 0: F s0 m0, BW s0 m0, VALIDATE\nrank 1: VALIDATE, STEP s0\nrank 2: VALIDATE", ONE_RANK),
        NEVER.format(0, "STEP s0"),
        "E205 STEP s0 is on rank 1, its stage is on rank 0",
    ),
    (
        listing(TWO_RANKS.replace(" F s1 m1,", "").replace("BW s0 m1", "BW s0 m1, F s1 m1")),
        ("E205 F s1 m1 is on rank 0, its stage is on rank 1", "rank 0 step 5", "move it to rank 1"),
    ),
    (listing(BOTH_WAYS.replace("REDUCE s1, ", ""), BOTH), NEVER.format(0, "REDUCE s1"), NEVER.format(1, "REDUCE s1")),
    (
        listing(PIPELINE.replace("SEND_F s0 m1 >r1, ", "") + ", SEND_F s0 m1"),
        "E205 SEND_F s0 m1 >r1 is on rank 1, its stage is on rank 0",
    ),
    (listing(PIPELINE.replace("SEND_F s0 m0 >r1, ", "").replace("RECV_F s1 m0 <r0, ", "")), NEITHER),
    (
        listing(BARE.replace("m0\nrank 1", "m0, VALIDATE, STEP s0\nrank 1") + ", VALIDATE, STEP s1"),
        NEITHER,
        "E203 SEND_B s1 m0 >r0 and RECV_B s0 m0 <r1 are missing",
    ),
]


@pytest.mark.parametrize(
    ("program", "said"),
    [(listing(text.replace(old, new, 1), PLACES.get(text)), said) for text, old, new, *said in FAULTS]
    + [(program, said) for program, *said in PROGRAMS],
)
def test_faults_are_named_once_and_by_their_place(program, said):
    found = [facts(error) for error in error_of(check_all, program).errors]
    wanted = [(one,) if isinstance(one, str) else one for one in said]
    assert [first for first, *_ in found] == [first for first, *_ in wanted]
    assert all({*more} <= {*others} for (_, *more), (_, *others) in zip(wanted, found, strict=True))


def test_a_value_that_is_left_lacks_the_op_that_would_use_it():
    rows = rows_with(()) | {Kind.F: ROWS[Kind.F]._replace(writes=(*ROWS[Kind.F].writes, Ref("host")))}
    [error] = op_faults(build(listing("rank 0: F s0 m0, BW s0 m0"), rows))
    assert (error.code, error.message) == ("E206", "program: no rank runs RELOAD s0 m0")


def test_without_a_shared_vocabulary_its_ops_have_nothing_to_work_on():
    said = "S m0 has nothing to work on: the first and the last stage hold the vocabulary"
    assert said in str(error_of(check_all, replace(shared(ONE), vocabulary=0)))


def test_a_stage_with_several_inputs_names_who_sends_them():
    program = diamond()
    lines = [[DIAMOND.text(op) for op in ops if op.kind.is_transfer] for ops in program.ranks]
    sent = ["RECV_B s0 m0 from s1 <r1", "RECV_B s0 m0 from s2 <r2", "SEND_F s0 m0 to s1 >r1", "SEND_F s0 m0 to s2 >r2"]
    assert lines[0] == sent
    assert lines[1] == ["RECV_F s1 m0 <r0", "RECV_B s1 m0 <r3", "SEND_F s1 m0 >r3", "SEND_B s1 m0 >r0"]
    back = ["RECV_F s3 m0 from s1 <r1", "RECV_F s3 m0 from s2 <r2", "SEND_B s3 m0 to s1 >r1", "SEND_B s3 m0 to s2 >r2"]
    assert lines[3] == back


# ---- what a job asks for ---------------------------------------------------------------------------------------------

TWO = {"dp": 2}
ASKED = {
    "schedule.slices": {"schedule": {"slices": 2}},
    "parallel.tp": {"parallel": {"tp": 2}},
    "parallel.dp": {"parallel": TWO},
    "parallel.average": {"parallel": {**TWO, "average": {"every": 1}}},
    "parallel.shard": {"parallel": {**TWO, "shard": "optimizer"}},
    "parallel.shard: weights": {"parallel": {**TWO, "shard": "weights"}},
    "parallel.shard: gradients": {"parallel": {**TWO, "shard": "gradients"}},
    "parallel.exchange": {"parallel": {**TWO, "shard": "weights", "exchange": "one-sided"}},
    "parallel.vocabulary": {"parallel": {"vocabulary": "shared"}},
    "optimizer.sync": {"optimizer": {"sync": "post-validate"}},
    "optimizer.sync: no flush": {"optimizer": {"sync": "two-versions"}},
}
PLAIN = compile_job(job(layers=8, m=8), budget=0.0).program


@pytest.mark.parametrize("key", ASKED)
def test_what_a_job_asks_for_is_in_its_program_and_missed_in_one_without(key):
    asked = job(layers=8, m=8, **ASKED[key])
    assert list(missing_problems(asked, compile_job(asked, budget=0.0).program)) == []
    errors = list(missing_problems(asked, PLAIN))
    assert {error.code for error in errors} == {"E202"}
    assert any(f"the job has {key}," in error.message for error in errors)


def test_a_plain_job_misses_nothing():
    assert list(missing_problems(job(layers=8, m=8), PLAIN)) == []
