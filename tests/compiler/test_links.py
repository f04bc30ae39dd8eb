"""Messages that wait for their buffer, and links that carry one message of a direction at a time."""

from dataclasses import replace

import pytest

from tests.compiler.grid import make
from tests.jobs import job
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.lowering import Lowering
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
    """Each takes 3 ms, 2 of them on the link: F m1 is sent at 2 and goes at 3."""
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


def test_estimated_times_wait_for_buffers_and_links_and_given_ones_do_not_unless_they_say_so():
    def costs(**sections):
        return compile_job(job(**sections)).costs

    estimated = costs(hardware={"link_us": 100.0, "link_gbps": 8.0})
    (links,), (busy,) = estimated.links, estimated.occupies
    assert estimated.rendezvous and [links[edge] - busy[edge] for edge in links] == pytest.approx([0.1] * len(links))
    assert not costs(hardware={"transfer": "eager"}).rendezvous
    given = {"f": 1.0, "b": 1.0, "w": 1.0, "comm": 2.0}
    assert not costs(costs=given).rendezvous and costs(costs=given).occupies == ()
    asked = costs(costs={**given, "occupies": 1.5}, hardware={"transfer": "rendezvous"})
    assert asked.rendezvous and set(asked.occupies[0].values()) == {1.5}
