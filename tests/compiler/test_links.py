"""Messages: on links that carry one per direction at a time, with waits for buffers, and in flight."""

from dataclasses import replace

import pytest

from tests.compiler.grid import make
from tests.jobs import FREE, job
from tests.lowered import lower
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.lowering import Lowering
from zbc.compiler.memory.ledger import ledger
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import either_transfer, simulate
from zbc.ir import Kind, Placement, Program, parse_line


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
