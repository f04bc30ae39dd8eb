"""No order beats a lower bound, orders that meet it do by theory; searches against optima that CP-SAT has proven."""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.jobs import job
from tests.lowered import lower
from tests.refusals import refused
from tests.search.instances import PROFILES, Instance, Recorder, costs, instance
from tests.tiers import few
from tests.uneven import FORK, eager
from zbc.cli import main
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.search import pipes as two_pipes
from zbc.compiler.search.candidates import Bench
from zbc.compiler.search.feasible import least_of
from zbc.compiler.search.follow import Manner, follow
from zbc.compiler.search.keys import learned, policies
from zbc.compiler.sim.bounds import bounds, with_sums
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import simulate
from zbc.exact.solve import solve
from zbc.ir import Placement


def above(timeline, least, said=""):
    """Asserts that a timeline is not shorter than its bounds."""
    assert timeline.span >= least.span * (1 - 1e-9), said
    assert timeline.makespan >= least.makespan * (1 - 1e-9), said


def timed(program, given, m, said=""):
    """The timeline of a program, not above the bounds with any memory and with what it uses, and these bounds."""
    timeline, used = simulate(program, given), [rank.units for rank in peaks(program, given)]
    found = [bounds(program.placement, given, m, limits) for limits in (None, used)]
    for least in found:
        above(timeline, least, said)
    return timeline, found


SIZES = [(2, 6), (3, 20), (4, 8), (8, 24), (8, 64)]


@pytest.mark.long("braid-v", "chimera", "dualpipe")
@pytest.mark.parametrize("name", few(SCHEDULES, lambda name: name not in ("hanayo", "bitpipe")))
def test_no_named_schedule_beats_the_bounds_of_the_memory_it_uses(name):
    schedule, rng = SCHEDULES[name], Random(name)
    for _ in range(4 if schedule.searched else 40):
        p, m = (rng.randint(1, 4), rng.randint(1, 6)) if schedule.searched else (rng.randint(1, 8), rng.randint(1, 24))
        p *= schedule.ranks_in
        v = rng.choice([v for v in (1, 2, 3, 4) if schedule.allows(v)])
        given = costs(rng, schedule.placement(p, v))
        try:
            program = schedule.make(Request(p, m, v, costs=given))
        except Exception as error:
            if getattr(error, "code", None) == "E303":  # v-min and v-half have limits of their own
                continue
            raise
        timeline, found = timed(program, given, m)
        busiest = max(timeline.busy(rank) for rank in range(p))
        said = "a bound below the work of the busiest rank says nothing"
        assert all(least.span >= busiest * (1 - 1e-9) for least in found), said


@pytest.mark.parametrize("block", few(range(20), 8))
def test_no_random_order_beats_the_bounds(block, compiled):
    met = 0
    for seed in range(1000 + 20 * block, 1020 + 20 * block):
        given, rng = instance(seed, ranks=8, microbatches=12), Random(seed)
        v, least = given.problem.v, given.bounds
        bench = Recorder(given.problem, compiled, rng.choice(("span", "makespan")))
        bench.order(given.simplest[0][1], "one by one")
        for recipe in [*policies(v)[:6], *rng.sample(learned(v), 12)]:
            bench.decode(recipe, "decoded")
        bench.anneal(bench.found[0], 400, 0.1, seed, 0.0)
        bench.anneal(bench.found[-1], 400, 1.0, seed, 0.0)
        for span, makespan, origin in bench.seen.values():
            assert span >= least.span * (1 - 1e-9), (seed, origin)
            assert makespan >= least.makespan * (1 - 1e-9), (seed, origin)
        met += min(span for span, _, _ in bench.seen.values()) <= least.span * (1 + 1e-9)
    assert met >= 2  # bounds that nothing comes near would prove nothing


@pytest.mark.long
@pytest.mark.parametrize("objective", few(["span", "makespan"], ("makespan",)))
def test_no_bound_is_above_a_proven_optimum(objective):
    met = 0
    for seed in range(60):
        given = instance(seed, ranks=3, chunks=2, microbatches=4, digits=1)
        proof = solve(given.problem, objective, seconds=20)
        assert proof.optimal
        assert given.lower(objective) <= proof.cost * (1 + 1e-9), seed
        met += given.lower(objective) >= proof.cost * (1 - 1e-9)
    assert met >= 15


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_h1_is_optimal_at_the_memory_of_1f1b(p, m, profile):
    """If T_W <= w (T_B + T_W) and W is not longer than F and B, with w the share of activations that W needs."""
    f, b, w, comm = profile
    given = Costs.uniform(Placement.linear(p), f, b, w, comm)
    least = bounds(Placement.linear(p), given, m, float(p))
    bubble = (p - 1) * (f + b - w + 4 * comm)
    assert least.span == pytest.approx(m * (f + b + w) + bubble)
    timeline = simulate(SCHEDULES["zb-h1"].make(Request(p, m)), given)
    assert timeline.span == pytest.approx(least.span)
    assert timeline.makespan == pytest.approx(least.makespan)


@pytest.mark.parametrize("profile", PROFILES[:3])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_memory_buys_no_makespan_beyond_the_way_down(p, m, profile):
    """The bubble of a makespan is at least the first microbatch's way down the ranks; here B is not longer than F."""
    f, b, w, comm = profile
    work = m * (f + b + w)
    linear, v = Placement.linear(p), Placement.vshape(p)
    assert bounds(linear, Costs.uniform(linear, *profile), m).makespan == pytest.approx(work + (p - 1) * (f + comm))
    assert bounds(v, Costs.uniform(v, *profile), m).makespan == pytest.approx(work + (p - 1) * (f / 2 + comm))


@pytest.mark.long
@pytest.mark.parametrize("block", few(range(5), 2))
def test_no_order_of_two_pipes_beats_the_bounds(block):
    """Random starts, random costs, any split of the microbatches, and a list scheduler that fills the gaps."""
    met = 0
    for seed in range(100 * block, 100 * block + 60):
        rng = Random(seed)
        p, v, m = rng.randint(1, 6), rng.randint(1, 3), rng.randint(1, 10)
        placement = Placement.bidirectional(Placement.vshape(p, v).pipes[0])
        given = costs(rng, placement)
        odds = rng.choice((0.0, 0.2, 0.5, 1.0))
        starts = sorted((rng.randint(0, 4 * m), int(rng.random() < odds)) for _ in range(m))
        base = two_pipes.by_slots(placement, starts, "random", split=rng.random() < 0.7)
        used = [rank.units for rank in peaks(base, given)]
        room = [units * rng.choice((1.0, 1.5)) for units in used]
        for program in (base, follow(base, given, room, Manner(8, 0.5)), follow(base, given, used, Manner(40))):
            timeline, found = timed(program, given, m, seed)
            met += sum(timeline.makespan <= least.makespan * (1 + 1e-9) for least in found)
    assert met >= 5


@pytest.mark.parametrize("pipes", [1, 2, 3])
def test_no_order_beats_the_bounds_of_ranks_that_differ(pipes):
    """Any number of stages per rank and pipe, also none, and microbatches dealt to some pipes only."""
    nearest = float("inf")
    for seed in range(60):
        rng = Random(seed)
        stages, ranks = rng.randint(1, 6), rng.randint(1, 5)
        homes = [rng.randrange(ranks) for _ in range(stages * pipes)]
        names = {rank: number for number, rank in enumerate(sorted(set(homes)))}
        placement = Placement(tuple(tuple(names[r] for r in homes[k::pipes]) for k in range(pipes)))
        given, m = costs(rng, placement), rng.randint(1, 8)
        used = rng.sample(range(pipes), rng.randint(1, pipes))
        program = eager(placement, m, split=rng.random() < 0.5, deal=lambda mb, used=used: used[mb % len(used)])
        timeline, found = timed(program, given, m, seed)
        nearest = min(nearest, *(timeline.makespan / least.makespan for least in found))
    assert nearest < 1.1


def test_least_memory_knows_the_stages_of_each_rank():
    placement = Placement(FORK)
    given = Costs.per_stage((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, (1.0, 2.0, 4.0), (0.5,) * 3, ((0.0,) * 2,) * 2)
    assert least_of(placement, given) == [1.0, 1.0, 2.0, 4.0]
    assert least_of(Placement(((0, 1, 1), (2, 2, 2))), given) == [1.0, 6.0, 7.0]


def test_what_a_b_leaves_may_be_almost_all_it_held():
    """Sums of per-layer memory differ in their last digits: no number of B's then makes room, but a W does."""
    nearly = Costs.per_stage((1.0,), (1.0,), (0.5,), (1.0,), (1.0 - 1e-16 * 4,), ((),))
    exactly = Costs.per_stage((1.0,), (1.0,), (0.5,), (1.0,), (1.0,), ((),))
    found, wanted = (bounds(Placement.linear(1), one, 9, 2.0) for one in (nearly, exactly))
    assert found.span == pytest.approx(wanted.span)


@pytest.mark.parametrize(
    "name",
    few(
        ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "chimera", "dualpipe", "zb-auto"],
        lambda name: name not in ("zb-v", "chimera"),
    ),
)
def test_no_schedule_beats_the_bounds_with_its_sums_and_gathers(name):
    """The bounds include sums, and are met if nothing hides them."""
    schedule, rng, nearest = SCHEDULES[name], Random(name), float("inf")
    for _ in range(30):
        p, m, v = 2 * rng.randint(1, 3), 2 * rng.randint(1, 5), schedule.default_chunks
        where, sharded = schedule.placement(p, v), rng.random() < 0.5
        even, longest = rng.random() < 0.3, rng.choice((0.5, 5.0))
        given = Costs.uniform(where) if even else costs(rng, where)
        reduce = [longest if even else rng.uniform(0, longest) for _ in range(where.stages)]
        given = given.with_ms(reduce=tuple(reduce), gather=tuple(reduce) if sharded else ())
        program = replace(schedule.make(Request(p, m, v, costs=given)), dp=2, sharded=sharded)
        lowered = lower(program, "before-step", given)
        plain = bounds(where, given, m)
        least = with_sums(plain, where, given)
        assert least.makespan > plain.makespan
        timeline = simulate(lowered, given)
        above(timeline, least)
        assert Context(lowered, given).step_ms("period") >= least.of("period") * (1 - 1e-9)
        nearest = min(nearest, timeline.makespan / least.makespan)
    assert nearest < 1.2


CLOSED = {  # the end of steps, and its times in addition to F, B and W
    "averaged": {"parallel": {"dp": 2, "average": {"share": 0.5}}},
    "averaged at once": {"parallel": {"dp": 2, "average": {"share": 1.0, "delay": 0}}},
    "summed": {"parallel": {"dp": 2}},
    "sliced": {"parallel": {"dp": 2}, "schedule": {"slices": 3, "cuts": "even"}},
    "shared out": {"parallel": {"dp": 2, "shard": "all"}},
    "ahead": {"parallel": {"dp": 2, "shard": "optimizer"}, "optimizer": {"sync": "post-validate"}},
    "frozen": {"parallel": {"tp": 2}, "freeze": {"most": 0.5}, "memory": {"activations": "recompute"}},
}


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize(("kind", "m"), [("gis", 2), ("1f1b", 1), ("zb-h1", 3), ("1f1b", 40)])
def test_no_plan_of_a_job_beats_the_bounds_that_it_says(name, kind, m):
    """Bounds count the times of the plan's own ops only."""
    times = {"f": 1.0, "b": 1.0, "w": 1.0, "reduce": 2.5, "tp": 0.4}
    changes = {**CLOSED[name], "parallel": {"pp": 2, **CLOSED[name]["parallel"]}}
    report = compile_job(job(kind=kind, m=m, costs=times, **changes), budget=0.0).report
    assert report.lower_bound_makespan_ms <= report.makespan_ms * (1 + 1e-9)
    assert report.lower_bound_span_ms <= report.span_ms * (1 + 1e-9)


CASES = json.loads((Path(__file__).parent / "optima.json").read_text())


def load(row):
    columns = (tuple(row[key]) for key in ("f", "b", "w", "act_b", "act_w"))
    costs = Costs.per_stage(*columns, (tuple(row["comm"]),))
    where = Placement((tuple(row["ranks"]),))
    return Instance(where, costs, row["m"], (row["limit"],) * where.ranks)


@pytest.mark.parametrize("row", CASES, ids=[row["name"] for row in CASES])
def test_no_bound_is_above_the_optimum(row):
    given = load(row)
    least = bounds(given.placement, given.costs, given.m, given.limits)
    assert getattr(least, row["objective"]) <= row["optimum"] * (1 + 1e-6)


QUICK = [row for row in CASES if len(row["ranks"]) * row["m"] <= 24]


@pytest.mark.long("1.5B linear p=2 m=6 0.5x span", "1.5B linear p=4 m=5 0.75x span")
@pytest.mark.parametrize("row", QUICK[::3], ids=[row["name"] for row in QUICK[::3]])
def test_the_solver_proves_the_optimum_again(row, compiled):
    given = load(row)
    proof = solve(given.problem, row["objective"], seconds=30)
    assert proof.optimal
    assert proof.cost == pytest.approx(row["optimum"], abs=1e-5)
    assert Bench(given.problem, compiled, row["objective"]).order(proof.order, "again") is not None
    again = solve(given.problem, row["objective"], start=proof.order, lower=given.lower(row["objective"]), seconds=30)
    assert again.cost == proof.cost


def orders_of_a_rank(given, rank):
    """Every legal order of one rank's ops that fits: microbatches in order per stage and kind, each along its path."""
    m, n, stages = given.m, given.placement.stages, given.placement.stages_of(rank)
    limit = given.limits[rank] if given.limits else float("inf")
    path = [(0, s) for s in stages] + [(1, s) for s in reversed(stages)]
    before = {row: path[k - 1] if k else None for k, row in enumerate(path)} | {(2, s): (1, s) for s in stages}
    keep_b, keep_w = given.costs.units("kept"), given.costs.units("left")

    def extend(done, held, order):
        if len(order) == len(before) * m:
            yield tuple(order)
        for (kind, s), need in before.items():
            count = done[kind, s]
            after = held + (keep_b[s], keep_w[s] - keep_b[s], -keep_w[s])[kind]
            if count < m and (need is None or done[need] > count) and after <= limit + 1e-6:
                op = (kind * n + s) * m + count
                yield from extend(done | {(kind, s): count + 1}, after, [*order, op])

    return list(extend(dict.fromkeys(before, 0), 0.0, []))


@pytest.mark.long("17")
@pytest.mark.parametrize("seed", few([9, 16, 17, 63, 133, 199, 223, 252, 285, 340, 388], 5))
def test_the_solver_agrees_with_trying_every_order(seed, compiled):
    given = instance(seed, ranks=3, chunks=2, microbatches=3, digits=(None, 1)[seed % 2])
    problem = given.problem
    benches = {objective: Bench(problem, compiled, objective) for objective in ("span", "makespan")}
    tried = 0
    for parts in itertools.product(*(orders_of_a_rank(given, r) for r in range(problem.p))):
        tried += 1
        for bench in benches.values():
            bench.order([op for part in parts for op in part], "tried")
    assert tried > 100
    for objective, bench in benches.items():
        proof = solve(problem, objective, seconds=30)
        assert proof.optimal
        assert proof.cost == pytest.approx(bench.best.cost(objective), rel=1e-6)


def test_a_proof_starts_from_what_it_is_given_if_it_can_be_run():
    given = load(CASES[0])
    order = given.simplest[0][1]
    stopped = solve(given.problem, "span", start=order, seconds=0.0)
    assert stopped.lower <= stopped.cost
    other = solve(given.problem, "span", start=order[:3] + order[:3] + order[6:], seconds=0.0)
    assert other.cost == stopped.cost


UNEVEN = {"f": 1.0, "b": 1.3, "w": 0.7, "comm": 0.2, "act_b": 1.0, "act_w": 0.4}
SMALL = {"parallel": {"pp": 3}, "costs": UNEVEN}


@pytest.mark.parametrize(
    ("kind", "limit", "shorter"),
    [("1f1b", None, True), *few([("v-min", None, True), ("1f1b-v", "0.5x", True), ("zb-auto", None, False)], 2)],
)
def test_a_plan_is_proven_optimal_or_gets_a_shorter_order(kind, limit, shorter):
    asked = job(schedule={"kind": kind, "microbatches": 4, "memory_limit": limit}, **SMALL)
    before, found = compile_job(asked, budget=0.0), compile_job(asked, budget=0.0, exact=60.0)
    exact, report = found.report.exact, found.report
    assert before.report.exact is None and exact.before_ms == pytest.approx(before.step_ms)
    assert (exact.ms < before.step_ms) == shorter and exact.ms == pytest.approx(found.step_ms)
    assert report.lower_bound_makespan_ms == pytest.approx(report.makespan_ms) and exact.gap == pytest.approx(
        0, abs=1e-9
    )
    assert "exact" not in report.predicted()
    assert all(rank.units <= (report.limits.activation_units or 99) + 1e-6 for rank in found.memory)
    assert found.program.split == before.program.split


def test_what_the_solver_does_not_know_is_refused():
    for changes, name in [
        ({"schedule": {"kind": "chimera"}}, "chimera|copies"),
        ({"schedule": {"kind": "zb-v", "slices": 2}}, "slices"),
        ({"optimizer": {"sync": "post-validate"}, "schedule": {"kind": "zb-h1"}}, "post-validate"),
        ({"schedule": {"objective": "period"}}, "period"),
        ({"parallel": {"pp": 4, "vocabulary": "shared"}}, "vocabulary"),
    ]:
        with refused("E110", match=f"(?s)exact.*({name})"):
            compile_job(job(**changes), budget=0.0, exact=1.0)
    with refused("E110", match="pairs of ops", hint="fewer microbatches"):
        compile_job(job(m=300), budget=0.0, exact=1.0)


def test_without_ortools_the_command_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(SystemExit):
        main(["plan", "plans/lesson.toml", "--exact", "1s", "-o", str(tmp_path / "plan")])
    assert "E602" in (said := capsys.readouterr().err) and "zbc[solve]" in said and not (tmp_path / "plan").exists()
