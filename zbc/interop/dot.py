"""The dependencies of a plan as a Graphviz graph: one row of ops per rank, arrows for the inputs of each op.

Solid arrows lead from the maker of an input to its reader, labelled with the ms of a transfer; dotted ones join ops
that follow one another on a rank only because of the order. It shows the compute ops of `zbc.graph`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

import networkx as nx

from zbc.ir import Kind
from zbc.text import short

_FILL = {"F": "#9ecae1", "B": "#a1d99b", "W": "#fdd0a2", "BW": "#c7e9c0"}
_COMPUTES = frozenset(kind.value for kind in Kind if kind.computes)


def dumps(graph: nx.DiGraph) -> str:
    """The text of a .dot file; ops carry their start and end in ms as tooltips."""
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: nx.DiGraph) -> Iterator[str]:
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
