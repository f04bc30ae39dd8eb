"""Consecutive steps: their cost with a barrier and without it; without a flush: order, checks of E210, settings."""

import json
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest

from tests.compiler import cycles
from tests.compiler.cycles import Work
from tests.compiler.grid import FIXED, make
from tests.jobs import job
from tests.listing import edited
from tests.lowered import lower
from tests.refusals import error_of, refused
from tests.tiers import few
from zbc.compiler import steps
from zbc.compiler.check import check_all, survival
from zbc.compiler.check.versions import _stops
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.graph import build
from zbc.compiler.schedules import SCHEDULES
from zbc.compiler.schedules.request import Request
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import simulate, steady_state
from zbc.compiler.steps import consecutive, in_a_row, period_of, settled, with_barrier, without_barrier
from zbc.compiler.whatif.noise import Noise, spread
from zbc.compiler.whatif.others import BASELINE, quick
from zbc.ir import NEXT, Kind, Op

CASES = json.loads((Path(__file__).parents[1] / "reference" / "flushless.json").read_text())["rows"]
SHAPES = [("1f1b", 1, 3, 1), ("1f1b", 2, 2, 1), ("1f1b", 4, 3, 1), ("1f1b", 4, 8, 1), ("interleaved-1f1b", 2, 4, 2)]
SHAPES += [("interleaved-1f1b", 4, 8, 2), ("interleaved-1f1b", 3, 9, 3), ("1f1b", 8, 8, 1)]
SHAPES += [("gis", 2, 4, 2), ("gis", 4, 8, 2), ("gis", 3, 6, 3)]


def body(schedule="1f1b", p=2, m=2, v=1, dp=1, costs=None):
    return lower(replace(SCHEDULES[schedule].make(Request(p, m, v)), dp=dp), "two-versions", costs)


@pytest.mark.long("p8 m8")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"p{case['p']} m{case['m']}")
def test_ten_steps_take_what_the_reference_says(case):
    p, m = case["p"], case["m"]
    if not case["two_versions_suffice"]:
        with refused("E210", hint=f"microbatches = {p - 1}"):
            body(p=p, m=m)
        return
    program = body(p=p, m=m)
    check_all(program)
    costs = Costs.uniform(program.placement)
    assert in_a_row(program, costs, 10).makespan == case["no_flush_10"]
    assert period_of(program, costs) == 3 * m
    with_flush = Costs.uniform(program.placement)
    assert 10 * makespan(SCHEDULES["1f1b"].make(Request(p, m)), with_flush) == case["flush_10"]


def makespan(program, costs):
    return simulate(lower(program), costs).makespan


@pytest.mark.parametrize(("schedule", "p", "m", "v"), few(SHAPES, SHAPES[:5]))
@pytest.mark.parametrize("dp", [1, 2])
def test_any_number_of_steps_runs(schedule, p, m, v, dp):
    program = body(schedule, p, m, v, dp)
    check_all(program)
    plain = build(lower(SCHEDULES[schedule].make(Request(p, m, v))))
    assert survival(build(program)).blocking_sends == survival(plain).blocking_sends
    for op in {op for ops in program.ranks for op in ops}:
        assert Op.parse(str(op)) == op
    costs = Costs.uniform(program.placement)
    assert period_of(program, costs) == pytest.approx(3 * m)
    lengths = [in_a_row(program, costs, steps).makespan for steps in (1, 2, 3, 7)]
    assert [b - a for a, b in pairwise(lengths)] == pytest.approx([3 * m] * 2 + [12 * m])


@pytest.mark.parametrize("name", sorted(name for name, card in SCHEDULES.items() if not card.steady))
def test_other_schedules_are_refused(name):
    card = SCHEDULES[name]
    with refused("E110"):
        lower(card.make(Request(2 * card.ranks_in, 8, card.default_chunks)), "two-versions")


def test_interleaved_rounds_end_with_a_step():
    with refused("E110", hint="set schedule.microbatches = 6"):
        body("interleaved-1f1b", 2, 5, 2)


def test_a_backward_before_the_step_of_the_step_before_is_found():
    """1F1B with B and W apart: the first B of the next step comes before the last W of this one."""
    split = edited(body(m=3), *((rank, r"BW (s\d m\d)", r"B \1, W \1") for rank in (0, 1)))
    check_all(split)  # W right after its B
    late = edited(split, (1, r"\bB s1 m0, ", ""), (1, "W s1 m2", "B s1 m0 next, W s1 m2"))
    with refused("E210", "STEP s1 comes after it"):
        check_all(late)


FAULTS = [  # the body, what is changed on ranks, and the codes of all errors
    ({}, [(0, "BW s0 m1, STEP s0", "STEP s0, BW s0 m1")], ["E206"]),
    ({"dp": 2}, [(0, "REDUCE s0, STEP s0", "STEP s0, REDUCE s0")], ["E206"]),
    *(({"dp": 2}, [(0, rf"\b{op}(, |$)", "")], ["E202"]) for op in ("STEP s0", "BW s0 m0", "REDUCE s0")),
    ({"dp": 2}, [(0, r"\bF s0 m0 next, ", "")], ["E202"] * 3),
    ({}, [(0, "$", ", VALIDATE"), (1, "$", ", VALIDATE")], ["E202"] * 2),
    ({}, [(0, "$", ", F s0 m2 next")], ["E202"] * 3),  # of a step after the next
    ({"m": 3}, [(1, "RECV_F s1 m0 next, ", ""), (1, "RECV_F s1 m1", "RECV_F s1 m0 next, RECV_F s1 m1")], ["E204"]),
    (  # after its first steps each rank waits for a message that the other sends only later
        {},
        [
            (0, "F s0 m1, SEND_F s0 m1, BW s0 m0", "BW s0 m0, F s0 m1, SEND_F s0 m1"),
            (1, "BW s1 m0, SEND_B s1 m0, F s1 m1", "F s1 m1, BW s1 m0, SEND_B s1 m0"),
        ],
        ["E201"],
    ),
]


@pytest.mark.parametrize(("how", "edits", "codes"), FAULTS)
def test_a_fault_of_steps_without_a_flush_is_found(how, edits, codes):
    broken = edited(body(**how), *edits)
    assert [one.code for one in error_of(check_all, broken).errors] == codes
    assert codes != ["E201"] or [one.code for one in _stops(broken)] == codes


GIVEN = {"f": 1.0, "b": 1.0, "w": 1.0}


def two(**changes):
    optimizer = {"sync": "two-versions", **changes.pop("optimizer", {})}
    return job(**{"kind": "1f1b", "costs": GIVEN, **changes}, optimizer=optimizer)


@pytest.mark.parametrize(
    ("optimizer", "fine"),
    [
        ({"every": 2}, {"sync": "asynchronous"}),
        ({"lookahead": True}, {"sync": "asynchronous"}),
        ({"sync": "asynchronous", "every": 3}, {"every": 2}),  # does not divide the microbatches of a step
    ],
)
def test_what_the_optimizer_cannot_do_in_such_steps_is_refused_and_what_helps_is_fine(optimizer, fine):
    assert {one.code for one in error_of(two, m=8, optimizer=optimizer).errors} == {"E110"}
    two(m=8, optimizer={**optimizer, **fine})


def test_its_report_says_the_period_the_flush_and_the_delay():
    made = compile_job(two(m=8))
    steps = made.report.flushless
    assert (steps.period_ms, steps.delay, steps.alone) == (24.0, (1, 1, 1, 1), False)
    assert made.settled_ms == 24.0 < steps.flush_ms
    alone = compile_job(two(m=8, optimizer={"sync": "asynchronous"})).report.flushless
    assert (alone.period_ms, alone.delay, alone.alone) == (24.0, (3, 2, 1, 0), True)


def test_memory_counts_a_second_copy_of_the_weights():
    plain = compile_job(two(m=8, optimizer={"sync": "before-step"}))
    both = compile_job(two(m=8))
    for one, other in zip(plain.memory, both.memory, strict=True):
        assert other.weights == pytest.approx(2 * one.weights, rel=0.02)  # constants are there once
        assert other.units == one.units


def test_too_few_microbatches_are_named_with_their_place_also_in_a_ramp():
    phases = {"microbatches": 8, "ramp": [{"microbatches": 3, "steps": 1}, {"microbatches": 4, "steps": 1}]}
    how = {"optimizer": {"sync": "two-versions"}, "data": {"kind": "synthetic"}}
    with refused("E210", hint="set microbatches of entry 0 of schedule.ramp = 4 or more"):
        compile_job(job(kind="1f1b", pp=5, layers=8, schedule=phases, **how), budget=0.0, suggest=False)
    with refused("E210") as found:
        compile_job(two(m=2))
    assert found.value.where is not None


@pytest.mark.parametrize("seed", few(range(100), 20))
def test_periods_and_peaks_are_those_of_the_unrolled_steps(seed, monkeypatch):
    asked, work = cycles.drawn(seed)

    def messages(costs, _):
        busy = tuple({edge: work.occupies * bool(ms) for edge, ms in pipe.items()} for pipe in costs.links)
        return replace(costs, rendezvous=work.rendezvous, occupies=busy if work.occupies else ())

    monkeypatch.setattr(Costs, "over", messages)  # as estimated ones: given ones wait for nothing
    made = compile_job(asked, budget=0.0)
    m, home = made.program.microbatches, made.program.placement.pipes[0]
    bodies = [[str(op) for op in ops] for ops in made.program.ranks]
    ms, held = (
        cycles.period(bodies, m, home, work),
        cycles.peaks(bodies, m, [asked.parallel.pp / len(home)] * len(home)),
    )
    assert made.settled_ms == pytest.approx(ms, rel=1e-9)
    assert [rank.units for rank in made.memory] == pytest.approx(held, abs=1e-9)
    assert made.report.lower_bound_ms("span") <= ms * (1 + 1e-9)


@pytest.mark.parametrize(("m", "comm", "steps"), [(3, 0.3, [10.2, 10.2, 10.2, 10.8]), (3, 0.1, [9.4, 9.4, 9.4, 9.6])])
def test_the_period_is_the_mean_of_steps_that_come_again(m, comm, steps):
    made = compile_job(two(m=m, costs={**GIVEN, "comm": comm}))
    ops, work = [[*map(str, ops)] for ops in made.program.ranks], Work([1.0] * 4, [2.0] * 4, [0.0] * 4, comm)
    ends = cycles.ends(ops, m, range(4), work, 30)
    assert sorted(b - a for a, b in pairwise(ends[0][20:25])) == pytest.approx(steps)
    assert made.settled_ms == pytest.approx(sum(steps) / 4)


@pytest.mark.long("4-7", "5-4", "4-8")
@pytest.mark.parametrize("sync", ["two-versions", "asynchronous"])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 2), (4, 7), (5, 4), (4, 8)])
def test_receives_of_a_cycle_are_placed_by_order(p, m, sync):
    """Messages that wait for a buffer are the default if times are estimated."""
    made = compile_job(job(kind="1f1b", pp=p, m=m, optimizer={"sync": sync}))
    for ops in made.program.ranks:
        received = [op for op in ops if op.kind.is_recv]
        assert len(received) == len({(op.kind, op.stage, op.mb % NEXT) for op in received})
    eager = period_of(made.program, made.costs.over("eager"))
    assert made.settled_ms == pytest.approx(eager), "no message waits for its buffer"


UNEVEN = {"per": "layer", "f": [1.0, 1.4, 0.8, 1.2, 0.9, 1.3, 1.0, 0.7], "b": 1.1, "w": 0.8, "comm": 0.2}


CHOSEN = [(kind, sync) for sync in ("two-versions", "asynchronous", "post-validate") for kind in ("1f1b", "gis")]


@pytest.mark.long("gis-two-versions", "gis-asynchronous", "auto-two-versions")
@pytest.mark.parametrize(("kind", "sync"), few([("auto", "two-versions"), *CHOSEN], ("auto", "gis")))
def test_plans_are_compared_and_bounded_by_the_step_that_is_reported(kind, sync):
    """With more memory a step is not longer, and 1F1B beside it is what it is by name."""
    steps = []
    for limit in ("1.0x", "1.2x", "2.0x", None):
        asked = {"kind": kind, "pp": 4, "m": 4, "optimizer": {"sync": sync}, "costs": UNEVEN}
        asked["schedule"] = {"memory_limit": limit}
        compiled = compile_job(job(**asked), suggest=False, budget=0.0)
        named = compile_job(job(**asked | {"kind": "1f1b"}), suggest=False, budget=0.0)
        assert compiled.step_ms == compiled.settled_ms >= compiled.report.lower_bound_ms("span") * (1 - 1e-9)
        assert sync == "post-validate" or compiled.step_ms == period_of(compiled.program, compiled.costs)
        assert quick(compiled.job, BASELINE).ms == pytest.approx(named.settled_ms, rel=1e-9)
        steps.append(compiled.step_ms)
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(steps)), steps


def test_without_a_flush_an_objective_changes_nothing():
    asked = {"kind": "auto", "pp": 2, "m": 4, "optimizer": {"sync": "two-versions"}}
    made = (job(**asked, schedule={"objective": objective}) for objective in (None, "makespan", "period"))
    plans = [compile_job(one, budget=0.0) for one in made]
    assert len({(plan.schedule, plan.step_ms, plan.layers) for plan in plans}) == 1


@pytest.mark.long("gis-8-asynchronous")
@pytest.mark.parametrize(("kind", "m", "sync"), [("1f1b", 4, "two-versions"), ("gis", 8, "asynchronous")])
def test_noise_is_of_steps_without_a_flush(kind, m, sync):
    """Undisturbed they take the period on average; a slow busiest rank makes each as much longer."""
    compiled = compile_job(
        job(kind=kind, pp=4, m=m, optimizer={"sync": sync}, costs=UNEVEN | {"comm": 0.0}), budget=0.0
    )
    still = spread(compiled.program, compiled.costs, Noise(trials=30), barrier=False)
    assert still.predicted == compiled.settled_ms == compiled.report.steady_state_ms
    assert still.mean == pytest.approx(compiled.settled_ms, rel=1e-6)
    slow = spread(compiled.program, compiled.costs, Noise(straggler=0.1, trials=40), barrier=False)
    assert len(slow.steps) == 40 and max(slow.slow) == pytest.approx(1.1 * compiled.settled_ms, rel=1e-6)


UNIT = 1.0


def costs_of(program, *, f=UNIT, b=UNIT, w=UNIT, comm=0.0, hop=0.0, step=0.0, tentative=None) -> Costs:
    """Times of a rank, shared evenly by its stages."""
    stages, ranks = program.placement.stages, program.placement.ranks
    made = Costs.uniform(program.placement, f, b, w, comm)
    each = [(ms * ranks / stages,) * stages for ms in (step, step if tentative is None else tentative)]
    return made.with_ms(step=each[0], tentative=each[1], hop=(hop,))


def of_complete(complete):
    return with_barrier(complete), without_barrier(complete)


def either_way(order, costs):
    """The times of an order with and without the barrier, equal from both of its complete programs."""
    timeline = simulate(order, costs)
    found = of_complete(Context(lower(order, costs=costs), costs))
    assert of_complete(Context(lower(order, "post-validate", costs), costs)) == pytest.approx(found)
    assert found[0] == pytest.approx(settled(Context(lower(order, costs=costs), costs)))
    assert found[0] >= timeline.makespan
    return found


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12)])
def test_an_optimizer_that_takes_no_time_costs_the_makespan_or_the_settled_span(name, p, m):
    program = make(name, p, m)
    costs = costs_of(program)
    timeline = simulate(program, costs)
    wanted = timeline.makespan, steady_state(timeline, costs)
    assert either_way(program, costs) == pytest.approx(wanted)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16)])
def test_zb_h2_and_zb_v_reach_the_work_of_a_rank_without_the_barrier(p, m):
    """arXiv 2401.10241: without a barrier their bubble is zero, with one p-1 and (p-1)/2 units."""
    for name, bubble in (("zb-h2", p - 1), ("zb-v", (p - 1) / 2)):
        program = make(name, p, m)
        assert either_way(program, costs_of(program)) == (pytest.approx(3 * m + bubble), pytest.approx(3 * m))


def test_verdicts_and_optimizers_take_their_time_with_and_without_the_barrier():
    program = make("zb-h2", 4, 8)
    barrier, ahead = either_way(program, costs_of(program, step=2.0))
    assert (barrier, ahead) == (pytest.approx(27 + 2.0), pytest.approx(24 + 2 * 2.0))
    cheap = either_way(program, costs_of(program, step=2.0, tentative=0.5))
    assert cheap[1] == pytest.approx(24 + 2.5)
    # From the last rank back to the first: three hops, which a warm-up of six forwards hides, until it does not.
    hidden, seen = (either_way(program, costs_of(program, hop=hop))[1] for hop in (0.5, 8.0))
    assert hidden == pytest.approx(24) and seen > 24 + 5


@pytest.mark.parametrize("name", FIXED)
def test_the_ops_of_a_step_without_a_barrier_run_in_the_order_they_need(name):
    program = lower(make(name, 4, 8), "post-validate")
    costs = costs_of(program, comm=0.1, hop=0.3, step=1.0)
    for timeline in islice(consecutive(program, costs), 3):
        at = {(span.rank, span.op): span for span in timeline}
        find = {(span.rank, span.op.kind): span for span in timeline if span.op.kind.row.closes == "ahead"}
        for rank in range(4):
            if rank:
                assert find[rank, Kind.NORM].start >= find[rank - 1, Kind.NORM].end + 0.3 - 1e-9
                assert find[rank - 1, Kind.VERDICT].start >= find[rank, Kind.VERDICT].end + 0.3 - 1e-9
            back = min(span.start for (r, op), span in at.items() if r == rank and op.kind in (Kind.B, Kind.BW))
            assert find[rank, Kind.COMMIT].end <= back + 1e-9


def test_steps_follow_without_a_gap_and_of_a_large_one_only_the_asked_time_is_told(monkeypatch):
    program = lower(make("zb-h2", 4, 8), "post-validate")
    costs = costs_of(program, step=1.0)
    timelines = list(islice(consecutive(program, costs), 4))
    for before, after in pairwise(timelines):
        assert after.first_start(0) == pytest.approx(before.last_end(0))
    assert timelines[3].last_end(0) - timelines[2].last_end(0) == pytest.approx(settled(Context(program, costs)))
    program, at = make("1f1b", 4, 8), costs_of(make("1f1b", 4, 8))
    monkeypatch.setattr(steps, "LARGE", 50)
    found = [of_complete(Context(lower(program, *sync, costs=at), at))[1] for sync in ((), ("post-validate",))]
    assert found[0] is None and found[1] > 24


def test_gathers_and_sums_take_their_time_with_and_without_the_barrier():
    # After each step, with a barrier or without: a forward needs all of them.
    program = replace(make("1f1b", 2, 4), dp=2, sharded=True)
    free, gathered = (costs_of(program).with_ms(gather=(ms,) * 2) for ms in (0.0, 2.0))
    (barrier, less), (longer, more) = either_way(program, free), either_way(program, gathered)
    assert longer == pytest.approx(barrier + 2.0)
    assert more == pytest.approx(less + 2.0)
    program = replace(make("1f1b", 2, 4), dp=2)
    costs = costs_of(program).with_ms(reduce=(5.0, 5.0))
    assert either_way(program, costs)[1] == pytest.approx(simulate(program, costs).makespan + 5.0)
