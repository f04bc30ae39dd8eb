"""A plan and its predicted timeline as one JSON document, complete enough to draw or analyse elsewhere.

{"format": "zbc-timeline", "version": 1, "schedule": .., "microbatches": .., "slices": ..,
 "placement": [[rank of each stage], one list per pipe], "makespan_ms": .., "span_ms": ..,
 "idle_rate": .., "balance": .., both bubble rates,
 "ranks": [{"rank": 0, "ops": ["F s0 m0", ..],            all ops of the plan, transfers included
            "compute": [{"op": "F s0 m0", "start_ms": .., "end_ms": .., "needs": "F s0 m0" or null}, ..]}]}
"""

from __future__ import annotations

import json
from typing import Any

from zbc.compiler.sim.simulate import Timeline
from zbc.ir import Program

FORMAT = "zbc-timeline"
VERSION = 1


def document(program: Program, timeline: Timeline) -> dict[str, Any]:
    """The document as plain data; times count from the first start."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "schedule": program.history[0] if program.history else "",
        "microbatches": program.microbatches,
        "slices": program.slices,
        "placement": [list(pipe) for pipe in program.placement.pipes],
        "makespan_ms": round(timeline.makespan, 9),
        "span_ms": round(timeline.span, 9),
        "idle_rate": round(timeline.idle_rate, 9),
        "balance": round(timeline.balance, 9),
        "bubble_rate_makespan": round(timeline.bubble_rate_makespan, 9),
        "bubble_rate_span": round(timeline.bubble_rate_span, 9),
        "ranks": [_rank(program, timeline, rank) for rank in range(timeline.ranks)],
    }


def dumps(program: Program, timeline: Timeline) -> str:
    """The document as text."""
    return json.dumps(document(program, timeline), indent=1) + "\n"


def _rank(program: Program, timeline: Timeline, rank: int) -> dict[str, Any]:
    graph = timeline.graph
    begin = min(timeline.first_start(r) for r in range(timeline.ranks))
    compute = [
        {
            "op": str(graph.ops[i]),
            "start_ms": round(timeline.start[i] - begin, 9),
            "end_ms": round(timeline.end[i] - begin, 9),
            "needs": str(graph.ops[graph.sources[i]]) if graph.sources[i] >= 0 else None,
        }
        for i in timeline.ops(rank)
    ]
    return {"rank": rank, "ops": [program.placement.text(op) for op in program.ranks[rank]], "compute": compute}
