"""The dependencies of a plan as a Graphviz graph: one row of ops per rank, arrows for what each op waits for.

Solid arrows lead to an op from what feeds it, labelled with the transfer's ms where there is one; dotted ones join ops
that follow one another on a rank only because of the order.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.cost import Costs
from zbc.compiler.simulate import Timeline
from zbc.ir import Kind, Program
from zbc.text import short

_FILL = {Kind.F: "#9ecae1", Kind.B: "#a1d99b", Kind.W: "#fdd0a2", Kind.BW: "#c7e9c0"}


def dumps(program: Program, timeline: Timeline, costs: Costs) -> str:
    """The text of a .dot file; ops carry their start and end in ms as tooltips."""
    return "\n".join(_lines(program, timeline, costs)) + "\n"


def _lines(program: Program, timeline: Timeline, costs: Costs) -> Iterator[str]:
    dag = timeline.dag
    yield "digraph plan {"
    yield "  rankdir=LR; node [shape=box, style=filled, fontname=Helvetica, fontsize=10, margin=0.05];"
    for rank in range(timeline.ranks):
        first, stop = dag.first[rank], dag.first[rank + 1]
        yield f'  subgraph cluster_{rank} {{ label="rank {rank}"; color=gray;'
        for i in range(first, stop):
            times = f"{short(timeline.start[i])} to {short(timeline.end[i])} ms"
            fill = _FILL.get(dag.ops[i].kind, "#dddddd")
            yield f'    o{i} [label="{dag.ops[i]}", fillcolor="{fill}", tooltip="{times}"];'
        yield "  }"
        for i in range(first + 1, stop):
            if dag.source[i] != i - 1:
                yield f"  o{i - 1} -> o{i} [style=dotted, arrowhead=none];"
    for i, j in enumerate(dag.source):
        if j >= 0:
            op, source = dag.ops[i], dag.ops[j]
            ms = costs.link(op.pipe, source.stage, op.stage) if dag.rank[i] != dag.rank[j] else 0.0
            yield f"  o{j} -> o{i}" + (f' [label="{short(ms, 3)}", color="#d62728"];' if ms else ";")
    yield "}"
