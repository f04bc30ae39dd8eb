"""The plan as a networkx graph: its nodes are those of the timeline, and its edges all dependencies of a start."""

import tracemalloc
from collections import Counter

import networkx as nx
import pytest

import zbc
from tests.jobs import job
from zbc.compiler.sim.simulate import lengths, replay, simulate
from zbc.interop.digraph import digraph, graphml
from zbc.ir import Op

COSTS = {"f": 1.0, "b": 1.3, "w": 0.7, "comm": 0.1}
SHARES = {"pp": 4, "dp": 2, "shard": "optimizer"}
WAYS = {
    "1f1b": {"kind": "1f1b"},
    "zb-v": {"kind": "zb-v"},
    "chimera-zb": {"kind": "chimera-zb"},
    "groups": {"kind": "dualpipe-v", "costs": {**COSTS, "overlap": 0.5}},
    "groups of two pipes": {"kind": "dualpipe", "costs": {**COSTS, "overlap": 0.5}},
    "no barrier": {"kind": "zb-h1", "optimizer": {"sync": "post-validate"}},
    "shares": {"kind": "interleaved-1f1b", "parallel": SHARES},
    "shares, no barrier": {"kind": "zb-h1", "parallel": SHARES, "optimizer": {"sync": "post-validate"}},
}


@pytest.fixture(scope="module")
def plans():
    return {way: zbc.plan(job(**{"layers": 16, "costs": COSTS, **changes})) for way, changes in WAYS.items()}


def timelines(plan):
    """Timelines of the plan; with timed ops at the end of a step; of the order without messages and end of a step."""
    yield plan.timeline
    yield replay(plan.timeline.graph, plan.costs, lengths(plan.timeline.graph, plan.costs, closing=True), closing=True)
    yield simulate(plan.compiled.found.program, plan.costs)


def longest(graph):
    """The longest path over the time that nodes take, ms."""
    ends = {}
    for name in nx.topological_sort(graph):
        one = graph.nodes[name]
        ends[name] = max((ends[near] for near in graph.pred[name]), default=0.0) + one["end"] - one["start"]
    return max(ends.values())


@pytest.mark.long("1f1b", "shares")
@pytest.mark.parametrize("way", WAYS)
def test_a_node_starts_when_all_before_it_have_ended_and_the_longest_path_is_the_makespan(plans, way):
    for timeline in timelines(plans[way]):
        graph = digraph(timeline)
        for name, one in graph.nodes(data=True):
            last = max((graph.nodes[near]["end"] for near in graph.pred[name]), default=0.0)
            assert one["start"] == pytest.approx(last), name
        if not timeline.closing:
            assert longest(graph) == pytest.approx(timeline.makespan)


@pytest.mark.parametrize("way", WAYS)
def test_nodes_are_the_ops_messages_and_collectives_of_the_timeline(plans, way):
    plan = plans[way]
    program, timeline, graph = plan.program, plan.timeline, zbc.graph(plan)
    nodes = {(one["rank"], one["step"]): one for _, one in graph.nodes(data=True)}
    assert len(nodes) == len(graph)
    for span in timeline:
        one = nodes[span.rank, program.ranks[span.rank].index(span.op)]
        assert (one["op"], one["kind"]) == (str(span.op), span.op.kind.value)
        assert (one["start"], one["end"]) == (span.start, span.end)
    sent = [program.placement.text(op) for ops in program.ranks for op in ops if op.kind.is_send]
    messages = {name: one for name, one in graph.nodes(data=True) if one["kind"] == "message"}
    assert sorted(messages) == sorted(sent)
    assert all(name.endswith(f">r{one['to']}") for name, one in messages.items())
    met = Counter((one["op"], one["start"], one["end"]) for one in nodes.values() if "ranks" in one)
    sums = Counter((str(one.op), one.start, one.end) for one in timeline.sums)
    assert met - sums == Counter((op, *rest) for op, *rest in met if op == "VALIDATE")
    assert not sums - met


def test_edges_say_what_they_hand_on():
    graph = zbc.graph(zbc.plan(job(kind="zb-h1", pp=2, m=4)))
    edges = {(a, b): (edge["kind"], edge["value"]) for a, b, edge in graph.edges(data=True)}
    assert edges["F s0 m1", "SEND_F s0 m1 >r1"] == ("value", "act")
    assert edges["SEND_F s0 m1 >r1", "F s1 m1"] == ("message", "act")
    assert edges["F s1 m1", "B s1 m1"] == ("value", "kept")
    assert edges["B s1 m1", "W s1 m1"] == ("value", "left")
    assert edges["W s1 m1", "VALIDATE"] == ("value", "part")
    assert edges["B s1 m1", "SEND_B s1 m1 >r0"] == ("value", "grad")
    assert edges["SEND_B s1 m1 >r0", "BW s0 m1"] == ("message", "grad")
    assert edges["VALIDATE", "STEP s1"] == ("collective", "verdict")
    assert edges["F s0 m0", "F s0 m1"] == ("order", "")
    assert not any("RECV" in name for name in graph)
    assert "F s1 m1" in nx.descendants(graph, "F s0 m1")
    assert "F s1 m0" not in nx.descendants(graph, "F s0 m1")


def test_a_collective_is_one_node_and_ops_that_read_alike_have_rank_and_step_in_their_names(plans):
    plan = plans["chimera-zb"]
    graph = zbc.graph(plan)
    assert graph.nodes["REDUCE s0"]["ranks"] == "0 3"
    assert {graph.nodes[near]["rank"] for near in graph.pred["REDUCE s0"]} == {0, 3}
    steps = [name for name, op in graph.nodes(data="op") if op == "STEP s0"]
    places = [(rank, plan.program.ranks[rank].index(Op.parse("STEP s0"))) for rank in (0, 3)]
    assert steps == [f"STEP s0 rank {rank} step {step}" for rank, step in places]


def test_ops_of_a_group_wait_for_both_and_are_waited_for_together(plans):
    graph = zbc.graph(plans["groups"])
    groups = [name for name, kind in graph.nodes(data="kind") if kind == "OVERLAP"]
    assert groups
    for mark in groups:
        (first,) = graph.succ[mark]
        (second,) = [name for name in graph.succ[first] if graph.edges[first, name]["kind"] == "order"]
        needed = [
            near for op in (first, second) for near, _, kind in graph.in_edges(op, data="kind") if kind == "message"
        ]
        assert all(graph.edges[near, mark]["kind"] == "group" for near in needed)
        sent = [name for name in graph.succ[first] if graph.nodes[name]["kind"] == "message"]
        assert all(graph.has_edge(second, name) for name in sent)


@pytest.mark.parametrize("way", ["zb-v", "groups", "shares, no barrier"])
def test_a_graphml_file_reads_back_as_the_graph(plans, tmp_path, way):
    graph = zbc.graph(plans[way])
    tracemalloc.start()
    text = graphml(graph)
    assert tracemalloc.get_traced_memory()[1] < 5 * len(text) and plans[way].export("graphml") == {".graphml": text}
    tracemalloc.stop()
    (tmp_path / "plan.graphml").write_text(text)
    read = nx.read_graphml(tmp_path / "plan.graphml")
    assert dict(read.nodes(data=True)) == dict(graph.nodes(data=True))
    assert nx.to_dict_of_dicts(read) == nx.to_dict_of_dicts(graph)


def test_in_a_group_an_op_is_fed_by_the_op_that_made_its_input(plans):
    """Its SEND comes after both ops of the group."""
    graph = plans["groups"].timeline.graph
    for i in (i for mine in graph.computing for i in mine if graph.sources[i] >= 0):
        op, source = graph.ops[i], graph.ops[graph.sources[i]]
        assert op.mb == source.mb
        assert (op.kind.value == "F") <= (source.kind.value == "F")
