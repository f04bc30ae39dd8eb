"""A plan as a networkx graph: the dependencies of ops, messages and collectives, with their times.

Nodes, named by the text of their op in plan files (if several ops have the same text, followed by rank and step):

    an op of a rank        F, B, W, BW, STEP ..; OVERLAP is the point at which its group begins
    a message              kind "message", named by its SEND; a RECV has no node of its own
    a collective           one node for all its ranks

    op, kind, start, end   the text; the kind; ms
    rank, step             its position in the plan; for a message of its SEND, for a collective of the first rank's op
    to                     for a message: the rank that receives it
    ranks                  for a collective: its ranks in one replica, "0 3"

An edge leads from a node that has to end to one that may start then:

    kind "order"           the previous op on its rank, or in the queue of collectives of a rank
         "value"           reads a result of an op on the same rank
         "message", "collective"     reads a result that arrives by one
         "group"           both ops of a group wait for the inputs of either, and their outputs exist when both end
    value                  the values handed on: "act", "grad", "kept" .. (see zbc/ops.py)

A node starts when the last of its predecessors has ended; following these back from the last node gives the critical
path of the step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby, pairwise
from typing import Any, NamedTuple
from xml.sax.saxutils import escape, quoteattr

import networkx as nx

from zbc.compiler.graph import Graph, reads
from zbc.compiler.sim.simulate import Timeline
from zbc.ir import Kind, Op
from zbc.ops import At, Lane
from zbc.text import short

_FILL = {"F": "#9ecae1", "B": "#a1d99b", "W": "#fdd0a2", "BW": "#c7e9c0"}
_COMPUTES = frozenset(kind.value for kind in Kind if kind.computes)
_TYPES = {str: "string", int: "long", float: "double"}
_SPACE = "http://graphml.graphdrawing.org/xmlns"
_SENDS = {ref.what: (kind, ref.at) for kind in Kind if kind.is_send for ref in kind.row.reads}


class _Node(NamedTuple):
    """A node for networkx, from the compiler's graph of integers."""

    id: int
    op: str
    kind: str
    at: int  # the op that gives its rank and step
    more: dict[str, int | str]


def digraph(timeline: Timeline) -> nx.DiGraph:
    """The graph of one step; times in ms."""
    graph, made = timeline.graph, nx.DiGraph()
    nodes = list(_nodes(timeline))
    often = Counter(node.op for node in nodes)
    names = {}
    for node in nodes:
        rank, step = graph.place(node.at)
        name = names[node.id] = node.op if often[node.op] == 1 else f"{node.op} rank {rank} step {step}"
        start, end = timeline.start[node.id], timeline.end[node.id]
        if node.id in graph.marks:
            end = start  # the ops of the group have its time
        made.add_node(name, op=node.op, kind=node.kind, rank=rank, step=step, start=start, end=end, **node.more)
    for a, b, kind, value in _edges(graph):
        if a in names and b in names:
            _join(made, names[a], names[b], kind, value)
    return made


def _join(made: nx.DiGraph, a: str, b: str, kind: str, value: str) -> None:
    """Adds an edge; two edges between the same nodes become one, of the kind that hands on values, with both values."""
    edge = made.get_edge_data(a, b)
    if edge is None or (value and not edge["value"]):
        made.add_edge(a, b, kind=kind, value=value)
    elif value and value not in edge["value"].split():
        edge["value"] += f" {value}"


def _nodes(timeline: Timeline) -> Iterator[_Node]:
    """All nodes: ops, then messages, then collectives."""
    graph = timeline.graph
    n, layout = len(graph.ops), graph.layout
    for i, op in enumerate(graph.ops):
        if op.kind.row.lane in (Lane.COMPUTE, Lane.MARK):
            yield _Node(i, str(op), op.kind.value, i, {})
    for x, sender in enumerate(graph.sender):
        if sender >= 0 and math.isfinite(timeline.end[n + x]):  # others have no reader in this timeline
            yield _Node(n + x, _message(graph, x), "message", sender, {"to": layout.channel_of(x)[1]})
    for event, ops in graph.met.items():
        op = graph.ops[ops[0]]
        yield _Node(event, str(op), op.kind.value, ops[0], {"ranks": " ".join(str(graph.rank(i)) for i in ops)})


def _message(graph: Graph, message: int) -> str:
    """The text of its SEND, even if the program has none: `SEND_F s0 m1 >r1`; for a value of a rank `norm >r1`."""
    layout, program = graph.layout, graph.program
    (what, pipe, edge), unit = layout.meaning(message)
    if edge < 0:
        return f"{what} >r{layout.channel_of(message)[1]}"
    kind, at = _SENDS[what]
    maker = layout.edges[edge][0 if at is At.SINKS else 1]
    return program.placement.text(Op(kind, maker, unit // program.slices, pipe, unit % program.slices))


def _edges(graph: Graph) -> Iterator[tuple[int, int, str, str]]:
    """(node that ends, node that may start then, kind, value)."""
    yield from _order(graph)
    n = len(graph.ops)
    stop = n + len(graph.sender)
    for a, b, value in _handed(graph):
        yield a, b, "value" if a < n else "message" if a < stop else "collective", value
        mark = graph.group_of.get(b)
        if mark is not None and a >= n:
            yield a, mark, "group", ""
        mark = graph.group_of.get(a)
        if mark is not None and b >= n:
            yield mark + 2, b, "group", ""


def _handed(graph: Graph) -> Iterator[tuple[int, int, str]]:
    """(maker, reader, value); a message without a SEND is sent by the op that makes it."""
    for op, what, node in reads(graph):
        yield node, op if graph.ops[op].kind.row.lane is Lane.COMPUTE else graph.party[op], what
    for x, sender in enumerate(graph.sender):
        if sender >= 0 and not graph.ops[sender].kind.is_send:
            yield sender, len(graph.ops) + x, graph.layout.meaning(x)[0].what


def _order(graph: Graph) -> Iterator[tuple[int, int, str, str]]:
    """The nodes before a node on its rank, for a collective on all its ranks."""
    for i, before in enumerate(graph.before):
        if before >= 0:
            yield before, i, "order", ""
    for event in graph.met:
        for before in graph.pred[graph.ptr[event] : graph.ptr[event + 1]]:
            yield before, event, "order", ""


def dot(graph: nx.DiGraph) -> str:
    """The text of a Graphviz file: one row of compute ops per rank, with their start and end in ms as tooltips.

    Solid arrows lead from the maker of an input to its reader, labelled with the ms of a transfer; dotted ones join ops
    that follow one another on a rank only because of the order.
    """
    return "\n".join(_dot_lines(graph)) + "\n"


def _dot_lines(graph: nx.DiGraph) -> Iterator[str]:
    nodes = graph.nodes
    computing = [name for name in graph if nodes[name]["kind"] in _COMPUTES]
    number = {name: k for k, name in enumerate(computing)}
    feeds = {name: dict(_feeds(graph, name)) for name in computing}
    yield "digraph plan {"
    yield "  rankdir=LR; node [shape=box, style=filled, fontname=Helvetica, fontsize=10, margin=0.05];"
    for rank, group in groupby(computing, key=lambda name: nodes[name]["rank"]):
        ops = list(group)
        yield f'  subgraph cluster_{rank} {{ label="rank {rank}"; color=gray;'
        for name in ops:
            op = nodes[name]
            times = f"{short(op['start'])} to {short(op['end'])} ms"
            fill = _FILL.get(op["kind"], "#dddddd")
            yield f'    o{number[name]} [label="{op["op"]}", fillcolor="{fill}", tooltip="{times}"];'
        yield "  }"
        for before, name in pairwise(ops):
            if before not in feeds[name]:
                yield f"  o{number[before]} -> o{number[name]} [style=dotted, arrowhead=none];"
    for name in computing:
        for maker, ms in feeds[name].items():
            look = f' [label="{short(ms, 3)}", color="#d62728"];' if ms else ";"
            yield f"  o{number[maker]} -> o{number[name]}{look}"
    yield "}"


def _feeds(graph: nx.DiGraph, name: str) -> Iterator[tuple[str, float]]:
    """The makers of an op's inputs, and the ms of the transfer; without its own F unless that is the only one."""
    feeds = []
    for near, _, edge in graph.in_edges(name, data=True):
        ms, values = 0.0, set(edge["value"].split())
        if edge["kind"] == "message":
            ms = graph.nodes[near]["end"] - graph.nodes[near]["start"]
            near = next(maker for maker, _, kind in graph.in_edges(near, data="kind") if kind == "value")
        if values and graph.nodes[near]["kind"] in _COMPUTES:
            feeds.append((near, ms, values))
    for near, ms, values in feeds:
        if len(feeds) == 1 or values != {"kept"}:
            yield near, ms


def graphml(graph: nx.DiGraph) -> str:
    """The text of a .graphml file, for networkx, Gephi, yEd and others: all nodes and edges with their attributes."""
    return "\n".join(_graphml_lines(graph)) + "\n"  # networkx would keep a tree of all elements


def _graphml_lines(graph: nx.DiGraph) -> Iterator[str]:
    yield f'<graphml xmlns="{_SPACE}">'
    keys = dict[tuple[str, str], str]()
    for kind, every in (("node", graph.nodes.values()), ("edge", graph.edges.values())):
        for name, form in dict.fromkeys((name, type(value)) for found in every for name, value in found.items()):
            keys[kind, name] = f"d{len(keys)}"
            yield f'<key id="d{len(keys) - 1}" for="{kind}" attr.name="{name}" attr.type="{_TYPES[form]}"/>'
    yield '<graph edgedefault="directed">'
    for node, found in graph.nodes.items():
        yield f"<node id={quoteattr(node)}>{_data('node', found, keys)}</node>"
    for (a, b), found in graph.edges.items():
        yield f"<edge source={quoteattr(a)} target={quoteattr(b)}>{_data('edge', found, keys)}</edge>"
    yield "</graph>\n</graphml>"


def _data(kind: str, found: Mapping[str, Any], keys: Mapping[tuple[str, str], str]) -> str:
    return "".join(f'<data key="{keys[kind, name]}">{escape(str(value))}</data>' for name, value in found.items())
