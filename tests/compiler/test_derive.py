"""Profiles: costs from a profile, and profiles from recorded times that reproduce these times."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiler.test_costs import comm
from tests.jobs import job
from tests.profiles import layer, nbytes, profile_of
from tests.refusals import refused
from tests.tiers import few
from zbc.compiler import recall
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import pricing
from zbc.compiler.partition.initial import initial
from zbc.compiler.planner.case import Case
from zbc.compiler.recorded.derive import derive_from, solve
from zbc.compiler.recorded.replan import refuse_misfit, with_profile
from zbc.compiler.recorded.times import Times
from zbc.compiler.schedules import Request, find
from zbc.compiler.sim.bounds import bounds
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Kind, Op, Placement
from zbc.job.profile import Host, LinkProfile, Origin
from zbc.plan.directory import StoredPlan

MS = st.floats(0.1, 10.0)
MINE = {"model": {"family": "mine:layers", "loss": "mse"}, "data": {"kind": "mine:Data"}}


@pytest.mark.long
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
    """Times of a run in which everything has the costs of `compiled`."""
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
HOST = Host(f_us=50.0, b_us=100.0, w_us=10.0, transfer_us=20.0, transfer_share=0.1, agree_us=300.0, close_us=500.0)


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("known", [True, False])
def test_a_plan_made_with_wrong_costs_gets_the_right_ones_from_its_run(kind, activations, known):
    described = job(kind=kind, layers=16, memory={"activations": activations}, partition={"layers_per_stage": "equal"})
    host = HOST if known else HOST.model_copy(update={"transfer_us": 0.0, "transfer_share": 0.0})
    true = profile_of(described, layers=TRUE, host=host)
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
    if known:  # overhead of ranks is not part of the layers
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
    """In zb-v only the first stage has a BW: for others it is proportional to their B and W, and vice versa."""
    planned = compile_job(job(kind="zb-v", layers=8, pp=2, m=4, partition={"layers_per_stage": "equal"}, **MINE))
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


LINEAR = Placement.linear(4)
EVEN = {"partition": {"layers_per_stage": [2, 2, 2, 2]}}
BOUNDARY = 1000  # bytes, as the profile says


def costs(profile=None, placement=LINEAR, **changes):
    described = job(**changes)
    described = replace(described, profile=profile or profile_of(described))
    return pricing.build(described, placement, initial(described, placement))


def test_ranks_that_share_layers_add_their_sums_to_what_was_measured_of_parts():
    """Two per block in F and in B, one after the look-up and one before the head, and a few numbers of the loss; a BW
    hides its own: 1 + 1 ms."""
    shared = {"parallel": {"tp": 2}, **EVEN}
    sums = LinkProfile(latency_us=1000.0, gbps=2 * 16 * 32 * 4 / 1e6)
    found = costs(profile_of(job(), tp=2, sums=sums), **shared)
    assert found.column("f") == pytest.approx((2.5 + 2 * 5, 2.0 + 2 * 4, 2.0 + 2 * 4, 2.5 + 2 * 4 + (1 + 0.1875) / 2))
    assert found.column("b") == pytest.approx((4.5 + 2 * 4, 4.0 + 2 * 4, 4.0 + 2 * 4, 4.5 + 2 * 5))
    assert found.column("w") == (6.5, 6.0, 6.0, 6.5)
    assert found.duration(Op(Kind.BW, 1, 0)) == 4.0 + 2 * 4, "longer than B + W = 10"
    traced = profile_of(job(), tp=2, on=Origin(source="trace", device="cpu"))
    assert costs(traced, **shared).column("f") == (2.5, 2.0, 2.0, 2.5), "ops of a run had their sums"


def test_a_fused_backward_takes_what_was_measured_and_bounds_know_it():
    kinds = {"embed": layer(0.5, 0.5, 0.5), "block": layer(1.0, 2.0, 3.0, bw=4.0), "head": layer(0.5, 0.5, 0.5)}
    found = costs(profile_of(job(), layers=kinds), **EVEN)
    assert found.duration(Op(Kind.BW, 1, 0)) == 8.0
    assert found.duration(Op(Kind.B, 1, 0)) + found.duration(Op(Kind.W, 1, 0)) == 10.0
    assert found.joined().column("b") == found.column("bw") == (9.0, 8.0, 8.0, 9.0)
    for name in ("1f1b", "gpipe", "zb-h1"):
        program = find(name).make(Request(p=4, m=64, v=1))
        assert bounds(LINEAR, found, 64).makespan <= simulate(program, found).makespan + 1e-9


def test_what_was_measured_of_recompute_links_and_hosts_counts():
    kinds = {"embed": layer(0.5, 0.5, 0.5), "block": layer(1.0, 2.0, 3.0, again=1.5), "head": layer(0.5, 0.5, 0.5)}
    found = costs(profile_of(job(), layers=kinds), memory={"activations": {"1": "recompute"}}, **EVEN)
    assert found.column("b") == (4.5, 7.0, 4.0, 4.5)
    assert found.column("bw") == (11.0, 13.0, 10.0, 11.0)
    ms = 1.0 + BOUNDARY / 1e6
    assert comm(costs()) == pytest.approx((ms,) * 3)
    assert comm(costs(hardware={"link_us": 5.0})) == pytest.approx((5e-3 + BOUNDARY / 1e6,) * 3)
    assert comm(costs(costs={"comm": 0.25})) == (0.25,) * 3
    host = Host(f_us=100.0, b_us=200.0, w_us=50.0, transfer_us=10.0, agree_us=400.0, close_us=100.0)
    found = costs(profile_of(job(), host=host), **EVEN)
    assert found.column("f") == pytest.approx((2.61, 2.12, 2.12, 2.61))
    assert found.column("b") == pytest.approx((4.71, 4.22, 4.22, 4.71))
    assert found.column("w") == pytest.approx((6.55, 6.05, 6.05, 6.55))
    assert found.of("agree") == pytest.approx(0.9)  # 4 ranks add up in two rounds


def test_agreeing_and_optimizer_steps_make_a_settled_step_longer_than_the_makespan():
    kinds = {name: layer(1.0, 1.0, 1.0, step=3.0, norm=2.0) for name in ("embed", "block", "head")}
    described = job(**EVEN)
    measured = profile_of(described, layers=kinds, host=Host(agree_us=1000.0))
    report = compile_job(replace(described, profile=measured)).report
    assert report.barrier_ms == pytest.approx(report.makespan_ms + 2.0 + 3 * 5.0)


def test_state_of_the_optimizer_is_that_of_the_job():
    kinds = {name: layer(1.0, 1.0, 1.0, step=3.0) for name in ("embed", "block", "head")}
    mine = profile_of(job(), layers=kinds)
    assert costs(mine, **EVEN).column("step") == (9.0, 6.0, 6.0, 9.0)
    other = costs(mine, optimizer={"kind": "sgd"}, **EVEN)
    assert 0 < max(other.column("step")) < 0.1
    assert [z.optimizer for z in other.bytes] == [0.0] * 4
    found = costs(parallel={"dp": 2}, optimizer={"zero1": True}, **EVEN)
    assert [z.optimizer for z in found.bytes] == [1200.0, 800.0, 800.0, 1200.0]
    found = costs(optimizer={"sync": "post-validate"}, **EVEN)
    assert [z.masters for z in found.bytes] == [z.gradients for z in found.bytes]


def test_bytes_come_from_the_profile_and_shared_tensors_count_once():
    kinds = {"embed": layer(1, 1, 1), "block": layer(1, 1, 1), "head": layer(1, 1, 1)}
    loose = nbytes(keeps_input=False)
    found = costs(profile_of(job(), layers={**kinds, "block": layer(1, 1, 1, bytes=loose)}), **EVEN)
    assert found.bytes_of("kept") == (16000.0, 11000.0, 11000.0, 17000.0)
    assert found.bytes_of("left") == (9000.0, 6000.0, 6000.0, 9000.0)
    assert [z.weights for z in found.bytes] == [1200.0, 800.0, 800.0, 1200.0]
    assert [z.optimizer for z in found.bytes] == [2400.0, 1600.0, 1600.0, 2400.0]
    tail = nbytes(keeps_output=True, keeps_input=False)
    found = costs(profile_of(job(), layers={**kinds, "block": layer(1, 1, 1, bytes=tail)}), **EVEN)
    assert found.bytes_of("kept") == (18000.0, 13000.0, 13000.0, 18000.0)


def test_layers_of_a_factory_have_bytes_once_they_were_measured():
    described = job(**MINE)
    assert pricing.build(described, LINEAR, initial(described, LINEAR)).bytes is None
    found = costs(**MINE)
    assert found.bytes_of("kept") == (12000.0,) * 4
    assert [z.behind for z in found.bytes] == [1000.0] * 3 + [0.0]
    assert comm(found) == pytest.approx((1.001,) * 3)
    unsized = profile_of(described, layers={"Layer": layer(1.0, 2.0, 3.0, sized=False)})
    assert costs(unsized, **MINE).bytes is None


def test_a_plan_holds_its_profile_and_its_id_covers_it_but_not_its_place(tmp_path):
    described = replace(job(), profile=profile_of(job()))
    compiled = compile_job(described)
    compiled.write(tmp_path / "plan")
    plan = StoredPlan.read(tmp_path / "plan")
    assert recall.costs_of(plan.manifest) == compiled.costs
    assert "profile.json" not in json.dumps(plan.manifest.planning)
    faster = profile_of(job(), layers={**described.profile.layers, "head": layer(0.5, 0.5, 0.4)})
    assert compile_job(replace(described, profile=faster)).assemble()[0].id != plan.manifest.id


@pytest.mark.parametrize("kind", ["dualpipe", "dualpipe-v", "zb-h1", "1f1b"])
@pytest.mark.parametrize("share", [0.3, 1.5])
def test_no_cut_is_ruled_out_by_the_slower_way_to_go_back(kind, share):
    """Some orders have fused and split backwards: the bound of a step takes the faster form."""
    kinds = {name: layer(1.0, 2.0, 3.0, bw=5.0 * share) for name in ("embed", "block", "head")}
    described = job(schedule={"kind": kind, "microbatches": 32})
    described = replace(described, profile=profile_of(described, layers=kinds))
    least = Case(described, find(kind), None).least_step
    assert 0 < least <= compile_job(described, budget=0.0).report.makespan_ms
