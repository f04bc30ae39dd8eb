"""Torch's CSV files: read back the same, wrong ones named by row and column, deadlocks repaired by `--fix`."""

import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _validate_schedule

from tests.check.each import verdict
from tests.compiler.grid import FIXED, chunk_counts, make
from tests.interop.deadlocked import NAMED, SEARCHED, broken, working
from tests.lowered import lower
from tests.refusals import refused
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.simulate import simulate
from zbc.errors import ZbcError
from zbc.interop import torch_csv
from zbc.interop.repair import _improved, repair
from zbc.interop.sheet_check import check_sheet
from zbc.interop.torch_csv import loads
from zbc.ir import Kind, Op, Placement, Program

GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"

# Each: the file, the code, the place, and a piece of the error. torch's own reader accepts the first group.
BROKEN = {
    "garbage behind an action": (GOOD.replace("1F1", "1F1garbage"), "E411", "row 2, column 3", "write 1F1"),
    "two actions in one cell": (GOOD.replace("0B0", "0B0 0F1"), "E411", "row 1, column 3", "write 0B0"),
    "a repeated F": (GOOD.replace("1B0", "1F0,1B0"), "E202", "row 2, column 2", "1F0 runs a second time"),
    "a circle of two": ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "E201", "row 1, column 2", "bring column 3"),
    "one rank's stages the wrong way round": ("0F0,0B0,1F0,1B0\n", "E206", "row 1, column 2", "before 1B0"),
    "numbers with zeros in front": (GOOD.replace("0F1", "0F01"), "E411", "row 1, column 2", "write 0F1"),
    "a trailing comma is an idle slot, not an error": (GOOD.replace("0B1", "0B1,,X"), "E411", "row 1, column 6", "1F0"),
    # What torch refuses as well, mostly with an assertion.
    "lower case": (GOOD.replace("1B1", "1b1"), "E411", "row 2, column 4", "write 1B1"),
    "no microbatch": (GOOD.replace("1F0", "1F"), "E411", "row 2, column 1", "actions are stage, letter and microbatch"),
    "an unknown letter": (GOOD.replace("0B0", "0R0"), "E411", "row 1, column 3", "letters are F, I, W and B"),
    "the lowered form": (GOOD.replace("0B0", "0SEND_F0"), "E411", "row 1, column 3", 'format="compute_only"'),
    "half a pair": (GOOD.replace("0B0", "(0F1)OVERLAP_F_B"), "E411", "row 1, column 3", "pairs look like"),
    "a header line": ("rank,ops\n" + GOOD, "E411", "row 1, column 1", "not an action: 'rank'"),
    "semicolons for commas": (GOOD.replace(",", "; "), "E411", "row 2, column 1", "write 1F0, with a comma between"),
    "tabs for commas": (GOOD.replace(",", "\t"), "E411", "row 1, column 1", "with a comma between actions"),
    "an absurd number": (GOOD.replace("0F1", "0F99999999999"), "E411", "row 1, column 2", "end at"),
    "an empty line in the middle": (GOOD.replace("\n", "\n\n", 1), "E411", "row 2, column 1", "delete the row"),
    "a row of idle slots": (GOOD + ",,,\n", "E411", "row 3, column 1", "needs work"),
    "a stage on two ranks": (GOOD.replace("1F1", "0F1"), "E411", "row 2, column 3", "first at row 1, column 1"),
    "a stage left out": (GOOD.replace("1F", "2F").replace("1B", "2B"), "E411", "row 2, column 1", "of stage 1"),
    "a microbatch left out": (GOOD.replace("F1", "F2").replace("B1", "B2"), "E411", "row 1, column 2", "microbatch 1"),
    "a missing F": (GOOD.replace("1F1,", ""), "E202", "row 2", "no rank runs 1F1"),
    "a missing backward": (GOOD.replace(",0B1", ""), "E202", "row 1", "no rank runs 0B1 (or its B and W)"),
    "a W without its I": (GOOD.replace("0B0", "0W0"), "E202", "row 1", "no rank runs 0I0"),
    "a B beside its halves": (GOOD.replace("0B0", "0B0,0I0,0W0"), "E202", "row 1, column 4", "repeats a part"),
    "W before I": (GOOD.replace("0B0", "0W0,0I0"), "E206", "row 1, column 3", "0W0 comes before 0I0"),
    "B before F": (GOOD.replace("1F0,1B0", "1B0,1F0"), "E206", "row 2, column 1", "move column 2 before column 1"),
    "an open quote": ('"0F0,0B0\n', "E411", "line 1", "not a CSV file"),
    "digits without end": (GOOD.replace("0F1", f"0F{'9' * 5000}"), "E411", "row 1, column 2", "end at 1000000"),
    "nothing": ("", "E411", None, "is empty"),
    "NUL bytes": (GOOD.replace("0F1", "0F\0"), "E411", None, "NUL"),
}


def problems(text):
    with pytest.raises(ZbcError) as caught:
        check_sheet(torch_csv.loads(text, "x.csv"))
    return caught.value.errors


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_row_column_and_reason(name):
    text, code, place, piece = BROKEN[name]
    found = problems(text)
    said = [error.render() for error in found]
    assert code in {error.code for error in found}, said
    assert piece in "\n".join(said)
    if place is not None:
        wanted = re.compile(rf"x\.csv: {place}(?!\d)")
        assert any(error.code == code and wanted.search(error.where or "") for error in found), said


def actions(text):
    """The actions that torch's own reader reads from a CSV text."""
    rows = [line.split(",") for line in text.rstrip("\n").split("\n")]
    return {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}


@pytest.mark.parametrize("name", list(BROKEN)[:5])
def test_torch_takes_these_broken_files(name):
    text = BROKEN[name][0]
    ranks, stages = len(text.splitlines()), 2
    _validate_schedule(actions(text), ranks, stages, 1 if name == "one rank's stages the wrong way round" else 2)


def test_a_file_in_the_lowered_form_is_refused_once():
    first, other = problems("0F0,0SEND_F0,xx\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert first.where == "x.csv: row 1, column 2" and "compute_only" in first.hint
    assert first.details == ("and 2 more actions that compute_only does not have",)
    assert other.where == "x.csv: row 1, column 3" and "'xx'" in other.message


def test_all_problems_of_a_file_are_told_at_once():
    found = problems("0F0,0X0,0B0\n1F0garbage,1B0\n\n")
    assert [(error.code, error.where) for error in found] == [
        ("E411", "x.csv: row 1, column 2"),
        ("E411", "x.csv: row 2, column 1"),
        ("E411", "x.csv: row 3, column 1"),
    ]


def test_a_deadlock_is_explained_in_cells():
    (found,) = problems("0F0,,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert found.code == "E201"
    assert found.details[:2] == (
        "row 1 column 3: 0B0  waits for  row 2 column 4: 1B0, after column 1",
        "row 2 column 1: 1F1  waits for  row 1 column 4: 0F1, after column 3",
    )


def test_idle_slots_spaces_pairs_and_line_ends_read_as_torch_reads_them():
    sheet = torch_csv.loads("0F0 , ,0F1,0B0,0B1\r\n ,1F0,(1B0;1F1)OVERLAP_F_B,,1B1\r\n")
    cells = actions("0F0 , ,0F1,0B0,0B1\n ,1F0,(1B0;1F1)OVERLAP_F_B,,1B1\n")
    theirs = [[str(a) for cell in row if cell for a in (cell.sub_actions or (cell,))] for row in cells.values()]
    ours = [[torch_csv.action(op) for op in ops if op.kind.computes] for ops in sheet.program.ranks]
    assert ours == theirs
    assert sheet.columns == ((0, 2, 3, 4), (1, 2, 2, 2, 4))
    assert [str(op) for op in sheet.program.ranks[1]][1:4] == ["OVERLAP", "BW s1 m0", "F s1 m1"]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 11)])
def test_groups_of_two_go_to_torch_and_back(p, m):
    text = torch_csv.dumps(lower(SCHEDULES["dualpipe-v"].make(Request(p, m, 2, overlap=True))))
    assert "OVERLAP_F_B" in text
    sheet = torch_csv.loads(text)
    check_sheet(sheet)
    assert torch_csv.dumps(sheet.program) == text
    expected = [[str(action) for action in row] for row in actions(text).values()]
    assert [row.split(",") for row in text.split()] == expected


few = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.mark.long("gis", "breadth-first")
@pytest.mark.parametrize("name", FIXED)
@few
@given(data=st.data())
def test_plan_to_csv_to_plan_keeps_order_and_times(name, data):
    p, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    plan = lower(make(name, p, m, data.draw(st.sampled_from(chunk_counts(name)))))
    text = torch_csv.dumps(plan)
    sheet = torch_csv.loads(text)
    check_sheet(sheet)
    again = lower(sheet.program)
    check_all(again)
    assert torch_csv.dumps(again) == text
    compute = [[op for op in ops if op.kind.computes] for ops in plan.ranks]
    assert [list(ops) for ops in sheet.program.ranks] == compute
    assert again.placement == plan.placement
    costs = Costs.uniform(plan.placement, *(data.draw(st.sampled_from([0.5, 1.0, 1.7])) for _ in range(3)), comm=0.3)
    assert list(simulate(again, costs)) == list(simulate(plan, costs))


@few
@given(st.data())
def test_orders_nobody_would_write_keep_their_cells_too(data):
    """Any placement, any order: reading and writing do not depend on the order being a good one."""
    stages, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    p = data.draw(st.integers(1, stages))
    homes = [*range(p), *(data.draw(st.integers(0, p - 1)) for _ in range(stages - p))]
    ranks = []
    for rank in range(p):
        ops = []
        for stage in (s for s in range(stages) if homes[s] == rank):
            for mb in range(m):
                split = data.draw(st.booleans())
                ops += [Op(kind, stage, mb) for kind in ((Kind.F, Kind.B, Kind.W) if split else (Kind.F, Kind.BW))]
        ranks.append(tuple(data.draw(st.permutations(ops))))
    program = Program(Placement((tuple(homes),)), m, tuple(ranks), ("any",))
    found = torch_csv.loads(torch_csv.dumps(program)).program
    assert (found.ranks, found.placement, found.microbatches) == (program.ranks, program.placement, m)


def test_what_torch_cannot_express_is_refused_with_every_reason():
    placement = Placement.bidirectional((0, 1))
    ops = tuple(tuple(Op(kind, s, 0, 1 - s, 1) for kind in (Kind.F, Kind.BW)) for s in range(2))
    with refused("E413") as caught:
        torch_csv.dumps(Program(placement, 1, (*ops, ()), ("x",), slices=2))
    text = "\n".join(caught.value.details)
    assert "one pipe" in text
    assert "slices" in text
    assert "rank 2 has none" in text


def cases(count, seed, names):
    rng = Random(seed)
    for _ in range(count):
        program = working(rng, names, [2, 3, 4], [4, 6, 8])
        yield program, broken(program, rng)


@pytest.mark.repeats
def test_orders_broken_at_random_are_repaired_within_five_percent_of_their_step():
    """The promise for large ones is four in five."""
    good = 0
    for program, wrong in [*cases(20, 3, NAMED), *cases(10, 4, SEARCHED)]:
        costs = Costs.uniform(program.placement)
        found = repair(wrong, costs)
        check_all(found.program)
        assert sorted(op for ops in found.program.ranks for op in ops) == sorted(
            op for ops in program.ranks for op in ops
        )
        assert found.program.placement == program.placement
        assert found.makespan == simulate(found.program, costs).makespan
        good += found.makespan <= 1.05 * simulate(program, costs).makespan + 1e-9
    assert good >= 27


def test_one_slip_in_a_known_schedule_is_undone_where_it_happened():
    text = "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    wrong = loads(text.replace("0F1,0F2,0B0", "0B0,0F1,0F2").replace("1F0,1B0,1F1,1B1", "1F1,1B1,1F0,1B0")).program
    found = repair(wrong, Costs.uniform(wrong.placement))
    assert found.moved <= 4
    assert found.makespan <= 15.0


def test_what_is_repeated_is_dropped_and_what_is_missing_not_invented():
    program = loads("0F0,0F1,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n").program
    found = repair(program, Costs.uniform(program.placement))
    assert [str(op) for op in found.dropped] == ["F s0 m1"]
    assert found.moved == 0
    assert [str(op) for op in found.program.ranks[0]] == ["F s0 m0", "F s0 m1", "BW s0 m0", "BW s0 m1"]
    program = loads("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n").program
    with refused("E411") as caught:
        repair(program, Costs.uniform(program.placement))
    assert caught.value.where == "row 2"


@pytest.mark.long
def test_no_rank_holds_more_than_the_fullest_one_did():
    rng = Random(5)
    for _ in range(6):
        program = working(rng, ["v-half", "v-min", "interleaved-1f1b"], [3, 4], [8])  # more memory would be faster
        costs = Costs.uniform(program.placement)
        row = rng.randrange(program.placement.ranks)
        ops = list(program.ranks[row])
        wrong = program
        while wrong is program or verdict(check_all, wrong) is None:
            a, b = rng.randrange(len(ops)), rng.randrange(len(ops))
            ops.insert(b, ops.pop(a))
            wrong = replace(program, ranks=(*program.ranks[:row], tuple(ops), *program.ranks[row + 1 :]))
        most = max(rank.units for rank in peaks(wrong, costs))
        assert max(rank.units for rank in peaks(repair(wrong, costs).program, costs)) <= most + 1e-6


def test_improving_keeps_to_the_memory_it_is_given():
    """With slow transfers 1F1B gains from running ahead, which takes memory."""
    program = SCHEDULES["1f1b"].make(Request(3, 8))
    costs = Costs.uniform(program.placement, comm=2.0)
    step = simulate(program, costs).makespan
    mine = [rank.units + 1e-9 for rank in peaks(program, costs)]
    tight, _ = _improved(program, program.ranks, costs, mine, step)
    held = peaks(replace(program, ranks=tight), costs)
    assert all(rank.units <= limit for rank, limit in zip(held, mine, strict=True))
    roomy, faster = _improved(program, program.ranks, costs, [99.0] * 3, step)
    assert faster < step
    assert any(
        rank.units > limit for rank, limit in zip(peaks(replace(program, ranks=roomy), costs), mine, strict=True)
    )
