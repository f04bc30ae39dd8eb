"""The table of ops: every kind has a row, and the questions to it have the answers that the rows were written for."""

import itertools

import pytest

from zbc.ops import PATCHES, ROWS, VALUES, At, Kind, Lane, Scope, rows_with

ANSWERS = {
    "computes": "F B W BW S T I E",
    "is_transfer": "SEND_F RECV_F SEND_B RECV_B",
    "is_send": "SEND_F SEND_B",
    "is_recv": "RECV_F RECV_B",
    "is_mark": "OVERLAP",
    "is_collective": "REDUCE TIE VALIDATE GATHER SPREAD MEET SUM GIVE TAKE REDUCE_V SCATTER AVERAGE",
    "sums": "REDUCE TIE REDUCE_V",
    "is_barrier": "VALIDATE",
    "stage_wide": "REDUCE STEP GATHER FREE TENTATIVE COMMIT SCATTER AVERAGE",
    "rank_wide": "TIE VALIDATE NORM VERDICT REDO REDUCE_V",
    "everywhere": "VALIDATE NORM VERDICT REDO REDUCE_V",
    "unit_wide": "SPREAD S MEET T SUM I GIVE TAKE E",
}


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_is_answered_with_yes_by_these_kinds(question):
    assert {kind.name for kind in Kind if getattr(kind, question)} == {*ANSWERS[question].split()}


def test_steps_close_in_two_ways():
    closes = {way: [kind.value for kind in Kind if kind.row.closes == way] for way in ("barrier", "ahead")}
    assert closes == {
        "barrier": ["VALIDATE", "STEP"],
        "ahead": ["TENTATIVE", "NORM", "VERDICT", "REDO", "COMMIT"],
    }


def test_every_kind_has_a_row_and_every_row_speaks_of_values_that_there_are():
    assert ROWS.keys() == set(Kind)
    for kind, row in ROWS.items():
        for ref in (*row.reads, *row.writes, *row.frees):
            assert ref.what in VALUES, kind
        assert set(row.frees) <= set(row.reads), f"{kind} frees what it does not read"


def test_whatever_is_read_is_written_and_what_may_not_stay_is_freed():
    shared = rows_with(("vocabulary", "two sums"))
    rows = [*ROWS.values(), *shared.values()]
    written = {ref.what for row in rows for ref in row.writes}
    freed = {ref.what for row in rows for ref in row.frees}
    for kind, row in shared.items():
        assert {ref.what for ref in row.reads} <= written, kind
    assert {what for what in written if not VALUES[what].stays} <= freed


def test_patches_add_up_in_any_order_and_free_what_is_read():
    for first, second in itertools.permutations(PATCHES, 2):
        rows, turned = rows_with((first, second)), rows_with((second, first))
        for kind, row in rows.items():
            assert set(row.frees) <= set(row.reads), (first, second, kind)
            for name in ("reads", "writes", "frees"):
                if {first, second} != {"resident", "flushless"}:  # two ends of a step
                    assert {*getattr(row, name)} == {*getattr(turned[kind], name)}, (first, second, kind)
    for name, patches in PATCHES.items():
        changed = {kind for kind, row in rows_with((name,)).items() if row != ROWS[kind]}
        assert changed == {patch.kind for patch in patches}, name


def test_values_on_edges_are_named_by_edges_and_a_message_carries_one():
    for kind, row in ROWS.items():
        for ref in (*row.reads, *row.writes):
            assert (VALUES[ref.what].scope == "edge") is (ref.at in (At.SOURCES, At.SINKS)), kind
        if row.lane is Lane.LINK:
            assert row.scope is Scope.UNIT and len(row.reads) + len(row.writes) == 1


def test_letters_of_pictures_mean_one_thing():
    letters = [letter for row in ROWS.values() if row.look for letter in {row.look.letter, row.look.other}]
    assert len(letters) == len(set(letters))


def test_what_takes_time_in_pictures_has_a_column_of_costs():
    for kind, row in ROWS.items():
        if row.look is not None:
            assert row.cost, kind
