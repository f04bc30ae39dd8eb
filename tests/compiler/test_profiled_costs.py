"""Costs with a profile: measured times and bytes, the link, and what the host adds to every op."""

import json
from dataclasses import replace

import pytest

from tests.jobs import job
from tests.profiles import layer, nbytes, profile_of
from zbc.compiler import recall
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import estimate, pricing
from zbc.compiler.cost.footprint import Footprint, more
from zbc.compiler.partition.initial import initial
from zbc.compiler.planner.case import Case
from zbc.compiler.schedules import Request, find
from zbc.compiler.sim.bounds import bounds
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Kind, Op, Placement
from zbc.job.profile import Host, LinkProfile, Origin
from zbc.plan.directory import StoredPlan

LINEAR = Placement.linear(4)
EVEN = {"partition": {"layers_per_stage": [2, 2, 2, 2]}}
MINE = {"model": {"family": "mine:layers", "loss": "mse"}, "data": {"kind": "mine:Data"}}
BOUNDARY = 2 * 16 * 32 * 4


def costs(profile=None, placement=LINEAR, **changes):
    described = job(**changes)
    described = replace(described, profile=profile or profile_of(described))
    table = estimate.layers(described)
    return pricing.build(described, placement, initial(described, placement, table), table)


def comm(found):
    """ms from each stage of the first pipe to the next."""
    return tuple(found.links[0].values())


def test_times_are_those_of_the_layers_of_each_stage():
    found = costs(**EVEN)
    assert found.column("f") == (2.5, 2.0, 2.0, 2.5)
    assert found.column("b") == (4.5, 4.0, 4.0, 4.5)
    assert found.column("w") == (6.5, 6.0, 6.0, 6.5)
    assert found.source == "profiled"
    assert found.duration(Op(Kind.BW, 1, 0)) == 10.0


def test_ranks_that_share_layers_add_their_sums_to_what_was_measured_of_parts():
    """Two per block in F and in B, one behind the look-up, one before the head; a BW has room for its own: 1 + 1 ms."""
    shared = {"parallel": {"tp": 2}, **EVEN}
    sums = LinkProfile(latency_us=1000.0, gbps=2 * 16 * 32 * 4 / 1e6)
    found = costs(profile_of(job(), tp=2, sums=sums), **shared)
    assert found.column("f") == pytest.approx((2.5 + 2 * 5, 2.0 + 2 * 4, 2.0 + 2 * 4, 2.5 + 2 * 4))
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


def test_the_gradient_between_two_layers_counts_where_they_keep_nothing():
    bare = Footprint(result=1000, entry=1000, more_b=500, more_bw=700)
    found = more([bare, bare], recompute=False, first=True)
    assert (found.b, found.bw) == (1500, 1700)
    assert more([bare], recompute=False, first=True).bw == 700


def test_recompute_adds_what_was_measured():
    kinds = {"embed": layer(0.5, 0.5, 0.5), "block": layer(1.0, 2.0, 3.0, again=1.5), "head": layer(0.5, 0.5, 0.5)}
    found = costs(profile_of(job(), layers=kinds), memory={"activations": {"1": "recompute"}}, **EVEN)
    assert found.column("b") == (4.5, 7.0, 4.0, 4.5)
    assert found.column("bw") == (11.0, 13.0, 10.0, 11.0)


def test_the_link_is_the_measured_one_unless_the_job_says_otherwise():
    ms = 1.0 + BOUNDARY / 1e6
    assert comm(costs()) == pytest.approx((ms,) * 3)
    assert comm(costs(hardware={"link_us": 5.0})) == pytest.approx((5e-3 + BOUNDARY / 1e6,) * 3)
    assert comm(costs(costs={"comm": 0.25})) == (0.25,) * 3


def test_a_rank_pays_for_every_op_and_for_the_transfers_around_it():
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


def test_another_optimizer_than_was_measured_is_estimated():
    kinds = {name: layer(1.0, 1.0, 1.0, step=3.0) for name in ("embed", "block", "head")}
    mine = profile_of(job(), layers=kinds)
    assert costs(mine, **EVEN).column("step") == (9.0, 6.0, 6.0, 9.0)
    other = costs(mine, optimizer={"kind": "sgd"}, **EVEN)
    assert 0 < max(other.column("step")) < 0.1
    assert [z.optimizer for z in other.bytes] == [0.0] * 4


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
    table = estimate.layers(described)
    assert pricing.build(described, LINEAR, initial(described, LINEAR, table), table).bytes is None
    found = costs(**MINE)
    assert found.bytes_of("kept") == (12000.0,) * 4
    assert [z.boundary for z in found.bytes] == [1000.0] * 4
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
    named = described.costs.model_copy(update={"profile": "elsewhere/profile.json"})
    assert compile_job(replace(described, costs=named)).assemble()[0].id == plan.manifest.id


def test_ranks_that_share_out_the_optimizer_share_its_measured_state_too():
    found = costs(parallel={"dp": 2}, optimizer={"zero1": True}, **EVEN)
    assert [z.optimizer for z in found.bytes] == [1200.0, 800.0, 800.0, 1200.0]


def test_masters_are_there_where_the_job_needs_them_whatever_was_measured():
    found = costs(optimizer={"sync": "post-validate"}, **EVEN)
    assert [z.masters for z in found.bytes] == [z.gradients for z in found.bytes]


@pytest.mark.parametrize("kind", ["dualpipe", "dualpipe-v", "zb-h1", "1f1b"])
@pytest.mark.parametrize("share", [0.3, 1.5])
def test_no_cut_is_ruled_out_by_the_slower_way_to_go_back(kind, share):
    """Some orders have backwards in one op and in two: what a step takes at least is that of the quicker way."""
    kinds = {name: layer(1.0, 2.0, 3.0, bw=5.0 * share) for name in ("embed", "block", "head")}
    described = job(schedule={"kind": kind, "microbatches": 32})
    described = replace(described, profile=profile_of(described, layers=kinds))
    least = Case(described, estimate.layers(described), find(kind), None).least_step
    assert 0 < least <= compile_job(described, budget=0.0).report.makespan_ms
