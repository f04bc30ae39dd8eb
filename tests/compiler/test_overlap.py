"""Overlap groups, which start together; braid-v, its bars and hidden sums; transfers hidden by a longer warm-up."""

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest

from bench.fuzz import BARS, SUMS, exposed
from tests.check import operational
from tests.check.braids import with_sums
from tests.check.each import check_complete, check_deadlock
from tests.compiler.grid import timed, units
from tests.compiler.test_paper_tables import rows
from tests.compiler.test_passes import lines
from tests.composed import TOLERANCE, apart, beside, trained
from tests.jobs import job
from tests.listing import listing
from tests.lowered import lower, ran
from tests.refusals import refused
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.passes.fuse_backward import FuseBackward
from zbc.compiler.passes.insert_comm import InsertComm
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.beside import shared, sums_of
from zbc.compiler.sim.bounds import bounds
from zbc.compiler.sim.simulate import simulate
from zbc.errors import ZbcError
from zbc.ir import Kind, Placement

BOTH = [("dualpipe", 1), ("dualpipe-v", 2)]


def pairs(name, p, m, v):
    return SCHEDULES[name].make(Request(p, m, v, overlap=True))


@pytest.mark.parametrize(("name", "v"), BOTH)
def test_pairs_as_groups_are_the_published_orders(name, v):
    """The bubble (p/2 - 1)(F&B + B - 3W) of DualPipe assumes pairs that need both inputs before they start."""
    variant = {"dualpipe": "dualpipe_atomic", "dualpipe-v": "dualpipev_atomic"}[name]
    cells = [row for row in rows("unit_cost_orders.csv") if row["variant"] == variant]
    assert len(cells) >= 6
    for row in cells:
        program = pairs(name, int(row["p"]), int(row["m"]), v)
        costs = Costs.uniform(program.placement, comm=float(row["comm"]))
        for level in (program, lower(program)):
            timeline = simulate(level, costs)
            assert timeline.makespan == pytest.approx(float(row["makespan"])), row
            assert timeline.span == pytest.approx(float(row["span"])), row
        held = [rank.units for rank in peaks(program, costs)]
        assert held == pytest.approx([float(x) for x in row["peak_act_per_rank"].split()])


def group():
    text = """
        rank 0: F s0 m0, F s0 m1, OVERLAP, F s0 m2, BW s0 m0, BW s0 m1, BW s0 m2
        rank 1: F s1 m0, BW s1 m0, F s1 m1, BW s1 m1, F s1 m2, BW s1 m2
    """
    return listing(text)


def test_a_group_starts_with_its_later_input_and_what_it_makes_is_there_at_its_end():
    costs = replace(Costs.uniform(group().placement, 2.0, 1.0, 1.5), overlap=0.0)
    at = {str(op): (start, end) for _, op, start, end in simulate(group(), costs)}
    assert at["BW s1 m0"] == (4.0, 6.5)
    assert at["F s0 m2"] == (6.5, 8.5), "not at 4, where rank 0 is free"
    assert at["BW s0 m0"] == (8.5, 11.0)
    assert at["F s1 m2"][0] == 11.0, "not at 8.5, where its F is done"


@pytest.mark.parametrize(("overlap", "length"), [(0.0, 4.5), (0.5, 3.5), (1.0, 2.5)])
def test_the_shorter_op_of_a_group_hides_behind_the_longer_by_the_factor(overlap, length):
    costs = replace(Costs.uniform(group().placement, 2.0, 1.0, 1.5), overlap=overlap)
    timeline = simulate(group(), costs)
    at = {str(op): (start, end) for _, op, start, end in timeline}
    assert at["BW s0 m0"][1] - at["F s0 m2"][0] == pytest.approx(length)
    assert timeline.busy(0) == pytest.approx(3 * 4.5 - overlap * 2.0)


def test_transfers_and_other_backwards_stay_outside_of_a_group():
    found = lines(ran(InsertComm(), group()))[0]
    where = found.index("OVERLAP")
    assert found[where : where + 4] == ["OVERLAP", "F s0 m2", "BW s0 m0", "SEND_F s0 m2 >r1"]
    assert found.index("RECV_B s0 m0 <r1") < where, "also where it is wanted one op ahead"
    before = listing("rank 0: F s0 m0, OVERLAP, F s0 m1, B s0 m0, W s0 m0, B s0 m1, W s0 m1")
    assert lines(ran(FuseBackward(), before)) == [["F s0 m0", "OVERLAP", "F s0 m1", "B s0 m0", "W s0 m0", "BW s0 m1"]]


def test_a_group_can_deadlock_where_its_ops_one_after_the_other_would_not():
    text = """
        rank 0: F s0 m0, {}F s0 m1, BW s0 m0, BW s0 m1
        rank 1: F s1 m0, F s1 m1, BW s1 m0, BW s1 m1
    """
    check_all(lower(listing(text.format(""))))
    for level in (listing(text.format("OVERLAP, ")), lower(listing(text.format("OVERLAP, ")))):
        with refused("E201", match="deadlock") as caught:
            check_deadlock(level)
        assert any("OVERLAP" in line for line in caught.value.details)
        assert operational.run(level).state == "stuck"


def test_a_mark_without_an_f_and_an_op_that_does_not_need_it_is_refused():
    program = listing("rank 0: F s0 m0, B s0 m0, W s0 m0, OVERLAP, F s0 m1")
    with refused("E202", match="OVERLAP is not followed by"):
        check_complete(program)
    assert operational.run(program).state == "failed"


@pytest.mark.parametrize(
    ("pair", "a", "length"),
    [
        ("F s0 m1, BW s0 m0", 0.3, 2 + 2.5),
        ("F s0 m1, W s0 m0", 0.3, 2 + 1.5),
        ("F s0 m1, F s0 m2", 0.3, 2 + 2),
        ("F s0 m1, B s0 m0", 2.0, 4.0),
        ("F s0 m1, W s0 m0", 5.0, 5.0),
    ],
)
def test_each_op_of_a_group_computes_while_sums_of_the_other_are_on_their_way(pair, a, length):
    rest = [op for op in ("F s0 m2", "B s0 m0", "B s0 m1", "B s0 m2", "W s0 m0", "W s0 m1", "W s0 m2")]
    first = ["F s0 m0", *(["B s0 m0"] if "W s0 m0" in pair.split(", ") else [])]
    done = [*first, *pair.split(", "), *(["B s0 m0", "W s0 m0"] if "BW" in pair else [])]
    program = listing("rank 0: " + ", ".join([*first, "OVERLAP", pair, *(op for op in rest if op not in done)]))
    check_all(program)
    timeline = simulate(program, with_sums(Costs.uniform(program.placement, 2.0, 1.0, 1.5), a))
    mark = next(i for i, op in enumerate(timeline.graph.ops) if op.kind is Kind.OVERLAP)
    assert timeline.end[mark + 2] - timeline.start[mark + 1] == pytest.approx(length)


@pytest.mark.parametrize("overlap", [0.0, 0.3, 1.0])
def test_no_group_beats_the_bounds(overlap):
    for name, v in BOTH:
        for p, m in ((2, 5), (4, 8), (6, 13)):
            program = pairs(name, p, m, v)
            for times, a in product(((1, 1, 1, 0.1), (2, 1, 0.5, 0), (1, 3, 1, 0.5)), (0, 0.3, 4)):
                costs = with_sums(replace(Costs.uniform(program.placement, *times), overlap=overlap), a)
                least, timeline = bounds(program.placement, costs.hidden(), m), simulate(program, costs)
                assert least.makespan <= timeline.makespan + 1e-9
                assert least.span <= timeline.span + 1e-9


def test_a_job_gets_groups_where_overlapping_pays_and_where_it_asks_for_them():
    unit = {"f": 1.0, "b": 1.0, "w": 1.0}

    def made(schedule, costs):
        found = compile_job(job(kind="dualpipe-v", layers=16, schedule=schedule, costs={**unit, **costs}))
        return any(op.kind is Kind.OVERLAP for _, _, op in found.program), found.report.makespan_ms

    assert made({}, {}) == (False, pytest.approx(25.5))
    assert made({"overlap": True}, {}) == (True, pytest.approx(27.0))
    assert made({}, {"overlap": 1.0}) == (True, pytest.approx(22.0))
    assert made({"overlap": False}, {"overlap": 1.0}) == (False, pytest.approx(25.5))
    with pytest.raises(ZbcError, match=r"schedule\.overlap is for interleaved-1f1b, dualpipe, dualpipe-v"):
        job(kind="zb-v", schedule={"overlap": True})


def chunks(p, a):
    """Costs of chunks of F = B = W = 1 with sums of a."""
    return with_sums(Costs.uniform(Placement.vshape(p), 2.0, 2.0, 2.0), a)


def braided(p, m, costs=None):
    return SCHEDULES["braid-v"].make(Request(p, m, 2, costs=costs))


@pytest.mark.parametrize(("p", "m"), few(BARS, [(4, 12), (4, 8), (2, 2)]))
def test_no_step_is_longer_than_the_best_known_order(p, m):
    costs = chunks(p, SUMS)
    assert simulate(braided(p, m, costs), costs).makespan <= BARS[p, m] + 1e-9


@pytest.mark.parametrize("p", few(range(2, 9), (2, 3, 4)))
@pytest.mark.parametrize("a", [0.0, 0.3, 0.7])
def test_steps_waits_and_memory_are_those_of_the_formulas(p, a):
    for m in (3 * p, 3 * p + 1, 5 * p):
        program, costs = braided(p, m), chunks(p, a)
        timeline = simulate(program, costs)
        assert timeline.makespan == pytest.approx(6 * m + (p - 1) * (1 + a) + (2 * p + p % 2) * a)
        assert exposed(program, costs)[0] == pytest.approx((2 * p + 1) * a)
        assert max(rank.units for rank in peaks(program, costs)) == pytest.approx(2 * p - 0.5)
    assert timed(program).makespan == pytest.approx(3 * m + (p - 1) / 2)
    assert max(units(program)) == pytest.approx(2 * p - 0.5)


@pytest.mark.long("0", "6")
@pytest.mark.parametrize("seed", few(range(60), 12))
def test_any_number_of_microbatches_runs_at_any_costs(seed):
    rng = random.Random(seed)
    p, m = rng.randint(1, 7), rng.randint(1, 30)
    times = [rng.random() + 0.1 for _ in range(3)]
    costs = with_sums(Costs.uniform(Placement.vshape(p), *times, comm=rng.choice((0.0, 0.2))), rng.random())
    program = braided(p, m, costs)
    for level in (program, lower(program, costs=costs)):
        check_all(level)
        assert operational.run(level, seed=seed).ok
    timeline = simulate(program, costs)
    least = bounds(program.placement, costs.hidden(), m)
    assert least.makespan <= timeline.makespan + 1e-9 and least.span <= timeline.span + 1e-9
    assert max(rank.units for rank in peaks(program, Costs.uniform(program.placement))) <= 2 * p - 0.5


def test_sums_are_under_the_other_op_and_add_up():
    costs = chunks(3, SUMS)
    program = braided(3, 9, costs)
    timeline = simulate(program, costs)
    found = sums_of(timeline, costs)
    inside = [costs.sums(op)[0] for ops in program.ranks for op in ops if op.kind.computes]
    assert found.ms == pytest.approx(sum(inside) / 3)
    assert found.exposed_ms == pytest.approx(sum(exposed(program, costs)) / 3)
    for rank in range(3):
        pieces = list(shared(timeline, costs, rank))
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(pieces))
        runs = {op: (start, end) for one, op, start, end in timeline if one == rank}
        beside = [piece for piece in pieces if piece.hidden and piece.op.kind is Kind.F]
        assert beside, "an F alone has none that is hidden"
        for piece in beside:
            start, end = runs[piece.op]
            assert piece.end <= start + 1e-9 or piece.start >= end - 1e-9, "under the other one"


@pytest.mark.long
def test_a_job_is_told_what_its_groups_hide_and_pays_for_what_they_do_not():
    costs = {"f": 1.0, "b": 1.0, "w": 1.0, "per": "stage", "tp": SUMS}
    model = {"layers": 16, "heads": 4}

    def report(kind, **changes):
        return compile_job(job(kind=kind, m=12, model=model, costs=costs, parallel={"tp": 2}, **changes)).report

    found = report("braid-v")
    assert found.makespan_ms == pytest.approx(78.3)
    assert found.lower_bound_makespan_ms <= 78.3
    assert found.tp_sums.ms == pytest.approx(2 * 2 * 12 * SUMS)
    assert found.as_json()["tp_sums"]["hidden"] == pytest.approx(found.tp_sums.hidden) and found.tp_sums.hidden > 0.8
    assert report("zb-v").tp_sums.exposed_ms > 4 * found.tp_sums.exposed_ms
    assert "tp_sums" not in compile_job(job(kind="zb-v", m=12)).report.as_json()


MAKE = SCHEDULES["interleaved-1f1b"].make


@pytest.mark.parametrize("early", [0, 1, 2])
@pytest.mark.parametrize("v", [2, 3])
def test_it_holds_a_chunk_of_a_microbatch_more_for_each_and_takes_as_long(early, v):
    plain, more = (lower(MAKE(Request(4, 8, v, early=count))) for count in (0, early))
    costs = Costs.uniform(plain.placement)
    before, after = ([rank.units for rank in peaks(one, costs)] for one in (plain, more))
    assert after == pytest.approx([units + early / v for units in before])
    assert simulate(more, costs).makespan == simulate(plain, costs).makespan


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize(("p", "m", "v"), [(1, 1, 2), (2, 3, 2), (3, 7, 3), (4, 8, 2), (4, 2, 1), (5, 6, 2)])
def test_pairs_as_groups_are_free_of_deadlock(p, m, v, slices):
    for early in (1, 2):
        check_all(lower(MAKE(Request(p, m, v, early=early, overlap=True, slices=slices))))


def marks(program):
    return sum(op.kind is Kind.OVERLAP for ops in program.ranks for op in ops)


def test_a_backward_that_needs_the_forward_beside_it_is_in_no_group_with_it():
    assert marks(MAKE(Request(4, 8, 2, early=1, overlap=True))) > 0
    assert not marks(MAKE(Request(4, 8, 2, overlap=True)))
    assert not marks(MAKE(Request(4, 8, 2, early=1, overlap=True, group=2)))  # a round does not cover the ranks


def test_groups_hide_sums_of_ranks_that_share_layers():
    costs = {"f": 1.0, "b": 1.0, "w": 1.0, "tp": 0.3}
    asked = {"kind": "interleaved-1f1b", "layers": 8, "pp": 4, "m": 16, "costs": costs, "parallel": {"tp": 2}}
    plain = compile_job(job(**asked), budget=0.0, suggest=False)
    hidden = compile_job(job(**asked, schedule={"early": 1, "overlap": True}), budget=0.0, suggest=False)
    assert hidden.settled_ms < 0.93 * plain.settled_ms


@pytest.mark.long
def test_groups_train_as_ops_one_after_the_other():
    both, plain = beside("tp", schedule__kind="interleaved-1f1b", schedule__early=1, schedule__overlap=True)
    both["parallel"]["pp"] = plain["parallel"]["pp"] = 2
    both["model"]["layers"] = plain["model"]["layers"] = 4
    both["schedule"]["microbatches"] = plain["schedule"]["microbatches"] = 4
    assert apart(trained(both), trained(plain)) <= TOLERANCE
