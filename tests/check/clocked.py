"""Checks offload copies from their start and end times alone, independent of the code that made them."""

from itertools import pairwise

from zbc.ir import Kind

LATE = 1e-6
BACKWARD = (Kind.B, Kind.BW)


def problems(timeline, costs):
    """Copies that overlap on one stream or link, and ops that run before their inputs exist."""
    graph = timeline.graph
    copies = [
        (graph.rank(ops[0]), graph.ops[ops[0]], timeline.start[event], timeline.end[event])
        for event, ops in graph.met.items()
        if graph.ops[ops[0]].kind in (Kind.OFFLOAD, Kind.RELOAD)
    ]
    found = []
    lanes = {}
    for rank, op, start, end in copies:
        lanes.setdefault(("stream", rank, graph.program.duplex and op.kind), []).append((start, end, op))
        lanes.setdefault(("link", rank // costs.shared, op.kind), []).append((start, end, op))
    for lane, taken in lanes.items():
        for (_, end, one), (start, _, other) in pairwise(sorted(taken)):
            if start < end - LATE:
                found.append(f"{lane}: {other} begins at {start:g}, {one} ends at {end:g}")
    return found + _too_early(timeline, copies)


def _too_early(timeline, copies):
    graph, at = timeline.graph, {}
    for i, op in enumerate(graph.ops):
        if op.kind.computes or op.kind is Kind.RELEASE:
            at[op.kind, op.key] = timeline.start[i], timeline.end[i]
    for _, op, start, end in copies:
        at[op.kind, op.key] = start, end
    found = []
    for (kind, key), (start, _) in at.items():
        needed = [(Kind.F, key)] if kind is Kind.OFFLOAD else [(Kind.OFFLOAD, key)] if kind is Kind.RELOAD else []
        needed += [(Kind.RELOAD, key)] if kind in BACKWARD and (Kind.RELOAD, key) in at else []
        for other in needed:
            if start < at[other][1] - LATE:
                found.append(f"{kind.value} {key} begins at {start:g}, {other[0].value} ends at {at[other][1]:g}")
        if kind is Kind.RELEASE and at[kind, key][1] < at[Kind.OFFLOAD, key][1] - LATE:
            found.append(f"RELEASE {key} does not wait for its copy")
    return found
