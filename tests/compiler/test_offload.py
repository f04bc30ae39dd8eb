"""Offload: limits kept, links shared, no slower than the published pass; "auto" is the fastest way where it may be."""

import itertools
import json
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.check import clocked
from tests.cli.test_offload import planned
from tests.compiler.test_paper_tables import rows
from tests.jobs import job
from tests.refusals import refused
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.graph import build
from zbc.compiler.lowering import Lowering
from zbc.compiler.memory.ledger import over_time
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.partition.setup import as_ordered
from zbc.compiler.passes.offload import Offload
from zbc.compiler.passes.offload_view import View
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.shapes import load_job
from zbc.compiler.sim import simulate
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.links import Links, by_time
from zbc.compiler.whatif.others import kept
from zbc.errors import ZbcError
from zbc.ir import COPY, Kind
from zbc.plan.directory import StoredPlan
from zbc.text import GIB

pytestmark = pytest.mark.usefixtures("everything_moves")
REFERENCE = rows("offload_orders.csv")
MOVED = [row for row in REFERENCE if row["k"] and row["status"] == "ok"]


def case(row):
    """The order of a row without copies, and the costs of copies."""
    p, m, v, group = (int(row[key]) for key in ("p", "m", "v", "group"))
    f, b, w, comm = (float(row[key]) for key in ("T_F", "T_B", "T_W", "T_comm"))
    program = SCHEDULES["gis"].make(Request(p, m, v, group=group))
    return Context(program, with_copies(program, f, b, w, comm, k=float(row["k"])))


def with_copies(program, f=1.0, b=1.0, w=1.0, comm=0.0, *, k=0.5):
    stages = program.placement.stages
    ms = k * (f + b + w) * program.placement.ranks / stages
    return Costs.uniform(program.placement, f, b, w, comm).with_ms(out=(ms,) * stages, back=(ms,) * stages)


def moved(program, context, limit, stages=None):
    """The program with copies that keep every rank within a limit."""
    every = frozenset(range(program.placement.stages))
    return Context(
        Offload((limit,) * len(program.ranks), every if stages is None else stages).run(program, context), context.costs
    )


def share(program):
    forwards = sum(op.kind is Kind.F for ops in program.ranks for op in ops)
    return sum(op.kind is Kind.OFFLOAD for ops in program.ranks for op in ops) / forwards


def keeps(found, limit):
    check_all(found.program)
    return max(rank.units for rank in peaks(found.program, found.costs)) <= limit + 1e-6


def compared(sample):
    """For each row: the excess over the published time, as a share; the offloaded share."""
    found = []
    for row in sample:
        context, limit = case(row), float(row["peak_after"])
        after = moved(context.program, context, limit)
        assert keeps(after, limit), row
        found.append((after.timeline.makespan / float(row["makespan_after"]) - 1, share(after.program)))
    return found


ALL = frozenset(range(1000))


@pytest.mark.long("interleaved-1f1b")
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe", "gpipe", "interleaved-1f1b"])
def test_every_limit_down_to_the_floor_is_kept_in_a_complete_program(name):
    card = SCHEDULES[name]
    program = card.make(Request(4, 8, card.default_chunks))
    costs = with_copies(program, k=1.0)
    begun = Lowering().begin(Context(program, costs))
    before = max(rank.units for rank in peaks(begun.program, costs))
    views = [View.of(begun.program, r, costs, ALL) for r in range(4)]
    floor = max(view.floor for view in views)
    plain = begun.timeline.makespan
    for limit in (floor, (floor + before) / 2, before):
        found = Lowering(offload=Offload((limit,) * 4, ALL)).lower(Context(program, costs))
        assert keeps(found, limit)
        work = [[op for op in ops if op.kind not in COPY] for ops in found.program.ranks]
        assert work == [list(ops) for ops in Lowering().lower(Context(program, costs)).program.ranks]
        assert found.timeline.makespan >= plain - 1e-9
        for rank in range(4):
            assert max(point.units for point in over_time(found.timeline, rank, costs)) <= limit + 1e-6
    with refused("E303"):
        Lowering(offload=Offload((floor - 0.01,) * 4, ALL)).lower(Context(program, costs))


def test_what_has_to_moves_and_nothing_else():
    program = SCHEDULES["dualpipe"].make(Request(4, 8, 1, overlap=True))
    costs = with_copies(program, k=0.3)
    before = max(rank.units for rank in peaks(program, costs))
    found = Lowering(offload=Offload((before - 2,) * 4, ALL)).lower(Context(program, costs))
    assert share(found.program) > 0 and keeps(found, before - 2)
    program = SCHEDULES["1f1b"].make(Request(4, 8, 1))
    assert moved(program, Context(program, with_copies(program)), 4.0).program is program
    context = Context(program, with_copies(program))
    limits = (2.0, 4.0, 4.0, 4.0)
    first, again = (Offload(limits, frozenset({0})).run(program, context) for _ in range(2))
    assert first == again
    assert {op.stage for ops in first.ranks for op in ops if op.kind in COPY} == {0}


@cache
def steps(k):
    program = SCHEDULES["gis"].make(Request(4, 12, 2))
    context = Context(program, with_copies(program, k=k))
    return [moved(program, context, limit).timeline.makespan for limit in (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)]


def test_more_room_and_faster_copies_are_never_slower():
    for k in (0.25, 0.5, 1.0):
        assert all(a >= b - 1e-6 for a, b in itertools.pairwise(steps(k))), (k, steps(k))
    for slower, faster in itertools.pairwise((1.0, 0.5, 0.25)):
        assert all(a >= b - 1e-6 for a, b in zip(steps(slower), steps(faster), strict=True))


LEAST = {  # p = 8, m = 24, unit costs, whole chunks: (v, g, k) -> a peak without added time
    (2, 8, 0.25): 1.0, (2, 8, 0.5): 2.5, (2, 8, 1.0): 5.5, (4, 8, 0.25): 0.5, (4, 8, 0.5): 2.5, (4, 8, 1.0): 4.5,
}  # fmt: skip


@pytest.mark.long("4-8-0.5", "4-8-1.0", "4-8-0.25")
@pytest.mark.parametrize(("v", "g", "k"), LEAST)
def test_the_least_peak_without_added_time(v, g, k):
    program = SCHEDULES["gis"].make(Request(8, 24, v, group=g))
    context = Context(program, with_copies(program, k=k))
    limit = LEAST[v, g, k]
    found = moved(program, context, limit)
    assert keeps(found, limit) and found.timeline.makespan <= context.timeline.makespan + 1e-6


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_no_slower_in_every_row_of_the_reference(part):
    found = compared(MOVED[part::4])
    assert not [late for late, _ in found if late > 1e-4]
    assert sum(moved for _, moved in found) / len(found) <= 0.36


@pytest.mark.long("v-half-3", "v-min-2")
@pytest.mark.parametrize("memory_limit", [None, "1.0x"])
@pytest.mark.parametrize("activations", ["keep", "offload", "auto"])
@pytest.mark.parametrize(("kind", "units"), [("zb-v", 4), ("v-half", 3), ("v-min", 2)])
def test_a_limit_by_name_holds_whatever_may_move(kind, units, activations, memory_limit):
    schedule = {} if memory_limit is None else {"memory_limit": memory_limit}
    costs = {"f": 1.0, "b": 1.0, "w": 1.0, "offload": 1.0}
    one = job(kind=kind, memory={"activations": activations}, costs=costs, schedule=schedule)
    compiled = compile_job(one, budget=0.1)
    assert max(rank.peak_activation_units for rank in compiled.report.per_rank) <= units + 1e-9
    copies = any(op.kind in COPY for ops in compiled.program.ranks for op in ops)
    assert not copies if activations == "keep" else copies or kind == "zb-v" or activations == "auto"


BY_HAND = {"zb-auto": ["1f1b"], "v-auto": [], "looped-zb": ["interleaved-1f1b", "gis"]}
DRAWN = [(p, m, limit, k) for p, m, limit in ((4, 5, "0.35x"), (3, 6, "0.4x"), (2, 7, "0.6x")) for k in (0.3, 1.0)]


@pytest.mark.long
@pytest.mark.parametrize(("p", "m", "limit", "k"), few(DRAWN, 1))
@pytest.mark.parametrize("kind", BY_HAND)
def test_no_search_is_behind_orders_by_hand_of_its_placement_or_behind_a_shorter_one(kind, p, m, limit, k):
    def step(kind, budget=0.0):
        chunks = {"chunks": 2} if kind in ("looped-zb", "interleaved-1f1b", "gis") else {}
        costs = {"f": 1.0, "b": 1.0, "w": 1.0, "comm": 0.5, "offload": k}
        changes = {"schedule": {"memory_limit": limit, **chunks}, "costs": costs, "memory": {"activations": "offload"}}
        return compile_job(job(kind=kind, pp=p, m=m, layers=2 * p, **changes), suggest=False, budget=budget).step_ms

    found = step(kind)
    assert all(found <= step(other) + 1e-9 for other in BY_HAND[kind])
    assert step(kind, 0.1) <= found + 1e-9


@pytest.mark.parametrize("limit", ["0.5x", "0.8x"])
def test_nothing_moves_before_a_step_without_a_barrier_knows_that_its_forwards_stand(limit):
    costs = {"f": 1.0, "b": 1.0, "w": 1.0, "comm": 0.1, "offload": 0.3}
    more = {"costs": costs, "memory": {"activations": "offload"}, "optimizer": {"sync": "post-validate"}}
    schedule = {"chunks": 4, "memory_limit": limit}
    made = compile_job(job(kind="interleaved-1f1b", pp=3, m=4, layers=12, schedule=schedule, **more), suggest=False)
    for ops in made.program.ranks:
        kinds = [op.kind for op in ops]
        assert Kind.OFFLOAD in kinds and not COPY & {*kinds[: kinds.index(Kind.REDO)]}
    assert max(rank.peak_activation_units for rank in made.report.per_rank) <= 3 * float(limit[:-1]) + 1e-6


def lowered(name, p=4, m=8, k=0.7, limit=2.0, duplex=False, **changes):
    """A complete program whose ranks keep to a limit, at costs with `changes`."""
    card = SCHEDULES[name]
    program = card.make(Request(p, m, card.default_chunks))
    costs = replace(with_copies(program, 1.0, 1.1, 0.9, 0.05, k=k), **changes)
    return Lowering(offload=Offload((limit,) * p, ALL, duplex=duplex)).lower(Context(program, costs))


@pytest.mark.parametrize("name", ["1f1b", "gis", "interleaved-1f1b", "gpipe"])
@pytest.mark.parametrize("rendezvous", [False, True])
def test_walked_by_time_a_program_takes_as_long_as_in_any_order(name, rendezvous):
    found = lowered(name, rendezvous=rendezvous)
    plain, costs = found.timeline, found.costs
    length = simulate.lengths(found.graph, costs)
    start, end = [0.0] * len(length), [0.0] * len(length) + [0.0] * 5
    order = by_time(found.graph, end, posted=rendezvous)
    simulate._slowly(found.graph, costs, order, length, start, end, Links(found.graph, costs))
    assert start == pytest.approx(plain.start) and end == pytest.approx(plain.end)


@pytest.mark.long("interleaved-1f1b-2")
@pytest.mark.parametrize("shared", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "gis"])
def test_no_two_copies_of_a_direction_are_on_a_link_at_once(name, shared):
    found = lowered(name, shared=shared)
    assert keeps(found, 2.0)
    assert clocked.problems(found.timeline, found.costs) == []


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved-1f1b", "gis"])
def test_copies_in_both_directions_at_once_keep_the_limit_and_are_no_slower(name, shared):
    one, both = (lowered(name, k=0.9, duplex=duplex, shared=shared) for duplex in (False, True))
    assert keeps(both, 2.0) and both.program.duplex
    assert clocked.problems(both.timeline, both.costs) == []
    if shared == 1:
        assert both.timeline.makespan <= one.timeline.makespan * (1 - 0.1 * (name == "gis")) + 1e-6


def test_the_clock_finds_copies_that_do_not_know_of_each_other():
    both = lowered("gis", duplex=True)
    at_once = replace(both.timeline, graph=build(replace(both.program, duplex=False)))
    assert clocked.problems(both.timeline, both.costs) == [] != clocked.problems(at_once, both.costs)
    alone = lowered("1f1b")
    assert clocked.problems(alone.timeline, alone.costs) == []
    assert clocked.problems(alone.timeline, replace(alone.costs, shared=2)) != []


def beside_published(rows):
    """The excess over the published lists, run in lock step by pairs of ranks, as shares."""
    for row in rows:
        plain = case(row)
        context = Context(plain.program, replace(plain.costs, shared=2, alone=0.7))
        found = moved(context.program, context, float(row["peak_after"]))
        assert clocked.problems(found.timeline, found.costs) == []
        yield found.timeline.makespan / float(row["makespan_replayed"]) - 1


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_pairs_on_a_link_in_every_row_of_the_reference(part):
    late = [*beside_published(MOVED[part::8])]
    assert sum(one <= 1e-4 for one in late) >= 0.8 * len(late) and max(late) < 0.092


def test_a_job_says_what_copies_share(tmp_path):
    found = planned(tmp_path, "gis", hardware={"device": "cuda"})
    assert found.program.duplex and not planned(tmp_path, "gis").program.duplex
    found.write(tmp_path / "plan")
    assert StoredPlan.read(tmp_path / "plan").program == found.program
    alone = planned(tmp_path, "gis")
    both = planned(tmp_path, "gis", hardware={"host_shared": 4})
    assert (alone.costs.shared, both.costs.shared) == (1, 4)
    assert both.timeline.makespan > alone.timeline.makespan


PARTS = ("keep", "recompute", "offload", "recompute+offload")


def planned_for(activations, *, kind="1f1b", limit="0.5x", offload=1.0, f=1.0, p=4, m=8, chunks=None, **more):
    costs = {"f": f, "b": 1.0, "w": 1.0, **({} if offload is None else {"offload": offload})}
    schedule = {"memory_limit": limit, **({} if chunks is None else {"chunks": chunks})}
    changes = {"costs": costs, "schedule": schedule, "memory": {"activations": activations}, **more}
    return compile_job(job(kind=kind, pp=p, m=m, layers=16, **changes), suggest=False, budget=0.0)


def words(activations):
    """The choices of stages."""
    return {activations} if isinstance(activations, str) else {*activations.values()}


def step(activations, **how):
    """ms of a step, infinite without a plan."""
    try:
        return planned_for(activations, **how).step_ms
    except ZbcError as error:
        assert {each.code for each in error.errors} <= {"E301", "E302", "E303"}
        return float("inf")


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(["1f1b", "gis", "zb-v", "zb-auto", "looped-zb", "zb-h1", "interleaved-1f1b"]),
    limit=st.sampled_from(["0.25x", "0.4x", "0.6x", "0.9x"]),
    offload=st.sampled_from([0.3, 1.0, 2.5, 6.0]),
    f=st.sampled_from([0.4, 1.0]),
    m=st.sampled_from([4, 7]),
)
def test_auto_is_never_slower_than_one_of_its_parts(**how):
    assert step("auto", **how) <= min(step(part, **how) for part in PARTS) * (1 + 1e-9)


@pytest.mark.long
def test_each_part_is_the_fastest_somewhere():
    def chosen(**how):
        compiled = planned_for("auto", **how)
        return as_ordered(compiled.job, compiled.found).memory.activations

    assert chosen(limit="1.0x") == "keep"
    assert chosen(limit="0.5x", offload=0.3) == "offload"
    assert words(chosen(limit="0.5x", offload=20.0, f=0.2)) == {"recompute"}
    both = chosen(kind="gis", limit="0.125x", offload=2.0, f=0.2, chunks=2)
    assert "recompute+offload" in words(both)


def test_without_a_known_speed_auto_weighs_keep_and_recompute_only():
    compiled = planned_for("auto", offload=None)
    assert compiled.report.copied is None and compiled.found.weighed == ()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["v-auto", "auto"])
def test_what_was_chosen_is_in_the_plan_and_plans_the_same_again(tmp_path, kind):
    compiled = planned_for("auto", kind=kind, limit="0.4x", offload=0.5)
    assert compiled.report.copied is not None and 0 < compiled.report.moved < 1
    assert max(rank.units for rank in compiled.memory) <= 1.6 + 1e-6
    compiled.write(tmp_path / "plan")
    kept = json.loads((tmp_path / "plan/plan.json").read_text())["planning"]["memory"]["activations"]
    values = words(kept)
    assert any("offload" in one for one in values) and "auto" not in values
    again = compile_job(load_job(tmp_path / "plan"), suggest=False, budget=0.0)
    assert again.step_ms == pytest.approx(compiled.step_ms)


def test_only_the_stages_that_are_open_are_chosen_for():
    compiled = planned_for({"0": "auto", "1": "recompute"}, limit="0.75x", offload=0.3)
    memory = compiled.found.activations
    assert (memory.of(0), memory.of(1), memory.of(2)) == ("offload", "recompute", "keep")


def test_a_bound_knows_nothing_of_memory_where_copies_are_possible():
    assert not planned_for("auto", limit="0.5x", offload=0.3).found.bounds.memory
    tight = planned_for("keep", limit="0.5x", kind="zb-auto")
    loose = planned_for("offload", limit="0.5x", kind="zb-auto")
    assert loose.report.lower_bound_makespan_ms < tight.report.lower_bound_makespan_ms
    assert loose.report.lower_bound_makespan_ms <= loose.report.makespan_ms


def test_what_does_not_fit_names_the_limit_with_recompute_too():
    with refused("E303", hint="recompute+offload"):
        planned_for("offload", limit="0.1x")
    with refused("E303") as caught:
        planned_for("auto", limit="0.001x")
    least = caught.value.hint.partition('memory_limit = "')[2].partition("x")[0]
    assert float(least) < 0.1
    assert planned_for("auto", limit=f"{least}x").step_ms > 0


def test_a_plan_that_needs_too_much_of_the_host_is_not_chosen():
    compiled = planned_for("auto", limit="0.5x", offload=0.3, hardware={"host_gib": 1e-6})
    assert compiled.report.copied is None


@pytest.mark.long
@settings(max_examples=6, deadline=None)
@given(
    kind=st.sampled_from(["zb-h1", "zb-h2", "zb-v", "zb-auto", "v-half", "looped-zb", "auto"]),
    gib=st.sampled_from([0.3, 0.45, 0.6, 0.9, 1.4, 4.0]),
    m=st.sampled_from([4, 6]),
)
def test_auto_recomputes_nothing_where_keeping_takes_hardly_more_memory_and_is_faster(kind, gib, m):
    model = {"hidden": 512, "heads": 8, "seq_len": 512, "vocab": 2000}
    changes = {"model": model, "hardware": {"memory_gib": gib}, "memory": {"activations": "auto"}}
    try:
        compiled = compile_job(job(kind=kind, pp=4, m=m, layers=14, **changes), suggest=False, budget=0.0)
    except ZbcError as error:
        assert {each.code for each in error.errors} <= {"E301", "E302", "E303"}
        return
    again = [stage.stage for stage in compiled.report.cut.stages if stage.recompute]
    event(f"recomputes {bool(again)}")
    assert kept(compiled) is None


@pytest.mark.parametrize("kind", ["1f1b", "interleaved-1f1b"])
def test_auto_runs_the_fewest_layers_of_each_rank_again_that_fit(kind):
    model = {"hidden": 256, "heads": 8, "seq_len": 256, "vocab": 500}
    how = {"kind": kind, "pp": 2, "layers": 12, "model": model, "partition": {"layers_per_stage": "equal"}}
    kept = max(rank.bytes for rank in compile_job(job(**how)).memory)
    how["hardware"] = {"memory_gib": 0.9 * kept / GIB}
    found = compile_job(job(memory={"activations": {"recompute": "auto"}}, **how))
    counts = [int((found.job.memory.of(s) + " 0").split()[1]) for s in range(len(found.layers))]
    assert 0 < max(counts) < 6
    for rank, room in enumerate(found.job.rooms):
        few = [max(0, count - (s % 2 == rank)) for s, count in enumerate(counts)]
        named = {str(s): f"recompute {n}" if n else "keep" for s, n in enumerate(few)}
        less = compile_job(job(memory={"activations": named}, **{**how, "hardware": {}}))
        assert found.memory[rank].bytes <= room and (few == counts or less.memory[rank].bytes > room)
