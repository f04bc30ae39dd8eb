"""The table of ops, ops as text, and placements."""

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refused
from zbc.errors import Problems, ZbcError
from zbc.ir import Kind, Message, Op, Placement, Program, parse_line
from zbc.ops import PATCHES, ROWS, TIED, VALUES, WORDS, rows_with

small = st.integers(0, 300)


@st.composite
def ops(draw):
    kind = draw(st.sampled_from(sorted(Kind)))
    if kind.rank_wide or kind.is_mark:
        return Op(kind, 0)
    if kind.stage_wide:
        return Op(kind, draw(small))
    if kind.unit_wide:
        return Op(kind, 0, draw(small), 0, draw(st.integers(0, 5)))
    return Op(kind, draw(small), draw(small), draw(st.integers(0, 3)), draw(st.integers(0, 5)))


@given(ops())
def test_every_op_reads_back_from_its_text(op):
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (Op(Kind.BW, 1, 4, 1, 2), "BW s1 m4.2 up"),
        (Op(Kind.BW, 1, 4, 2), "BW s1 m4 pipe2"),
        (Op(Kind.OVERLAP, 0), "OVERLAP"),
        (Op(Kind.S, 0, 3, 0, 1), "S m3.1"),
        (Op(Kind.REDUCE, WORDS), "REDUCE v"),
        (Op(Kind.REDUCE, TIED), "REDUCE t"),
        (Op(Kind.BW, 0, 12, 1, share=0), "BW s0 m12 up 0%"),
        (Op(Kind.FREE, 3, 12), "FREE s3 #12"),
    ],
)
def test_the_text_form_is_the_one_of_the_design(op, text):
    assert str(op) == text and Op.parse(text) == op


def test_a_peer_is_printed_from_the_placement_and_is_not_identity():
    placement = Placement.linear(4)
    assert placement.text(Op(Kind.SEND_F, 1, 0)) == "SEND_F s1 m0 >r2"
    assert placement.text(Op(Kind.RECV_B, 1, 0)) == "RECV_B s1 m0 <r2"
    assert parse_line("RECV_B s1 m0 <r2") == (Op(Kind.RECV_B, 1, 0), 2)
    assert Op.parse("RECV_B s1 m0 <r2") == Op.parse("RECV_B s1 m0")


@pytest.mark.parametrize(
    "text",
    ["", "F", "F s0", "F m0", "F s0 m0 ", " F s0 m0", "F s0 m0.0", "F s01 m0", "f s0 m0", "FF s0 m0", "F s-1 m0"]
    + ["F s0 m0 >r1", "SEND_F s0 m0 <r1", "RECV_F s0 m0 >r1", "REDUCE s0 m1", "VALIDATE s0", "STEP", "VALIDATE up"]
    + ["F s0 m0\n", "2F0garbage", "F s0 m0 pipe1", "F s0 m0 pipe0", "F s0 m0 up pipe2", "OVERLAP s0"]
    + ["F s1 m3 75%", "W s1 m3 075%", "W s1 m3 100%", "W s1 m3 05%", "B s0 m0 50%", "W s0 m0 -5%", "OVERLAP m1"]
    + ["F s2 m0 from s1", "RECV_F s2 m0 to s1", "SEND_F s2 m0 from s1", "SEND_F s2 m0 to s01"]
    + ["GATHER s3 #0", "REDUCE s3 #1", "F s3 m0 #1", "GATHER s3 #01", "OVERLAP up", "OVERLAP >r1"],
)
def test_anything_else_is_not_an_op(text):
    with refused("E404"):
        Op.parse(text)


def test_placements_put_stages_where_their_names_say():
    assert Placement.linear(3).pipes == ((0, 1, 2),)
    assert Placement.looped(2, 3).pipes == ((0, 1, 0, 1, 0, 1),)
    assert Placement.vshape(3).pipes == ((0, 1, 2, 2, 1, 0),)
    assert Placement.vshape(2, 4).pipes == ((0, 1, 1, 0, 0, 1, 1, 0),)
    both = Placement.bidirectional((0, 1, 1, 0))
    assert both.pipes == ((0, 1, 1, 0), (1, 0, 0, 1))
    assert both.holders(0) == (0, 1)
    assert both.stages_of(1) == (0, 1, 2, 3)
    assert Placement.vshape(3).stages_of(1) == (1, 4)


def test_stages_are_a_chain_unless_edges_say_otherwise():
    plain = Placement.linear(4)
    assert plain.edges == ((0, 1), (1, 2), (2, 3))
    assert plain == Placement(((0, 1, 2, 3),), ((0, 1), (1, 2), (2, 3)))
    assert hash(plain) == hash(Placement(((0, 1, 2, 3),), ((0, 1), (1, 2), (2, 3))))
    assert [plain.sources(s) for s in range(4)] == [(), (0,), (1,), (2,)]
    assert [plain.sinks(s) for s in range(4)] == [(1,), (2,), (3,), ()]
    assert plain.ends == (0, 3)
    assert Placement.linear(1).edges == () and Placement.linear(1).ends == (0,)
    assert pickle.loads(pickle.dumps(plain)).sinks(2) == (3,)
    assert replace(plain, pipes=((3, 2, 1, 0),)).sources(3) == (2,)


def test_two_stages_may_feed_one():
    towers = Placement(((0, 1, 2),), ((0, 2), (1, 2)))
    assert towers != Placement.linear(3)
    assert [towers.sources(s) for s in range(3)] == [(), (), (0, 1)]
    assert [towers.sinks(s) for s in range(3)] == [(2,), (2,), ()]
    assert towers.ends == (0, 1, 2)
    assert towers.peer(Op(Kind.SEND_F, 0)) == towers.peer(Op(Kind.RECV_B, 0)) == 2
    assert towers.peer(Op(Kind.RECV_F, 1)) is None, "it reads the data"
    assert towers.peer(Op(Kind.RECV_F, 2)) is None, "of which of the two?"
    assert towers.peer(Op(Kind.SEND_F, 0, other=2)) is None, "said where it goes without saying"
    for source in (0, 1):
        recv, send = Op(Kind.RECV_F, 2, 5, other=source), Op(Kind.SEND_B, 2, 5, other=source)
        assert str(recv) == f"RECV_F s2 m5 from s{source}" and towers.text(recv) == f"{recv} <r{source}"
        assert str(send) == f"SEND_B s2 m5 to s{source}" and towers.text(send) == f"{send} >r{source}"
        assert parse_line(towers.text(recv)) == (recv, source) and Op.parse(str(send)) == send
        assert towers.message(recv) == Message(source, 2, 5, 0, 0) == towers.message(Op(Kind.SEND_F, source, 5))
        assert towers.recv(towers.message(recv)) == recv and towers.send(towers.message(send)) == send


@given(st.sampled_from([Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B]), st.integers(1, 9), small)
def test_both_ends_of_a_transfer_name_the_same_message(kind, stage, mb):
    op, placement = Op(kind, stage, mb), Placement.linear(11)
    message = placement.message(op)
    ends = placement.send(message), placement.recv(message)
    assert op in ends
    assert [placement.message(end) for end in ends] == [message, message]


def test_a_transfer_out_of_the_pipeline_has_no_message():
    placement = Placement.linear(3)
    for op in (Op(Kind.SEND_F, 2), Op(Kind.RECV_B, 2), Op(Kind.SEND_B, 0), Op(Kind.RECV_F, 0)):
        assert placement.message(op) is None and placement.peer(op) is None
    assert placement.message(Op(Kind.SEND_F, 3)) is None, "no such stage"
    assert placement.message(Op(Kind.SEND_F, 0, pipe=1)) is None, "no such pipe"
    assert placement.message(Op(Kind.F, 0)) is None


def test_errors_render_with_place_and_fix_and_survive_pickling():
    error = ZbcError("E104", 'config: unknown schedule "zvb"', where="zbc.toml:21:8", hint='did you mean "zb-v"?')
    text = 'error[E104] config: unknown schedule "zvb"\n  --> zbc.toml:21:8   did you mean "zb-v"?'
    assert error.render() == str(error) == text
    assert pickle.loads(pickle.dumps(error)).render() == text
    both = Problems([error, ZbcError("E601", "plan wants 4 ranks", hint="run 4")])
    assert pickle.loads(pickle.dumps(both)).render() == f"{text}\nerror[E601] plan wants 4 ranks\n   = run 4"
    assert both.exit_code == 3


def test_every_kind_has_a_row_of_known_values_and_features():
    assert ROWS.keys() == set(Kind)
    for kind, row in ROWS.items():
        for ref in (*row.reads, *row.writes, *row.frees):
            assert ref.what in VALUES, kind
        assert set(row.frees) <= set(row.reads), f"{kind} frees what it does not read"
    every = {"vocabulary": 2, "sharded": True, "scatters": True, "averages": 2, "resident": 1, "with_w": True}
    program = Program(Placement.linear(1), 1, ((),), **every, flushless=True)
    assert {*PATCHES, *(row.feature for row in ROWS.values() if row.feature)} == program.features


def test_whatever_is_read_is_written_and_what_may_not_stay_is_freed():
    shared = rows_with(("vocabulary", "two sums"))
    rows = [*ROWS.values(), *shared.values()]
    written = {ref.what for row in rows for ref in row.writes}
    freed = {ref.what for row in rows for ref in row.frees}
    for kind, row in shared.items():
        assert {ref.what for ref in row.reads} <= written, kind
    assert {what for what in written if not VALUES[what].stays} <= freed
