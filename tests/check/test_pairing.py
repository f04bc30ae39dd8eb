"""Each transfer has one send and one receive, in one order: E203, E204."""

import pytest

from tests.check.each import check_pairing
from tests.listing import listing
from tests.refusals import error_of, facts, only
from zbc.compiler.check import check_all
from zbc.errors import ZbcError
from zbc.ir import Placement

PIPELINE = """
    rank 0: F s0 m0, SEND_F s0 m0 >r1, RECV_B s0 m0 <r1, F s0 m1, SEND_F s0 m1 >r1, RECV_B s0 m1 <r1, BW s0 m0, BW s0 m1
    rank 1: RECV_F s1 m0 <r0, RECV_F s1 m1 <r0, F s1 m0, BW s1 m0, SEND_B s1 m0 >r0, F s1 m1, BW s1 m1, SEND_B s1 m1 >r0
"""


def errors_of(text: str, placement: Placement | None = None) -> list[ZbcError]:
    """The errors of check_pairing for a listing."""
    return list(error_of(check_pairing, listing(text, placement)).errors)


def test_a_plan_passes_with_all_its_transfers_and_a_schedule_without_any():
    check_all(listing(PIPELINE))
    check_pairing(listing("rank 0: F s0 m0, BW s0 m0\nrank 1: F s1 m0, BW s1 m0"))


def test_a_program_that_steps_needs_its_transfers():
    text = "rank 0: F s0 m0, BW s0 m0, VALIDATE, STEP s0\nrank 1: F s1 m0, BW s1 m0, VALIDATE, STEP s1"
    errors = errors_of(text)
    assert [error.code for error in errors] == ["E203", "E203"]
    assert errors[0].message == "program: SEND_F s0 m0 >r1 and RECV_F s1 m0 <r0 are missing"
    assert errors[1].message == "program: SEND_B s1 m0 >r0 and RECV_B s0 m0 <r1 are missing"


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
FAULTS = [  # a listing, and what the only error tells
    (WITHOUT, "E203 RECV_F s1 m1 <r0 has no SEND_F s0 m1 >r1", "rank 1 step 1"),
    (PIPELINE.replace(" RECV_B s0 m0 <r1,", ""), "E203 SEND_B s1 m0 >r0 has no RECV_B s0 m0 <r1", "rank 1 step 4"),
    (WITHOUT.replace(" RECV_F s1 m1 <r0,", ""), "E203 SEND_F s0 m1 >r1 and RECV_F s1 m1 <r0 are missing"),
    (WITHOUT + "      SEND_F s0 m1 >r1\n", "E203 SEND_F s0 m1 >r1 is on rank 1, its stage is on rank 0"),
    (PIPELINE + "      SEND_B s1 m0 >r0\n", "E203 SEND_B s1 m0 >r0 runs a second time", "rank 1 step 8"),
    (DISORDER, MIXED.format(0, 0, 1), "rank 0 step 1: SEND_F s0 m0 >r1", "rank 1 step 0: RECV_F s1 m1 <r0"),
    (LATER, MIXED.format(1, 1, 2)),
]


@pytest.mark.parametrize(("text", "said", "more"), [(*row[:2], row[2:]) for row in FAULTS])
def test_a_fault_of_a_channel_is_named_once_and_by_its_place(text, said, more):
    first, *others = facts(only(errors_of(text)))
    assert first == said and {*more} <= {*others}


def test_transfers_out_of_the_pipeline_are_surplus():
    errors = errors_of(PIPELINE + "      SEND_F s1 m0\n      RECV_B s1 m1\n")
    assert [error.message for error in errors] == [
        "program: SEND_F s1 m0 carries nothing: no stage reads the output of stage 1",
        "program: RECV_B s1 m1 carries nothing: no stage reads the output of stage 1",
    ]


def test_stages_of_one_rank_need_and_allow_no_transfer():
    v = Placement.vshape(1)
    check_all(listing("rank 0: F s0 m0, F s1 m0, BW s1 m0, BW s0 m0, VALIDATE, STEP s0, STEP s1", v))
    text = "rank 0: F s0 m0, SEND_F s0 m0, RECV_F s1 m0, F s1 m0, BW s1 m0, BW s0 m0"
    errors = errors_of(text, v)
    assert {error.code for error in errors} == {"E203"}
    assert errors[0].message == "program: SEND_F s0 m0 carries nothing: stages 0 and 1 are both on rank 0"
    assert errors[1].message == "program: RECV_F s1 m0 carries nothing: stages 1 and 0 are both on rank 0"


def test_channels_are_not_numbered_by_guess_when_messages_are_missing():
    text = PIPELINE.replace(" SEND_F s0 m0 >r1,", "").replace(" RECV_F s1 m0 <r0,", "")
    assert {error.code for error in errors_of(text)} == {"E203"}
    unpaired = DISORDER.replace("rank 1:", "  F s0 m2, SEND_F s0 m2 >r1\n    rank 1:")
    assert [[error.code for error in errors_of(one)] for one in (DISORDER, unpaired)] == [["E204"], ["E203"]]
