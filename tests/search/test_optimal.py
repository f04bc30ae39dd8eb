"""The search against true optima: small pipelines whose best order CP-SAT has proven (see bench/plan.py optima)."""

import itertools
import json
import sys
from pathlib import Path

import pytest

from tests.jobs import job
from tests.refusals import refused
from tests.search.instances import Instance, instance
from tests.tiers import few
from zbc.cli import main
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.search.candidates import Bench
from zbc.compiler.sim.bounds import bounds
from zbc.exact.solve import solve
from zbc.ir import Placement

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
