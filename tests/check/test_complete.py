"""Completeness, ranks and order of ops, transfers in pairs: E202 to E206; and agreement with the job."""

import re

import pytest

from tests.check.each import check_complete, check_pairing
from tests.jobs import job
from tests.listing import listing
from tests.lowered import lower
from tests.refusals import error_of, facts, only
from zbc.compiler.check import check_all
from zbc.compiler.check.asked import missing_problems
from zbc.compiler.check.faults import op_faults
from zbc.compiler.compile import compile_job
from zbc.compiler.graph import build
from zbc.errors import ZbcError
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


PIPELINE = """
    rank 0: F s0 m0, SEND_F s0 m0 >r1, RECV_B s0 m0 <r1, F s0 m1, SEND_F s0 m1 >r1, RECV_B s0 m1 <r1, BW s0 m0, BW s0 m1
    rank 1: RECV_F s1 m0 <r0, RECV_F s1 m1 <r0, F s1 m0, BW s1 m0, SEND_B s1 m0 >r0, F s1 m1, BW s1 m1, SEND_B s1 m1 >r0
"""


def errors_of(text: str, placement: Placement | None = None, check=check_complete, **sizes: int) -> list[ZbcError]:
    """The errors of a check for a listing."""
    return list(error_of(check, listing(text, placement, **sizes)).errors)


def test_backwards_may_be_split_or_not_and_microbatches_take_different_pipes():
    check_complete(listing(TWO_RANKS))
    check_all(listing(STEPPING))
    check_complete(listing(BOTH_WAYS, BOTH))
    check_complete(listing("rank 0: F s0 m0, F s1 m0, BW s1 m0, BW s0 m0", Placement.vshape(1)))
    check_complete(listing(UP, Placement.bidirectional([0])))


BOTH = Placement.bidirectional([0, 1])
UP = "rank 0: F s0 m0, BW s0 m0, F s0 m1 up, BW s0 m1 up, VALIDATE, STEP s0"
AWAY = TWO_RANKS.replace(" F s1 m1,", "").replace("BW s0 m1\n", "BW s0 m1, F s1 m1\n")
ELSEWHERE = ("E205 F s1 m1 is on rank 0, its stage is on rank 1", "rank 0 step 5", "move it to rank 1")
TWICE = ("E202 F s1 m0 runs a second time", "rank 1 step 4", "first at rank 1 step 0: F s1 m0")
EARLY = "E206 {} comes before {}, which it needs"
WITHOUT = PIPELINE.replace(" SEND_F s0 m1 >r1,", "")
DISORDER = PIPELINE.replace("RECV_F s1 m0 <r0, RECV_F s1 m1 <r0", "RECV_F s1 m1 <r0, RECV_F s1 m0 <r0")
LATER = """
    rank 0
      F s0 m0, SEND_F s0 m0, F s0 m1, SEND_F s0 m1, F s0 m2, SEND_F s0 m2
      RECV_B s0 m0, RECV_B s0 m1, RECV_B s0 m2, BW s0 m0, BW s0 m1, BW s0 m2
    rank 1
      RECV_F s1 m0, RECV_F s1 m2, RECV_F s1 m1, F s1 m0, F s1 m1, F s1 m2
      BW s1 m0, SEND_B s1 m0, BW s1 m1, SEND_B s1 m1, BW s1 m2, SEND_B s1 m2
"""
MIXED = "E204 channel r0 -> r1 message {}: rank 0 sends SEND_F s0 m{} >r1, rank 1 receives RECV_F s1 m{} <r0"
FAULTS = [  # a listing, its placement, and what the only error tells
    (TWO_RANKS + "      F s1 m0\n", None, *TWICE),
    (AWAY, None, *ELSEWHERE),
    (UP + ", STEP s0", Placement.bidirectional([0]), "E202 STEP s0 runs a second time"),
    *(  # stages of one rank go in the order of the pipeline, its slices in theirs, backwards in reverse
        (f"rank 0: {', '.join(ops)}", place, EARLY.format(*ops[at : at + 2]))
        for place, at, ops in (
            (Placement.vshape(1), 0, ["F s1 m0", "F s0 m0", "BW s1 m0", "BW s0 m0"]),
            (Placement.vshape(1), 2, ["F s0 m0", "F s1 m0", "BW s0 m0", "BW s1 m0"]),
            (Placement.linear(1), 0, ["F s0 m0.1", "F s0 m0", "BW s0 m0.1", "BW s0 m0"]),
            (Placement.linear(1), 2, ["F s0 m0", "F s0 m0.1", "BW s0 m0", "BW s0 m0.1"]),
        )
    ),
    # A sum waits for the last weight gradient of its stage in both pipes.
    (
        BOTH_WAYS.replace("BW s0 m0, REDUCE s0", "REDUCE s0, BW s0 m0"),
        BOTH,
        EARLY.format("REDUCE s0", "BW s0 m0"),
        "move step 4 before step 3",
    ),
    (BOTH_WAYS.replace("REDUCE s1, VALIDATE", "VALIDATE, REDUCE s1", 1), BOTH, EARLY.format("VALIDATE", "REDUCE s1")),
]
CHANNELS = [  # a listing, and what the only error tells
    (WITHOUT, "E203 RECV_F s1 m1 <r0 has no SEND_F s0 m1 >r1", "rank 1 step 1"),
    (PIPELINE.replace(" RECV_B s0 m0 <r1,", ""), "E203 SEND_B s1 m0 >r0 has no RECV_B s0 m0 <r1", "rank 1 step 4"),
    (WITHOUT.replace(" RECV_F s1 m1 <r0,", ""), "E203 SEND_F s0 m1 >r1 and RECV_F s1 m1 <r0 are missing"),
    (WITHOUT + "      SEND_F s0 m1 >r1\n", "E203 SEND_F s0 m1 >r1 is on rank 1, its stage is on rank 0"),
    (PIPELINE + "      SEND_B s1 m0 >r0\n", "E203 SEND_B s1 m0 >r0 runs a second time", "rank 1 step 8"),
    (DISORDER, MIXED.format(0, 0, 1), "rank 0 step 1: SEND_F s0 m0 >r1", "rank 1 step 0: RECV_F s1 m1 <r0"),
    (LATER, MIXED.format(1, 1, 2)),
]
CASES = [(check_complete, *row[:3], row[3:]) for row in FAULTS]
CASES += [(check_pairing, row[0], None, row[1], row[2:]) for row in CHANNELS]


@pytest.mark.parametrize(("check", "text", "placement", "said", "more"), CASES)
def test_a_fault_is_named_once_and_by_its_place(check, text, placement, said, more):
    first, *others = facts(only(errors_of(text, placement, check)))
    assert first == said and {*more} <= {*others}


@pytest.mark.parametrize("op", ["F s0 m1", "BW s1 m1", "B s0 m0", "W s0 m0"])
def test_a_missing_op_is_named_with_the_rank_it_belongs_on(op):
    errors = errors_of(TWO_RANKS.replace(f" {op}", "", 1))
    missing = only([error for error in errors if error.code == "E202"])
    assert missing.message.startswith(f"program: no rank runs {op}")
    assert missing.hint == f"add it on rank {op[-4]}"


def test_a_microbatch_that_runs_nowhere_is_one_problem():
    error = only(errors_of(TWO_RANKS, microbatches=3))
    assert (error.code, error.message) == ("E202", "program: microbatch 2 never runs")


def test_each_slice_has_to_run():
    text = "rank 0: F s0 m0, F s0 m0.1, BW s0 m0.1, BW s0 m0"
    check_complete(listing(text))
    error = only(errors_of(text, slices=3)[:1])
    assert (error.code, error.message) == ("E202", "program: no rank runs F s0 m0.2")


def test_a_value_that_is_left_lacks_the_op_that_would_use_it():
    rows = rows_with(()) | {Kind.F: ROWS[Kind.F]._replace(writes=(*ROWS[Kind.F].writes, Ref("host")))}
    [error] = op_faults(build(listing("rank 0: F s0 m0, BW s0 m0"), rows))
    assert (error.code, error.message) == ("E206", "program: no rank runs RELOAD s0 m0")


def test_a_fused_backward_next_to_one_of_its_halves_is_reported():
    error = only(errors_of(TWO_RANKS + "      W s1 m0\n")[:1])
    assert (error.code, error.message) == ("E202", "program: W s1 m0 repeats a part of BW s1 m0")
    assert (error.where, error.details) == ("rank 1 step 4", ("also rank 1 step 1: BW s1 m0",))


@pytest.mark.parametrize("op", ["F s2 m0", "F s1 m2", "F s1 m0 up", "F s1 m0.1", "SEND_F s0 m7 >r1", "STEP s2"])
def test_an_op_outside_the_program_is_reported(op):
    errors = errors_of(TWO_RANKS + f"      {op}\n", microbatches=2, slices=1)
    assert errors[0].code == "E202"
    assert errors[0].message.startswith(f"program: {op.partition(' >')[0]} is outside the program, which has 2 stages")
    assert errors[0].where == "rank 1 step 4"


def test_a_microbatch_in_both_pipes_is_reported_with_an_op_of_each():
    text = BOTH_WAYS.replace("rank 0: F s0 m0,", "rank 0: F s0 m0, F s1 m0 up,")
    error = errors_of(text, Placement.bidirectional([0, 1]))[0]
    assert (error.code, error.message) == ("E202", "program: microbatch 0 runs in 2 pipes")
    assert error.details == ("pipe 0: rank 0 step 0: F s0 m0", "pipe 1: rank 0 step 1: F s1 m0 up")


def test_ops_of_ranks_the_placement_does_not_have_are_misplaced():
    error = only(errors_of("rank 0: F s0 m0, BW s0 m0\nrank 1: STEP s0\nrank 2: VALIDATE", Placement.linear(1))[-1:])
    assert (error.code, error.message) == ("E205", "program: STEP s0 is on rank 1, its stage is on rank 0")


@pytest.mark.parametrize("op", ["VALIDATE", "STEP s1"])
def test_step_level_ops_come_all_or_not_at_all(op):
    check_complete(listing(TWO_RANKS))
    before, _, after = STEPPING.rpartition(op)
    error = only(errors_of(before + after, Placement.linear(2)))
    assert (error.code, error.message) == ("E202", f"program: rank 1 never runs {op}")


def test_a_copied_stage_is_summed_on_all_its_holders_wherever_a_step_ends():
    both, summing = Placement.bidirectional([0, 1]), re.sub(", VALIDATE, STEP .*", "", BOTH_WAYS)
    last = BOTH_WAYS.rpartition("REDUCE s1, ")
    for text, ranks in (
        (f"{last[0]}{last[2]}", (1,)),
        (summing.replace("REDUCE s0, REDUCE s1", "REDUCE s0", 1), (0,)),  # without a step, too
        (BOTH_WAYS.replace("REDUCE s1, ", ""), (0, 1)),
    ):
        errors = errors_of(text, both)
        assert [error.message for error in errors] == [f"program: rank {r} never runs REDUCE s1" for r in ranks]
    check_complete(listing(summing.replace(", REDUCE s1", ""), both))


def test_many_problems_are_counted_and_the_first_are_shown():
    errors = errors_of("rank 0: F s0 m0\nrank 1: F s1 m0", microbatches=40)
    assert len(errors) == 8
    assert errors[-1].details == ("and 33 more problems",)


def test_an_absurd_number_of_microbatches_is_refused_at_once():
    error = only(errors_of(TWO_RANKS, microbatches=10**12))
    assert error.code == "E202"
    assert "9 ops are too few" in error.message


def test_empty_programs_are_incomplete():
    nothing = Program(Placement.linear(2), 1, ((), ()))
    assert "microbatch 0 never runs" in error_of(check_all, nothing).message
    check_all(Program(Placement.linear(2), 0, ((), ())))


def test_ops_with_negative_fields_are_outside_the_program():
    program = Program(Placement.linear(1), 1, ((Op(Kind.F, -1), Op(Kind.F, 0, -1), Op(Kind.F, 0), Op(Kind.BW, 0)),))
    assert [error.where for error in error_of(check_complete, program).errors] == ["rank 0 step 0", "rank 0 step 1"]


# ---- transfers -------------------------------------------------------------------------------------------------------


def test_a_plan_passes_with_all_its_transfers_and_a_schedule_without_any():
    check_all(listing(PIPELINE))
    check_pairing(listing("rank 0: F s0 m0, BW s0 m0\nrank 1: F s1 m0, BW s1 m0"))


def test_a_program_that_steps_needs_its_transfers():
    text = "rank 0: F s0 m0, BW s0 m0, VALIDATE, STEP s0\nrank 1: F s1 m0, BW s1 m0, VALIDATE, STEP s1"
    errors = errors_of(text, None, check_pairing)
    assert [error.code for error in errors] == ["E203", "E203"]
    assert errors[0].message == "program: SEND_F s0 m0 >r1 and RECV_F s1 m0 <r0 are missing"
    assert errors[1].message == "program: SEND_B s1 m0 >r0 and RECV_B s0 m0 <r1 are missing"


def test_transfers_out_of_the_pipeline_are_surplus():
    errors = errors_of(PIPELINE + "      SEND_F s1 m0\n      RECV_B s1 m1\n", None, check_pairing)
    assert [error.message for error in errors] == [
        "program: SEND_F s1 m0 carries nothing: no stage reads the output of stage 1",
        "program: RECV_B s1 m1 carries nothing: no stage reads the output of stage 1",
    ]


def test_stages_of_one_rank_need_and_allow_no_transfer():
    v = Placement.vshape(1)
    check_all(listing("rank 0: F s0 m0, F s1 m0, BW s1 m0, BW s0 m0, VALIDATE, STEP s0, STEP s1", v))
    text = "rank 0: F s0 m0, SEND_F s0 m0, RECV_F s1 m0, F s1 m0, BW s1 m0, BW s0 m0"
    errors = errors_of(text, v, check_pairing)
    assert {error.code for error in errors} == {"E203"}
    assert errors[0].message == "program: SEND_F s0 m0 carries nothing: stages 0 and 1 are both on rank 0"
    assert errors[1].message == "program: RECV_F s1 m0 carries nothing: stages 1 and 0 are both on rank 0"


def test_channels_are_not_numbered_by_guess_when_messages_are_missing():
    text = PIPELINE.replace(" SEND_F s0 m0 >r1,", "").replace(" RECV_F s1 m0 <r0,", "")
    assert {error.code for error in errors_of(text, None, check_pairing)} == {"E203"}
    unpaired = DISORDER.replace("rank 1:", "  F s0 m2, SEND_F s0 m2 >r1\n    rank 1:")
    assert [[error.code for error in errors_of(one, None, check_pairing)] for one in (DISORDER, unpaired)] == [
        ["E204"],
        ["E203"],
    ]


DIAMOND = Placement(((0, 1, 2, 3),), ((0, 1), (0, 2), (1, 3), (2, 3)))


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
    error = error_of(check_all, program.with_ranks(ranks, "broken")).errors[0]
    assert (error.code, error.message) == ("E203", "program: RECV_F s3 m0 from s2 <r2 has no SEND_F s2 m0 >r3")


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
