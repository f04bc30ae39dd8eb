"""The dependencies of a plan as a Graphviz graph: one row of ops per rank, arrows for what each op waits for.

Solid arrows lead to an op from what feeds it, labelled with the transfer's ms where there is one; dotted ones join ops
that follow one another on a rank only because of the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from zbc.compiler.cost import Costs
from zbc.compiler.simulate import Timeline
from zbc.ir import Kind, Program
from zbc.text import short

_FILL = {Kind.F: "#9ecae1", Kind.B: "#a1d99b", Kind.W: "#fdd0a2", Kind.BW: "#c7e9c0"}


def dumps(program: Program, timeline: Timeline, costs: Costs) -> str:
    """The text of a .dot file; ops carry their start and end in ms as tooltips."""
    return "\n".join(_lines(program, timeline, costs)) + "\n"


def _lines(program: Program, timeline: Timeline, costs: Costs) -> Iterator[str]:
    graph = timeline.graph
    number = {i: k for k, i in enumerate(i for rank in range(timeline.ranks) for i in timeline.ops(rank))}
    yield "digraph plan {"
    yield "  rankdir=LR; node [shape=box, style=filled, fontname=Helvetica, fontsize=10, margin=0.05];"
    for rank in range(timeline.ranks):
        mine = timeline.ops(rank)
        yield f'  subgraph cluster_{rank} {{ label="rank {rank}"; color=gray;'
        for i in mine:
            times = f"{short(timeline.start[i])} to {short(timeline.end[i])} ms"
            fill = _FILL.get(graph.ops[i].kind, "#dddddd")
            yield f'    o{number[i]} [label="{graph.ops[i]}", fillcolor="{fill}", tooltip="{times}"];'
        yield "  }"
        for before, i in pairwise(mine):
            if graph.sources[i] != before:
                yield f"  o{number[before]} -> o{number[i]} [style=dotted, arrowhead=none];"
    for i in number:
        j = graph.sources[i]
        if j >= 0:
            op, source = graph.ops[i], graph.ops[j]
            ms = costs.link(op.pipe, source.stage, op.stage) if graph.rank(i) != graph.rank(j) else 0.0
            yield f"  o{number[j]} -> o{number[i]}" + (f' [label="{short(ms, 3)}", color="#d62728"];' if ms else ";")
    yield "}"
