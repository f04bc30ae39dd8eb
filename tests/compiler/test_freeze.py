"""Freezing: the linear program against published instances, its rounding, its bounds, and the settings it excludes."""

import sys

import pytest

from tests.jobs import job
from tests.lowered import lower
from tests.recorded_runs import World, record
from tests.refusals import refused
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.passes.freeze import Freeze, alike, frozen_by_stage
from zbc.compiler.passes.freeze_shares import frozen_shares
from zbc.compiler.recorded.times import median_ms, times_of
from zbc.compiler.recorded.view import typical
from zbc.compiler.schedules import Request, find
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import simulate
from zbc.errors import ZbcError
from zbc.ir import WHOLE, Kind, Op

# schedule, chunks, cap: ms of the step with F = B = W = 1 per rank (p = 4, m = 8), mean frozen share
INSTANCES = [
    ("1f1b", None, 0.0, 33.0, 0.0),
    ("1f1b", None, 0.5, 26.0, 0.375),
    ("1f1b", None, 0.8, 23.6, 0.675),
    ("1f1b", None, 1.0, 22.0, 0.875),
    ("zb-h1", None, 0.5, 23.0, 0.5),
    ("zb-h1", None, 0.8, 22.0, 0.625),
    ("interleaved-1f1b", 2, 0.5, 23.0, 0.328125),
    ("zb-v", None, 0.5, 21.5, 0.40625),
    ("gpipe", None, 0.5, 26.0, 0.5),
]


def context(schedule, p=4, m=8, v=None, **costs):
    found = find(schedule)
    program = lower(found.make(Request(p=p, m=m, v=found.stages_per_rank(v))), "before-step")
    return Context(program, Costs.uniform(program.placement, **costs))


@pytest.mark.parametrize(("schedule", "v", "most", "ms", "share"), INSTANCES)
def test_published_instances(schedule, v, most, ms, share):
    found = context(schedule, v=v)
    shares = frozen_shares(found.program, found.graph, found.costs, most)
    assert shares.ms == pytest.approx(ms, rel=1e-6)
    parts = sum(op.kind.makes_part for _, _, op in found.program)
    assert sum(shares.of.values()) / parts == pytest.approx(share, abs=1e-6)


@pytest.mark.always("32")
@pytest.mark.long
@pytest.mark.parametrize("m", [32, 128])
def test_a_large_program_is_solved_at_its_ends(m):
    """16 ranks: 110 ms with 32 microbatches, solved whole; each further one adds F + B + W / 2."""
    found = context("1f1b", 16, m)
    assert (frozen_shares(found.program, found.graph, found.costs, 0.5).ms is None) == (m == 128)
    after = found.then(Freeze(0.5).run(found.program, found))
    assert after.timeline.makespan == pytest.approx(110 + 2.5 * (m - 32))
    assert after.timeline.makespan < alike(found, 0.5)
    assert max(frozen_by_stage(after.program)) <= 0.5 + 1e-9


@pytest.mark.parametrize("schedule", few(["1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "gpipe"], ("1f1b", "zb-v")))
@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("most", few([0.1, 0.3, 0.5, 1.0], (0.3,)))
def test_whole_layers_are_frozen_and_the_cap_is_kept(schedule, layers, most):
    found = context(schedule, f=1.3, b=1.1, w=0.9, comm=0.1)
    stages = found.program.placement.stages
    program = Freeze(most, (layers,) * stages).run(found.program, found)
    check_all(program)
    possible = {round(WHOLE * k / layers) for k in range(layers + 1)}
    assert {op.share for _, _, op in program if op.kind.makes_part} <= possible
    assert max(frozen_by_stage(program)) <= most + 0.005
    asked = frozen_shares(found.program, found.graph, found.costs, most)
    # A stage rounds by less than a layer, and that can come once on each stage of a path.
    within = asked.ms + stages * 0.9 / (layers * stages / 4)
    assert found.then(program).timeline.makespan <= min(within, found.timeline.makespan) + 1e-9


def test_what_a_frozen_op_takes():
    costs = Costs.uniform(find("1f1b").make(Request(p=2, m=2, v=1)).placement, f=1.0, b=2.0, w=3.0)
    assert costs.duration(Op(Kind.W, 0, 0, share=25)) == pytest.approx(0.75)
    assert costs.duration(Op(Kind.BW, 0, 0, share=0)) == pytest.approx(2.0)
    cheaper = costs.with_ms(bw=(4.0, 4.0))  # both in one walk: the W part of it is 2
    assert cheaper.duration(Op(Kind.BW, 0, 0, share=50)) == pytest.approx(3.0)


def test_what_freezing_lacks_or_does_not_go_with_is_said(monkeypatch):
    groups = {"kind": "dualpipe-v", "costs": {"f": 1.0, "b": 1.0, "w": 1.0, "overlap": 0.5}}
    with refused("E110", match="groups of ops") as caught:
        compile_job(job(freeze={"most": 0.5}, **groups))
    assert caught.value.hint
    with pytest.raises(ZbcError, match=r"freeze\.most\.0"):
        job(freeze={"after": 3})
    monkeypatch.setitem(sys.modules, "ortools.linear_solver", None)
    with refused("E602", match="ortools", hint="zbc[solve]"):
        compile_job(job(freeze={"most": 0.5}))


@pytest.mark.parametrize("after", [0, 6])
def test_a_recording_tells_what_whole_ops_take(tmp_path, after):
    """Ops take twice the planned times; less with frozen layers, unless the steps come before freezing."""
    compiled = compile_job(job(freeze={"most": [0.3, after] if after else 0.3}, costs={"f": 1.0, "b": 1.0, "w": 1.0}))
    assert {op.share for _, _, op in compiled.program} > {WHOLE}

    def took(op, rank, step):
        return 2.0 * compiled.costs.duration(op._replace(share=WHOLE) if step <= after else op)

    trace = record(compiled, tmp_path, World(took))
    assert trace.plan.program.freezes == (after < 4)
    times = times_of(typical(trace))
    samples = [ns for (kind, _), some in times.cost.items() for ns in some if kind is Kind.BW]
    assert samples and {round(ns, -3) for ns in samples} == {4_000_000}
    ms = {k.row.cost: tuple(median_ms(times.cost[k, s]) for s in range(4)) for k in (Kind.F, Kind.BW)}
    assert ms["bw"] == pytest.approx([4.0] * 4)
    costs = compiled.costs.with_ms(**ms, b=(2.0,) * 4, w=(2.0,) * 4)
    whole = compiled.report.freezing.unfrozen_ms
    meant = simulate(trace.plan.program, costs).makespan
    assert meant == pytest.approx(2 * (compiled.report.makespan_ms if after < 4 else whole))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "gpipe"])
def test_no_step_is_below_its_bound_and_no_stage_frozen_beyond_its_share(schedule):
    report = compile_job(job(kind=schedule, freeze={"most": 0.7}, costs={"f": 1.0, "b": 1.2, "w": 0.8})).report
    assert report.lower_bound_makespan_ms <= report.makespan_ms + 1e-9 <= report.freezing.unfrozen_ms + 2e-9
    assert report.lower_bound_span_ms <= report.span_ms + 1e-9
    assert max(report.freezing.by_stage) <= 0.7 + 0.5 / WHOLE
