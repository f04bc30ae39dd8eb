"""Profiles from recorded times: layers whose stages cost what was recorded, and what is said to be unknown."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jobs import job
from tests.profiles import layer, profile_of
from tests.refusals import refused
from tests.tiers import few
from zbc.compiler import recall
from zbc.compiler.compile import compile_job
from zbc.compiler.recorded.derive import derive_from, solve
from zbc.compiler.recorded.replan import refuse_misfit, replan, with_profile
from zbc.compiler.recorded.times import Times
from zbc.ir import Kind
from zbc.job.profile import Host, LinkProfile

MS = st.floats(0.1, 10.0)
MINE = {"model": {"family": "mine:layers", "loss": "mse"}, "data": {"kind": "mine:Data"}}


@settings(deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_kinds_explain_what_stages_took(data, kinds, stages):
    names = [f"k{i}" for i in range(kinds)]
    true = {name: data.draw(MS) for name in names}
    prior = {name: data.draw(MS) for name in names}
    counts = [Counter({name: data.draw(st.integers(0, 3)) for name in names} | {names[0]: 1}) for _ in range(stages)]
    totals = [sum(count * true[name] for name, count in counted.items()) for counted in counts]
    found = solve(prior, [+counted for counted in counts], totals)
    for counted, total in zip(counts, totals, strict=True):
        assert sum(count * found[name] for name, count in counted.items()) == pytest.approx(total, rel=0.02)


def test_what_stages_leave_open_keeps_its_proportions_and_what_cost_nothing_goes_on_to():
    both = [Counter(a=1, b=2)]
    assert solve({"a": 1.0, "b": 2.0}, both, [10.0]) == pytest.approx({"a": 2.0, "b": 4.0})
    assert solve({"a": 0.0, "b": 2.0}, both, [10.0]) == {"a": 0.0, "b": 5.0}
    assert solve({"a": 0.0, "b": 0.0}, both, [9.0]) == pytest.approx({"a": 3.0, "b": 3.0})
    assert solve({"a": 1.0, "b": 2.0}, both, [None]) == {"a": 1.0, "b": 2.0}
    assert solve({"a": 1.0, "b": 2.0}, [Counter(a=1), Counter(b=1)], [3.0, None]) == {"a": 3.0, "b": 6.0}


def recorded(compiled):
    """Times as a run would show them in which everything costs what `compiled` says."""
    times, costs = Times(), compiled.costs
    for ops in compiled.program.ranks:
        for op in ops:
            ns = [round(1e6 * costs.duration(op))] * 3
            if op.kind in (Kind.F, Kind.B, Kind.W, Kind.BW):
                times.cost[op.kind, op.stage] = ns
            elif op.kind is Kind.STEP:
                times.closing["step", op.stage] = ns
    for pipe, links in enumerate(costs.links):
        times.lags |= {(pipe, first): [round(1e6 * ms)] * 3 for (first, _), ms in links.items() if ms}
    times.norm, times.sums = [round(0.25e6 * costs.of("agree"))], [round(0.75e6 * costs.of("agree"))]
    return times


TRUE = {
    "embed": layer(0.7, 0.2, 0.9, bw=1.0, again=0.7, step=0.5),
    "block": layer(1.3, 2.1, 2.9, bw=4.5, again=1.2, step=0.25),
    "head": layer(3.0, 1.5, 2.5, bw=3.5, again=2.5, step=0.75),
}
HOST = Host(f_us=50.0, b_us=100.0, w_us=10.0, transfer_us=20.0, agree_us=300.0, close_us=500.0)


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("known", [True, False])
def test_a_plan_made_with_wrong_costs_gets_the_right_ones_from_its_run(kind, activations, known):
    described = job(kind=kind, layers=16, memory={"activations": activations}, partition={"mode": "uniform"})
    true = profile_of(described, layers=TRUE, host=HOST if known else HOST.model_copy(update={"transfer_us": 0.0}))
    wrong = true.model_copy(update={"layers": {name: layer(1.0, 1.0, 1.0) for name in TRUE}}) if known else None
    planned = compile_job(replace(described, profile=wrong))
    manifest = planned.assemble()[0]
    costs = recall.costs_for(replace(described, profile=true), manifest)
    derived = derive_from(manifest, recorded(replace(planned, costs=costs)), rounds=3, device="cpu")
    found = recall.costs_for(with_profile(manifest, derived.profile), manifest)
    for op in {op._replace(mb=0) for ops in planned.program.ranks for op in ops}:
        if op.kind in (Kind.F, Kind.B, Kind.W, Kind.BW, Kind.STEP):
            assert found.duration(op) == pytest.approx(costs.duration(op), rel=0.05), op
    assert found.of("agree") == pytest.approx(costs.of("agree"), rel=1e-3)
    for mine, theirs in zip(found.links, costs.links, strict=True):
        assert mine == pytest.approx(theirs, rel=0.01)
    assert derived.profile.on.source == "trace"
    if known:  # what ranks add is not part of the layers
        assert derived.profile.layers["block"].f.ms == pytest.approx(1.3, rel=0.02)


def test_what_a_run_does_not_tell_is_said():
    described = job(kind="1f1b")
    compiled = compile_job(described)
    notes = " ".join(derive_from(compiled.assemble()[0], recorded(compiled), rounds=3, device="cpu").notes)
    assert "B and W never ran apart" in notes and "memory is that of the cost model" in notes
    compiled = compile_job(replace(described, profile=profile_of(described)))
    notes = " ".join(derive_from(compiled.assemble()[0], recorded(compiled), rounds=3, device="cpu").notes)
    assert "memory" not in notes


@pytest.mark.parametrize("known", few([True, False], (True,)))
def test_a_slow_rank_makes_the_layers_of_its_stages_kinds_of_their_own(known):
    described = job(kind="zb-h1", layers=16)
    described = replace(described, profile=profile_of(described, layers=TRUE) if known else None)
    compiled = compile_job(described)
    manifest = compiled.assemble()[0]
    columns = {name: compiled.costs.column(name) for name in ("f", "b", "w")}
    slow = compiled.costs.with_ms(
        **{name: tuple(ms * (1 + (s == 2)) for s, ms in enumerate(column)) for name, column in columns.items()}
    )
    derived = derive_from(manifest, recorded(replace(compiled, costs=slow)), rounds=3, device="cpu")
    assert len(derived.profile.order) == 18 and any("share of its stage" in note for note in derived.notes)
    again = with_profile(manifest, derived.profile)
    assert recall.costs_for(again, manifest).column("f") == pytest.approx(slow.column("f"), rel=1e-4)
    assert len(compile_job(again).layers[2]) < len(compiled.layers[2])
    if known:
        assert all(layer.bytes is not None for layer in derived.profile.layers.values())
    once_more = derive_from(
        compile_job(again).assemble()[0], recorded(replace(compiled, costs=slow)), rounds=3, device="cpu"
    )
    assert max(map(len, once_more.profile.layers)) <= len("block@3''")


def test_a_factorys_layers_share_the_time_of_their_stage():
    compiled = compile_job(job(kind="zb-h1", **MINE))
    slow = compiled.costs.with_ms(f=(2.0, 2.0, 8.0, 2.0))
    derived = derive_from(compiled.assemble()[0], recorded(replace(compiled, costs=slow)), rounds=3, device="cpu")
    assert [derived.profile.layers[kind].f.ms for kind in derived.profile.order] == pytest.approx(
        [1, 1, 1, 1, 4, 4, 1, 1]
    )


def test_what_ran_in_one_piece_on_one_stage_only_says_nothing_of_the_size_of_others():
    """Of zb-v the first stage alone has a BW: that of others is in proportion to their B and W, and the other way."""
    planned = compile_job(job(kind="zb-v", layers=8, pp=2, m=4, partition={"mode": "uniform"}, **MINE))
    fused = {op.stage for ops in planned.program.ranks for op in ops if op.kind is Kind.BW}
    apart = {op.stage for ops in planned.program.ranks for op in ops if op.kind is Kind.B}
    assert fused < apart and len(apart) == 4
    ms = {stage: 10.0 + 10.0 * stage for stage in apart}
    shares = {"b": 0.6, "w": 0.4, "bw": 0.9}
    true = planned.costs.with_ms(**{name: tuple(ms[s] * x for s in range(4)) for name, x in shares.items()})
    times = recorded(replace(planned, costs=true))
    found = derive_from(planned.assemble()[0], times, rounds=3, device="cpu").profile.layers
    for stage in apart:
        assert 2 * found[f"stage-{stage}"].bw.ms == pytest.approx(0.9 * ms[stage], rel=1e-3)
    without = Times(cost={key: ns for key, ns in times.cost.items() if key[0] is Kind.F or key[1] in fused})
    without.cost |= {(Kind.BW, stage): [round(0.9e6 * ms[stage])] for stage in apart}
    found = derive_from(planned.assemble()[0], without, rounds=3, device="cpu").profile.layers
    for stage in apart:
        assert 2 * found[f"stage-{stage}"].b.ms == pytest.approx(0.6 * ms[stage], rel=1e-3)


def test_planning_anew_says_what_the_command_plans():
    compiled = compile_job(job(kind="zb-h1", **MINE))
    manifest = compiled.assemble()[0]
    slow = compiled.costs.with_ms(f=(2.0, 2.0, 8.0, 2.0), b=(2.0, 2.0, 8.0, 2.0), w=(2.0, 2.0, 8.0, 2.0))
    profile = derive_from(manifest, recorded(replace(compiled, costs=slow)), rounds=3, device="cpu").profile
    again = replan(manifest, compiled.program, profile)
    assert again.changed and again.gain > 0.1
    assert again.planned_ms == compile_job(with_profile(manifest, profile)).settled_ms


def test_a_base_of_something_else_is_refused():
    manifest = compile_job(job()).assemble()[0]
    refuse_misfit(manifest, profile_of(job()), "p.json")
    with refused("E142"):
        refuse_misfit(manifest, profile_of(job(model={"hidden": 64})), "p.json")


def test_a_link_keeps_its_bandwidth_and_takes_its_latency_from_the_run():
    described = job(kind="zb-h1")
    profile = profile_of(described, link=LinkProfile(latency_us=5.0, gbps=2.0))
    compiled = compile_job(replace(described, profile=profile))
    times = recorded(compiled)
    times.lags = {key: [ns + 100_000 for ns in found] for key, found in times.lags.items()}
    found = derive_from(compiled.assemble()[0], times, rounds=3, device="cpu").profile.link
    assert found.gbps == 2.0 and found.latency_us == pytest.approx(105.0, rel=0.01)
