"""The time model, checked op by op against its definition; messages on links."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiler.grid import FIXED, chunk_counts, make, timed
from tests.jobs import FREE, job
from tests.lowered import lower
from tests.refusals import refused
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.lowering import Lowering
from zbc.compiler.memory.ledger import ledger, over_time
from zbc.compiler.memory.per_rank import peaks, resident
from zbc.compiler.report.report import ABSENT
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import either_transfer, simulate
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement, Program, parse_line

every = pytest.mark.parametrize("name", FIXED)


def needs(op, stages):
    """All inputs of an op, from the definition of a pipeline."""
    kind, s, i = op.kind, op.stage, op.mb
    if kind is Kind.F:
        return [(Kind.F, s - 1, i)] if s else []
    if kind is Kind.W:
        return [(Kind.B, s, i)]
    after = [(Kind.B, s + 1, i), (Kind.BW, s + 1, i)] if s + 1 < stages else []
    return [(Kind.F, s, i), *after]


def hold(timeline, ms, link):
    """Asserts that every op starts as soon as its rank is free and its inputs have arrived, and takes its ms."""
    spans = {tuple(span.op)[:3]: span for span in timeline}
    program = timeline.graph.program
    for ops in program.ranks:
        free = 0.0
        for op in ops:
            span = spans[tuple(op)[:3]]
            inputs = [spans[key] for key in needs(op, program.placement.stages) if key in spans]
            arrivals = [source.end + (link(op.mb) if source.rank != span.rank else 0.0) for source in inputs]
            assert span.start == pytest.approx(max([free, *arrivals]))
            assert span.end - span.start == pytest.approx(ms(op))
            free = span.end


@every
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_op_starts_as_soon_as_it_can_and_no_sooner(name, data):
    p, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    program = make(name, p, m, data.draw(st.sampled_from(chunk_counts(name))))
    f, b, w, comm = (data.draw(st.sampled_from([0.25, 0.5, 1.0, 3.0])) for _ in range(4))
    length = {Kind.F: f, Kind.B: b, Kind.W: w, Kind.BW: b + w}
    share = p / program.placement.stages
    hold(timed(program, f, b, w, comm), lambda op: length[op.kind] * share, lambda mb: comm)


def test_fused_backwards_and_uneven_stages_take_their_time():
    placement = Placement.linear(2)
    program = make("gpipe", 2, 3)
    costs = Costs.per_stage((1.0, 3.0), (1.0, 3.0), (0.0, 0.0), (1.0, 1.0), (1.0, 1.0), ((0.5,),))
    timeline = simulate(program, costs)
    assert timeline.makespan == 1 + 0.5 + 3 * 3 + 3 * 3 + 0.5 + 1
    assert placement.ranks == timeline.ranks
    program = Program(Placement.linear(1), 1, ((Op(Kind.F, 0, 0), Op(Kind.BW, 0, 0)),))
    assert timed(program, 1.0, 2.0, 4.0).makespan == 7.0


def test_slices_take_the_times_given_for_them():
    """Two ranks, one microbatch in two slices: the second rank waits for each slice; backwards in reverse."""
    slices = ((Kind.F, 0), (Kind.F, 1), (Kind.BW, 1), (Kind.BW, 0))
    program = Program(
        Placement.linear(2), 1, tuple(tuple(Op(kind, r, 0, slice=k) for kind, k in slices) for r in range(2)), slices=2
    )
    costs = Costs.uniform(program.placement, comm=0.5)
    costs = costs.with_ms(f=((1.0, 2.0), (2.0, 3.0)), b=((1.0, 2.0), (1.0, 3.0)), w=((1.0, 1.0),) * 2)
    at = {str(op): (start, end) for _, op, start, end in simulate(program, costs)}
    assert at == {
        **{"F s0 m0": (0.0, 1.0), "F s0 m0.1": (1.0, 3.0), "BW s0 m0.1": (11.0, 14.0), "BW s0 m0": (14.0, 16.0)},
        **{"F s1 m0": (1.5, 3.5), "F s1 m0.1": (3.5, 6.5), "BW s1 m0.1": (6.5, 10.5), "BW s1 m0": (10.5, 12.5)},
    }


def test_orders_that_cannot_run_are_refused():
    crossed = Program(
        Placement.vshape(1), 1, ((Op(Kind.F, 1, 0), Op(Kind.F, 0, 0), Op(Kind.BW, 1, 0), Op(Kind.BW, 0, 0)),)
    )
    with refused("E201") as caught:
        timed(crossed)
    assert "F s1 m0 waits for F s0 m0" in caught.value.render()
    with pytest.raises(ZbcError, match="F s1 m0 on rank 1 needs an op that no rank runs"):
        timed(Program(Placement.linear(2), 1, ((), (Op(Kind.F, 1, 0),))))


@every
def test_the_memory_curve_reaches_the_peak_and_ends_empty(name):
    program = make(name, 4, 8)
    costs = Costs.uniform(program.placement, left=0.5)
    timeline = simulate(program, costs)
    for rank, found in enumerate(peaks(program, costs)):
        held = [point.units for point in over_time(timeline, rank, costs)]
        assert max(held) == pytest.approx(found.units)
        assert held[-1] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("kind", ["1f1b", "zb-h2", "zb-v"])
def test_memory_over_time_by_category_peaks_where_the_report_says(kind):
    found = compile_job(job(kind=kind), budget=0.0)
    assert found.report.copied is None and not {*ABSENT} & {*found.report}
    assert found.report.peak_bytes == max(rank.peak_bytes for rank in found.report.per_rank)
    with pytest.raises(AttributeError, match="no such fact: peak_byte"):
        _ = found.report.peak_byte
    for rank, told in enumerate(found.report.per_rank):
        held = list(over_time(found.timeline, rank, found.costs))
        assert [entry.ms for entry in held] == sorted(entry.ms for entry in held)
        assert max(entry.activations for entry in held) == pytest.approx(told.activation_bytes, abs=1)
        assert held[-1].activations == pytest.approx(0.0, abs=1)
        most = resident(found.program, rank, found.costs) + max(entry.activations for entry in held)
        assert most - told.gradient_bytes - 4 <= told.peak_bytes <= most + told.buffer_bytes + 4


def test_putting_off_weight_gradients_costs_what_they_hold():
    """ZB-H2 at act_w = 0: B frees everything, so no rank holds more than its forwards in flight."""
    program = make("zb-h2", 4, 12)
    light = peaks(program, Costs.uniform(program.placement, left=0.0))
    full = peaks(program, Costs.uniform(program.placement, left=1.0))
    assert [rank.units for rank in full] == [7.0] * 4
    assert [rank.units for rank in light] == [7.0, 5.0, 3.0, 1.0]


def summed(name, p, m, reduce, *, tie=0.0, gather=0.0, **how):
    """A lowered schedule of unit ops with sums of given times."""
    program = lower(replace(make(name, p, m), **how))
    costs = Costs.uniform(program.placement)
    stages = program.placement.stages
    return simulate(program, costs.with_ms(reduce=(reduce,) * stages, gather=(gather,) * stages, tie=(tie,)))


def test_sums_hide_behind_the_ops_of_ranks_that_are_not_done():
    """1F1B on two ranks: rank 1 ends 2 (a BW of rank 0) before the step, and sums meanwhile."""
    plain = timed(make("1f1b", 2, 4))
    timeline = summed("1f1b", 2, 4, 1.5, dp=2)
    assert timeline.makespan == plain.makespan + 1.5, "what rank 0 sums, nothing hides"
    [last] = [one for one in timeline.sums if one.op == Op(Kind.REDUCE, 1)]
    assert (last.ranks, last.start, last.end) == ((1,), plain.makespan - 2, plain.makespan - 0.5)
    assert timeline.idle(1).sums == 1.5 and timeline.idle(0).sums == 1.5
    for rank in range(2):
        assert sum(timeline.idle(rank)) + timeline.busy(rank) == pytest.approx(timeline.makespan)


def test_sums_wait_for_each_other_and_for_all_their_ranks():
    timeline = summed("zb-v", 2, 4, 10.0, dp=2)
    for rank in range(2):
        times = sorted((one.start, one.end) for one in timeline.sums if rank in one.ranks)
        assert len(times) == 2 and times[0][1] <= times[1][0]
    assert timeline.makespan == max(one.end for one in timeline.sums)
    timeline = summed("1f1b", 4, 4, 0.0, tie=3.0, tied=True)
    [tie] = timeline.sums
    assert tie.ranks == (0, 3) and tie.start == timeline.last_end(0) > timeline.last_end(3)
    assert timeline.closes(3) == tie.end == timeline.makespan and timeline.closes(1) == timeline.last_end(1)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b"])
def test_a_step_waits_for_the_weights_of_one_stage_and_others_come_meanwhile(name):
    plain = summed(name, 2, 4, 1.0, dp=2)
    timeline = summed(name, 2, 4, 1.0, gather=0.5, dp=2, sharded=True)
    gathers = [one for one in timeline.sums if one.op.kind is Kind.GATHER]
    assert min(one.start for one in gathers) == 0.0 and len(gathers) == timeline.graph.program.placement.stages
    assert timeline.makespan == pytest.approx(plain.makespan + 0.5)


def lowered(order, costs):
    return Lowering().lower(Context(order, costs)).program


def costs_of(order, comm, *, busy=False, transfer="eager"):
    costs = Costs.uniform(order.placement, comm=comm).over(transfer)
    return replace(costs, occupies=costs.links) if busy else costs


# How many times as long a step is where links are busy: published for p=4 m=16 in no paper, computed apart by a
# simulator that goes by time.
BUSY = {
    ("1f1b", 4): 1.0, ("zb-h1", 4): 1.0, ("eager-1f1b", 4): 1.01, ("interleaved-1f1b", 4): 1.01, ("zb-v", 2): 1.07,
    ("zb-v", 4): 1.13, ("gpipe", 1): 1.0, ("gpipe", 2): 1.22, ("gpipe", 4): 1.93, ("breadth-first", 0.5): 1.0,
    ("breadth-first", 1): 1.26, ("breadth-first", 2): 2.14, ("breadth-first", 4): 3.07,
}  # fmt: skip


@pytest.mark.parametrize(("name", "comm"), BUSY)
def test_bursts_of_messages_queue_on_a_busy_link(name, comm):
    order = make(name, 4, 16)
    free, busy = (costs_of(order, comm, busy=busy) for busy in (False, True))
    program = lowered(order, free)
    assert simulate(program, busy).makespan / simulate(program, free).makespan == pytest.approx(
        BUSY[name, comm], abs=0.0051
    )
    assert simulate(order, busy).makespan == simulate(program, busy).makespan  # with its transfers or without


def test_the_second_message_waits_until_the_first_has_left_its_link():
    """Each takes 3 ms, 2 of them on the link: F m1 is sent at 2 and leaves at 3."""
    order = Program(
        Placement.linear(2), 2,
        tuple(tuple(parse_line(f"{kind} s{s} m{mb}")[0] for kind in ("F", "BW") for mb in (0, 1)) for s in (0, 1)),
    )  # fmt: skip
    timeline = simulate(order, replace(costs_of(order, 3.0), occupies=({(0, 1): 2.0},)))
    assert [span.start for span in timeline if span.rank == 1 and span.op.kind is Kind.F] == [4.0, 6.0]


@pytest.mark.long("True-8-1.0-v-min")
@pytest.mark.parametrize("name", ["gpipe", "eager-1f1b", "zb-h2", "breadth-first", "zb-v", "v-min", "dualpipe"])
@pytest.mark.parametrize(("p", "comm"), [(4, 1.0), (4, 4.0), (8, 1.0)])
@pytest.mark.parametrize("busy", [False, True])
def test_no_message_waits_for_its_buffer_where_receives_are_posted_for_that(name, p, comm, busy):
    order = make(name, p, 12)
    costs = costs_of(order, comm, busy=busy, transfer="rendezvous")
    eager, late = either_transfer(Context(lowered(order, costs), costs).graph, costs)
    assert late == pytest.approx(eager, rel=1e-12)
    assert eager == pytest.approx(simulate(order, costs).makespan, rel=1e-9)


@pytest.mark.parametrize(("name", "comm", "ratio"), [("zb-v", 1.0, 1.176), ("breadth-first", 4.0, 1.923)])
def test_a_plan_whose_receives_are_posted_late_loses_where_messages_wait_for_them(name, comm, ratio):
    order = make(name, 4, 16)
    eager = costs_of(order, comm)
    found = either_transfer(Context(lowered(order, eager), eager).graph, eager)
    assert found.rendezvous_makespan_ms / found.eager_makespan_ms == pytest.approx(ratio, abs=1e-3)
    assert found.text.startswith(f"{found.rendezvous_makespan_ms / found.eager_makespan_ms - 1:.1%} longer")


def test_estimated_times_wait_for_buffers_and_links_and_given_ones_do_not():
    estimated = compile_job(job(hardware={"link_us": 100.0, "link_gbps": 8.0}, costs=FREE)).costs
    (links,), (busy,) = estimated.links, estimated.occupies
    assert estimated.rendezvous and [links[edge] - busy[edge] for edge in links] == pytest.approx([0.1] * len(links))
    given = compile_job(job(costs={"f": 1.0, "b": 1.0, "w": 1.0, "comm": 2.0})).costs
    assert not given.rendezvous and given.occupies == ()


def in_transit(timeline, costs):
    """Per rank and op the tensors in flight while it runs, with its own result and without its input."""
    found = []
    for entries in ledger(timeline, costs):
        units, counts = 0.0, {}
        for entry in entries:
            units += sum(each.units for each in (*entry.begin, *entry.end) if each.category == "transit")
            units -= entry.gone[0]
            counts[entry.op] = units + entry.still[0]
        found.append(counts)
    return found


def moving(microbatches, f):
    """Per rank and compute op of GPipe on two ranks the tensors in flight; B and W take 1."""
    program = lower(make("gpipe", 2, microbatches))
    costs = Costs.uniform(program.placement).with_ms(f=f)
    timeline = simulate(program, costs)
    ops = timeline.graph.ops
    found = in_transit(timeline, costs)
    return [{str(ops[i]): count for i, count in counts.items() if ops[i].kind.computes} for counts in found]


def test_results_and_posted_buffers_count_and_what_a_neighbour_waits_for_leaves_at_once():
    first, _ = moving(3, (1.0, 1.0))
    assert first == {"F s0 m0": 1, "F s0 m1": 1, "F s0 m2": 2, "BW s0 m0": 1, "BW s0 m1": 1, "BW s0 m2": 0}


def test_a_tensor_that_leaves_in_the_middle_of_an_op_counts_for_its_share_of_it():
    """Rank 1 posts for m2 as F m0 ends, at 3.5 or 3.25; rank 0 has sent it at 3 and runs F m3 until 4."""
    assert moving(4, (1.0, 2.5))[0]["F s0 m3"] == pytest.approx(2.5)
    assert moving(4, (1.0, 2.25))[0]["F s0 m3"] == pytest.approx(2.25)
    assert moving(4, (1.0, 3.0))[0]["F s0 m3"] == pytest.approx(3.0)


@pytest.mark.parametrize(("ms", "share"), [(4.0, 0.25), (2.0, 0.5), (1.0, 1.0), (0.0, 1.0)])
def test_what_is_sent_right_before_a_tentative_step_leaves_while_it_runs(ms, share):
    """The last rank's last gradient takes 1 ms to the first rank, which has posted its buffer."""
    program = lower(make("1f1b", 2, 3), "post-validate")
    costs = Costs.uniform(program.placement, comm=1.0).with_ms(tentative=(ms, ms))
    counts = list(in_transit(simulate(program, costs), costs)[1].values())
    assert str(program.ranks[1][-1]) == "TENTATIVE s1" and str(program.ranks[1][-2]) == "SEND_B s1 m2"
    assert counts[-1] == pytest.approx(share)
