"""A recorded run compared with its prediction: no deviation if all is as predicted, else the report names the cause."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.jobs import job, per_layer
from tests.recorded_runs import MS, World, record
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import pricing
from zbc.compiler.recorded import blame, report
from zbc.compiler.recorded.derive import derive
from zbc.compiler.recorded.replan import replan
from zbc.compiler.recorded.times import median_ms, times_of
from zbc.compiler.recorded.view import step_of, typical
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Kind, Op

GIVEN = {"per": "stage", "f": 4.0, "b": 5.0, "w": 3.0, "comm": 0.5, "optimizer": 2.0, "reduce": 0.0}
SCHEDULES = ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "chimera", "dualpipe"]


def compiled(kind="1f1b", p=4, m=8, **changes):
    return compile_job(job(kind=kind, pp=p, m=m, **{"costs": GIVEN, **changes}), budget=0.0)


def as_predicted(plan, **changes):
    costs = plan.costs
    return World(
        **{
            "op": lambda op, rank, step: costs.duration(op),
            "link": lambda sender, receiver: 0.5,
            "optimizer": lambda rank: 2.0,
            **changes,
        }
    )


def slowed(plan, slow, times):
    """Op times as predicted, except on rank `slow`."""
    return lambda op, rank, step: plan.costs.duration(op) * (times if rank == slow else 1.0)


# ---- as predicted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCHEDULES)
def test_where_all_goes_as_predicted_nothing_deviates(tmp_path, kind):
    plan = compiled(kind)
    found = report.build(record(plan, tmp_path, as_predicted(plan, skew=lambda rank: 1000.0 * rank)), again=False)
    for quantity in (found.makespan, found.span, found.bubble_makespan, found.bubble_span):
        assert quantity.measured == pytest.approx(quantity.predicted, rel=1e-6)
    assert found.step.measured == pytest.approx(found.step.predicted, rel=1e-6)
    assert not found.slow_ranks and not found.slow_links and not found.outliers and not found.stalls
    assert all(one.measured == pytest.approx(one.predicted, rel=1e-5) for one in found.ops)
    assert all(one.measured == pytest.approx(0.5, rel=1e-3) for one in found.links)
    for rank in found.ranks:
        for cause in blame.CAUSES:
            assert getattr(rank.measured, cause) == pytest.approx(getattr(rank.predicted, cause), abs=1e-3), cause
        assert rank.measured.senders == pytest.approx(rank.predicted.senders, abs=1e-3)


def test_two_copies_of_the_pipeline_are_taken_apart_rank_by_rank(tmp_path):
    plan = compiled("1f1b", p=2, m=4, parallel={"dp": 2}, costs=GIVEN)
    found = report.build(record(plan, tmp_path, as_predicted(plan, op=slowed(plan, 3, 2.0))), again=False)
    assert [rank.rank for rank in found.ranks] == [0, 1, 2, 3]
    assert [one.rank for one in found.slow_ranks] == [3] and found.slow_ranks[0].ratio == pytest.approx(2.0)
    assert set(found.ranks[2].measured.senders) == {3} and set(found.ranks[0].measured.senders) == {1}
    assert found.ranks[0].measured.drain > 10  # for the slower copy


def test_stages_that_are_slow_in_every_copy_make_no_rank_slow(tmp_path):
    plan = compiled("1f1b", p=2, m=4, parallel={"dp": 2}, costs=GIVEN)
    world = as_predicted(plan, op=lambda op, rank, step: plan.costs.duration(op) * (3.0 if op.stage == 1 else 1.0))
    found = report.build(record(plan, tmp_path, world), again=False)
    assert not found.slow_ranks and {one.stage for one in found.ops[:2]} == {1}


def test_copies_that_share_a_node_are_told_apart_too(tmp_path):
    """Ranks 0 and 1 are both copies of the first rank of the pipeline, so 0 receives from 2 and 1 from 3."""
    nodes = {"parallel": {"dp": 2, "order": [0, 2, 1, 3]}}
    plan = compiled("1f1b", p=2, m=4, costs=GIVEN, **nodes)
    found = report.build(record(plan, tmp_path, as_predicted(plan, op=slowed(plan, 1, 1.2))), again=False)
    assert [set(rank.measured.senders) for rank in found.ranks] == [{2}, {3}, {0}, {1}]
    assert {(link.sender, link.receiver) for link in found.links} == {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert [one.rank for one in found.slow_ranks] == [1]


# ---- where the time went -------------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_causes_add_up_to_the_step_to_the_nanosecond(tmp_path_factory, data):
    plan = compiled(data.draw(st.sampled_from(["1f1b", "zb-h1", "zb-v"])), p=2, m=4)
    draw = data.draw(st.randoms(use_true_random=False))
    world = World(
        op=lambda op, rank, step: draw.uniform(0.1, 9),
        link=lambda sender, receiver: draw.uniform(0, 3),
        transfer=draw.uniform(0, 0.3),
        data=draw.uniform(0, 1),
        optimizer=lambda rank: draw.uniform(0, 3),
        agree=draw.uniform(0, 2),
        close=draw.uniform(0, 1),
        late=lambda rank: draw.uniform(0, 2),
        skew=lambda rank: rank * 37.123456,
    )
    trace = record(plan, tmp_path_factory.mktemp("run"), world)
    for number in trace.steps:
        step = step_of(trace, number)
        for shares in blame.shares(step):
            assert shares.total == step.wall_ns
            assert all(getattr(shares, cause) >= 0 for cause in blame.CAUSES)
            assert sum(shares.senders.values()) == shares.message


def test_each_cause_gets_what_is_its(tmp_path):
    plan = compiled("gpipe", p=2, m=2)
    world = as_predicted(plan, transfer=0.1, data=0.2, agree=3.0, close=0.4, late=lambda rank: 0.7 * (rank == 0))
    step = step_of(record(plan, tmp_path, world), 4)
    first, second = [shares.scaled(1 / MS) for shares in blame.shares(step)]
    f, b, w = 4.0, 5.0, 3.0
    assert first.compute == second.compute == 2 * (f + b + w)
    assert first.optimizer == second.optimizer == 2.0
    assert first.sums == second.sums == pytest.approx(3.0)
    # Rank 0 begins 0.7 late, reads data and sends twice, posts two receives; each rank closes for 0.4.
    assert first.host == pytest.approx(0.7 + 2 * 0.2 + 4 * 0.1 + 0.4)
    assert second.host == pytest.approx(2 * 0.2 + 4 * 0.1 + 0.4)
    assert second.warm_up == pytest.approx(0.7 + 0.2 + f + 0.5 - 2 * 0.1)  # two receives were posted before
    assert first.warm_up == 0.0 and set(first.senders) == {1} and set(second.senders) <= {0}
    assert first.drain == 0.0 and second.drain > 0.0


@pytest.mark.parametrize("kind", ["1f1b", "zb-h2", "zb-v"])
def test_what_is_predicted_of_a_step_without_a_barrier_adds_up_to_it(kind):
    plan = compiled(kind, optimizer={"sync": "post-validate"})
    for rank, shares in enumerate(blame.predicted(plan.program, plan.timeline, plan.costs)):
        assert shares.total == pytest.approx(plan.report.ahead_ms, rel=1e-6)
        assert shares.compute == pytest.approx(plan.timeline.busy(rank)) and shares.optimizer >= 2 * 2.0
        assert shares.drain == 0.0 and sum(shares.senders.values()) <= shares.message + 1e-6


# ---- what is named -------------------------------------------------------------------------------------------


SLOW = [(kind, 4, slow) for kind in ("1f1b", "zb-v", "chimera") for slow in (0, 2, 3)]


@pytest.mark.parametrize(("kind", "p", "slow"), [*SLOW, ("1f1b", 2, 1)])
def test_the_slow_rank_is_named_and_no_other(tmp_path, kind, p, slow):
    """Of two ranks it is held against the other."""
    plan = compiled(kind, p=p)
    found = report.build(record(plan, tmp_path, as_predicted(plan, op=slowed(plan, slow, 1.5))), again=False)
    (named,) = found.slow_ranks
    assert named.rank == slow and named.ratio == pytest.approx(1.5) and named.others == pytest.approx(1.0)
    assert found.slow == tuple(1.5 if rank == slow else 1.0 for rank in range(p))
    assert not found.slow_links and not found.outliers
    mine = [one for one in found.ops if one.rank == slow]
    assert list(found.ops[: len(mine)]) == mine and all(one.ratio == pytest.approx(1.5) for one in mine)
    assert f"rank {slow} takes 1.50 times what was predicted" in str(found).splitlines()
    assert str(found).startswith(f"{kind} on {p} ")


def test_a_prediction_that_is_off_for_all_ranks_makes_none_of_them_slow(tmp_path):
    plan = compiled("1f1b")
    world = as_predicted(plan, op=lambda op, rank, step: 1.4 * plan.costs.duration(op))
    found = report.build(record(plan, tmp_path, world), again=False)
    assert not found.slow_ranks and all(one.ratio == pytest.approx(1.4) for one in found.ops)


@pytest.mark.parametrize("pair", [(1, 2), (2, 1), (2, 3)])
def test_the_slow_link_is_named_and_no_other(tmp_path, pair):
    plan = compiled("1f1b")
    world = as_predicted(plan, link=lambda a, b: 6.0 if (a, b) == pair else 0.5)
    found = report.build(record(plan, tmp_path, world), again=False)
    (named,) = found.slow_links
    assert (named.sender, named.receiver) == pair and not found.slow_ranks
    assert named.ms == pytest.approx(6.0, rel=1e-3) and named.others == pytest.approx(0.5, rel=1e-3)


def test_a_receiver_that_comes_late_says_nothing_of_the_link(tmp_path):
    """A transport takes a moment even for a tensor that arrived long ago; that is not a transfer as long as an op."""
    plan = compiled("zb-h1")
    messages = list(step_of(record(plan, tmp_path, as_predicted(plan, hiccup=0.3)), 5).messages())
    assert len(messages) == 2 * 3 * 8 and any(message.took > 3 * MS for message in messages)
    awaited = [message.took for message in messages if message.awaited]
    assert len(awaited) > 10 and max(awaited) < 0.9 * MS


def test_one_op_out_of_line_is_named_with_its_step_and_rank(tmp_path):
    plan, odd = compiled("zb-h1"), (Op(Kind.B, 1, 5), 1, 5)
    world = as_predicted(plan, op=lambda op, rank, step: plan.costs.duration(op) + 60.0 * ((op, rank, step) == odd))
    found = report.build(record(plan, tmp_path, world), again=False)
    (named,) = found.outliers
    assert (named.op, named.rank, named.step, named.sender) == (*odd, None)
    assert (named.measured, named.usual) == (pytest.approx(65.0), pytest.approx(5.0))
    assert not found.slow_ranks and not found.slow_links and not found.stalls


def test_one_message_out_of_line_is_named_with_both_ranks(tmp_path):
    plan = compiled("1f1b", m=4)
    calls = []

    def link(sender, receiver):
        calls.append((sender, receiver))
        return 40.0 if (sender, receiver) == (1, 2) and calls.count((1, 2)) == 6 else 0.5

    found = report.build(record(plan, tmp_path, as_predicted(plan, link=link)), again=False)
    (named,) = found.outliers
    assert (named.sender, named.rank, named.step) == (1, 2, 5) and named.measured == pytest.approx(40.0, rel=1e-3)


def test_a_machine_that_stands_still_is_not_taken_for_slow_ops(tmp_path):
    """All ranks lose the same time in one step."""
    plan = compiled("gpipe")
    world = as_predicted(
        plan,
        op=lambda op, rank, step: plan.costs.duration(op) + 50.0 * (step == 5 and op == Op(Kind.F, rank, 7 - rank)),
    )
    found = report.build(record(plan, tmp_path, world), again=False)
    (stall,) = found.stalls
    assert stall.step == 5 and stall.ranks == (0, 1, 2, 3) and stall.ms == pytest.approx(50.0)
    assert not found.outliers


def test_two_of_four_ranks_that_are_out_of_line_at_once_are_named(tmp_path):
    plan = compiled("gpipe")
    odd = {Op(Kind.F, 1, 6), Op(Kind.F, 2, 5)}
    world = as_predicted(plan, op=lambda op, rank, step: plan.costs.duration(op) + 50.0 * (step == 5 and op in odd))
    found = report.build(record(plan, tmp_path, world), again=False)
    assert not found.stalls and {one.op for one in found.outliers} == odd


# ---- measured costs and a new plan ---------------------------------------------------------------------------


def as_measured(plan, steps):
    """The timeline of a plan at the times of its ops in these steps."""
    cost, ms = times_of(steps).cost, {}
    for kind in {kind for kind, _ in cost}:
        samples = [cost[kind, s] for s in range(plan.costs.stages)]
        whole = [median_ms(some) if some else 0.0 for some in samples]
        column = plan.costs.each(float, kind.row.cost)  # slices keep their proportions of a microbatch
        ms[kind.row.cost] = tuple(
            tuple(one / sum(e) * part for part in e) if isinstance(e, tuple) else one
            for one, e in zip(whole, column, strict=True)
        )
    return simulate(plan.program, plan.costs.with_ms(**ms))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_simulator_with_measured_times_finds_the_step_that_was_measured(tmp_path, kind):
    plan = compiled(kind)
    computing, stages = [kind for kind in Kind if kind.computes], range(plan.costs.stages)
    times = {(kind, s): 2.0 + ((7 * s + len(kind.value)) % 5) for s in stages for kind in computing}
    world = as_predicted(plan, op=lambda op, rank, step: times[op.kind, op.stage], transfer=0.05, data=0.1, agree=1.0)
    steps = typical(record(plan, tmp_path, world))
    assert as_measured(plan, steps).makespan == pytest.approx(steps[0].makespan_ns / MS, rel=0.02)


SLICED = {"schedule": {"slices": 4}, "model": {"seq_len": 64}}


@pytest.mark.long("1f1b", "zb-v")
@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "zb-v"])
def test_slices_are_put_together_to_whole_microbatches(tmp_path, kind):
    """Their times add up to those of a step, and a plan from the run takes as long; no time per microbatch is counted
    per slice."""
    plan = compiled(kind, **SLICED)
    world = as_predicted(plan, op=lambda op, rank, step: 1.5 * plan.costs.duration(op))
    trace = record(plan, tmp_path, world)
    steps = typical(trace)
    assert as_measured(plan, steps).makespan == pytest.approx(steps[0].makespan_ns / MS, rel=1e-3)
    found = report.build(trace)
    assert found.replan.present_ms == pytest.approx(found.step.measured, rel=0.02)
    for one in found.slices:
        assert one.measured_f_ms == pytest.approx(1.5 * one.predicted_f_ms, rel=1e-4)
        assert one.measured_b_ms == pytest.approx(1.5 * one.predicted_b_ms, rel=1e-4)
    assert sum(one.predicted_f_ms for one in found.slices) == pytest.approx(4.0 * plan.costs.stages)
    assert len(found.slices) == 4


def test_a_new_plan_moves_layers_off_a_slow_stage_and_is_the_plan_where_nothing_deviates(tmp_path):
    plan = compiled("zb-h1", costs={**GIVEN, "per": "layer"}, layers=12)
    found = report.build(record(plan, tmp_path, as_predicted(plan, op=slowed(plan, 1, 2.0)))).replan
    before, after = ([sum(n.startswith("layers.") for n in names) for names in cut] for cut in (plan.layers, found.cut))
    assert found.changed and after[1] < before[1] and sum(after) == 12
    assert found.gain > 0.1 and found.planned_ms == pytest.approx((1 - found.gain) * found.present_ms)
    plan = compiled("1f1b", costs={**GIVEN, "per": "layer"})
    world = as_predicted(plan, optimizer=lambda rank: plan.costs.of("step", rank))
    found = report.build(record(plan, tmp_path / "even", world)).replan
    assert not found.changed and found.gain == pytest.approx(0.0, abs=1e-9) and found.cut == plan.layers
    assert found.present_ms == pytest.approx(plan.settled_ms, rel=1e-3)


def test_a_new_plan_that_cannot_be_made_says_why(tmp_path):
    plan = compiled("1f1b")
    trace = record(plan, tmp_path, as_predicted(plan))
    manifest = trace.plan.manifest.model_copy(
        update={"planning": {**trace.plan.manifest.planning, "hardware": {"memory_gib": 1e-6}}}
    )
    found = replan(manifest, plan.program, derive(trace).profile)
    assert found.planned_ms is None and found.gain is None and "does not fit" in found.why_not


# ---- microbatches of unequal length --------------------------------------------------------------------------


PER_LAYER = {"per": "layer", "f": 2.0, "b": 3.0, "w": 2.5, "comm": 0.5, "optimizer": 2.0, "reduce": 0.0}
ENDS = {"embed": {"f": 1.0, "b": 0.5, "w": 1.5}, "head": {"f": 3.0, "b": 2.0, "w": 1.0}}


@pytest.mark.parametrize("ran", [None, [16, 8, 8, 2, 16, 4, 1, 1]])
def test_times_of_unequal_microbatches_tell_those_of_whole_rows(tmp_path, ran):
    """Of a run as planned, or of one whose microbatches had other lengths, which its trace has."""
    schedule = {"tokens": [16, 4, 8, 16, 2, 16, 4, 8], "renumber": False}
    ends = [[end[name] for name in "fbw"] for end in (PER_LAYER, *ENDS.values())]
    given = PER_LAYER | per_layer(8, *ends)
    plan = compiled("zb-h1", schedule=schedule, model={"seq_len": 16, "hidden": 8}, costs=given)
    lengths = plan.job.tokens if ran is None else tuple(ran)
    actual = plan.job.with_tokens(lengths)
    costs = pricing.build(actual, plan.program.placement, plan.found.stages)
    ops = {"op": lambda op, rank, step: costs.duration(op), "link": lambda sender, receiver: 0.5}
    trace = record(plan, tmp_path, as_predicted(plan, **ops, tokens=() if ran is None else lengths))
    found, derived = report.build(trace, again=False), derive(trace).profile
    assert not found.outliers and not found.slow_ranks
    assert derived.tokens == list(lengths)
    for kind, layer in derived.layers.items():
        wanted = ENDS.get(kind.partition("@")[0], PER_LAYER)
        assert [getattr(layer, name).ms for name in "fbw"] == pytest.approx([wanted[name] for name in "fbw"], rel=0.02)
    assert all(one.measured == pytest.approx(one.predicted, rel=1e-5) for one in found.ops)
