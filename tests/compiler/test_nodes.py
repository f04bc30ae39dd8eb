"""Which ranks share a node: every rank has one seat, and the heavier traffic stays inside."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs import job
from tests.refusals import refused
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.nodes import between, choose
from zbc.ir import Placement
from zbc.topology import Topology

LINEAR, LOOPED, V = Placement.linear(4), Placement.looped(4, 2), Placement.vshape(4)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_every_rank_has_one_place(parts, along, copies, across):
    topology = Topology(parts * along, copies * across, node=(parts, copies))
    found = [topology.of(rank) for rank in range(topology.world)]
    assert len(set(found)) == len(found)
    assert [topology.rank(*place) for place in found] == list(range(len(found)))
    for first in range(0, len(found), parts * copies):
        node = found[first : first + parts * copies]
        assert len({place.pp for place in node}) == parts and len({place.dp for place in node}) == copies
    for pp in range(topology.pp):
        assert topology.ranks([pp]) == tuple(rank for rank, place in enumerate(found) if place.pp == pp)


def test_without_nodes_one_copy_follows_the_other():
    assert [Topology(3, 2).of(rank)[:2] for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("placement", [LINEAR, LOOPED, V, Placement.bidirectional((0, 1, 2, 3))])
def test_heavy_tensors_keep_pipelines_together_and_heavy_gradients_copies(placement):
    stages = placement.stages
    assert choose(placement, 2, 4, 8, [1e6] * (stages - 1), [1.0] * stages) == (4, 1)
    assert choose(placement, 4, 4, 8, [1.0] * (stages - 1), [1e6] * stages) == (1, 4)
    assert choose(placement, 8, 64, 8, [1.0] * (stages - 1), [1e6] * stages) == (4, 1), "one node holds them all"
    assert choose(placement, 3, 5, 8, [1.0] * (stages - 1), [1e6] * stages) == (4, 1), "nothing tiles"


@pytest.mark.parametrize("placement", [LINEAR, LOOPED, V])
def test_what_is_chosen_sends_least(placement):
    for sent, grad in itertools.product((1.0, 10.0, 100.0), repeat=2):
        boundaries, grads = [sent] * (placement.stages - 1), [grad] * placement.stages
        found = choose(placement, 4, 4, 3, boundaries, grads)
        totals = {
            (a, b): between(Topology(4, 4, node=(a, b)), placement, 4, 3, boundaries, grads)
            for a, b in ((4, 1), (2, 2), (1, 4))
        }
        assert totals[found] == min(totals.values())


def test_bytes_between_nodes_are_those_counted_by_hand():
    """Two nodes of two ranks: ranks 0 1 | 2 3 of a pipeline, or both copies of rank 0 | of rank 1."""
    one = between(Topology(4, 1), LINEAR, 2, 5, [3.0, 7.0, 11.0], [0.0] * 4)
    assert one == 2 * 5 * 7.0
    two = Placement.linear(2)
    assert between(Topology(2, 2), two, 2, 5, [3.0], [10.0, 20.0]) == 2 * (10.0 + 20.0)
    assert between(Topology(2, 2, node=(1, 2)), two, 2, 5, [3.0], [10.0, 20.0]) == 2 * 2 * 5 * 3.0
    assert between(Topology(4, 1), LOOPED, 2, 1, [1.0] * 7, [0.0] * 8) == 2 * 3, "1-2, 3-0 and 1-2 again"
    assert between(Topology(4, 1), V, 2, 1, [1.0] * 7, [0.0] * 8) == 2 * 2, "1-2 and back"


def compiled(**changes):
    return compile_job(job(**{"pp": 2, "parallel": {"dp": 2}, "hardware": {"ranks_per_node": 2}, **changes}))


def test_a_plan_says_where_its_ranks_are():
    """Small tensors and large weights: copies share a node. Many microbatches: pipelines do."""
    few, many = compiled(m=1), compiled(m=64)
    assert (few.program.node, many.program.node) == ((1, 2), None)
    manifest = few.assemble()[0]
    assert [manifest.topology.name(rank) for rank in range(4)] == [
        "rank 0 [dp 0, pp 0]",
        "rank 1 [dp 1, pp 0]",
        "rank 2 [dp 0, pp 1]",
        "rank 3 [dp 1, pp 1]",
    ]
    assert many.assemble()[0].topology.name(1) == "rank 1 [dp 0, pp 1]"


def test_slow_links_between_nodes_are_paid_by_what_crosses_them():
    slow = {"ranks_per_node": 2, "inter_node_us": 5000.0}
    near = compiled(m=4, hardware=slow, parallel={"dp": 2, "node": [2, 1]})
    far = compiled(m=4, hardware=slow, parallel={"dp": 2, "node": [1, 2]})
    assert near.costs.link(0, 0, 1) < 5.0 <= far.costs.link(0, 0, 1)
    assert far.costs.of("reduce") < 5.0 <= near.costs.of("reduce")


def test_a_ramp_keeps_its_ranks_where_they_are():
    found = compiled(m=64, schedule={"ramp": [{"microbatches": 1, "steps": 1}]})
    assert [start.compiled.program.node for start in found.ramp] == [found.program.node] == [None]


@pytest.mark.parametrize(
    ("node", "text"), [([3, 1], "does not divide pp = 2"), ([1, 1], "hardware.ranks_per_node = 1")]
)
def test_nodes_that_do_not_fit_are_refused(node, text):
    with refused("E110") as caught:
        compiled(parallel={"dp": 2, "node": node})
    assert text in caught.value.render()
