"""The forwards at the start of a step, which ranks can run before they know whether the previous step is valid.

A *reach* is, per rank, a number of its first compute ops. It is closed if all dependencies of these ops are among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbc.compiler.graph import Graph


def forwards(graph: Graph) -> list[int]:
    """The largest closed reach of forwards alone: no backward precedes them, on any rank, directly or not."""
    reach = [leading(graph, rank) for rank in range(len(graph.computing))]
    place = _places(graph)
    shrinking = True
    while shrinking:
        shrinking = False
        for r, nodes in enumerate(graph.computing):
            for k in range(reach[r]):
                if any(at >= reach[peer] for peer, at in _needs(graph, place, nodes[k])):
                    reach[r], shrinking = k, True
                    break
    return reach


def leading(graph: Graph, rank: int) -> int:
    """The number of forwards, none overlapping a backward, at the start of a rank's ops."""
    nodes = graph.computing[rank]
    return next((k for k, i in enumerate(nodes) if not graph.ops[i].kind.is_forward or i in graph.group_of), len(nodes))


def closed(graph: Graph, reach: Sequence[int]) -> list[int]:
    """The smallest closed reach that covers `reach`."""
    covered, place = list(reach), _places(graph)
    pending = list(range(len(covered)))
    seen = [0] * len(covered)  # per rank, the number of examined ops
    while pending:
        r = pending.pop()
        for k in range(seen[r], covered[r]):
            for peer, at in _needs(graph, place, graph.computing[r][k]):
                if at >= covered[peer]:
                    covered[peer] = at + 1
                    pending.append(peer)
        seen[r] = covered[r]
    return covered


_Places = dict[int, tuple[int, int]]  # op -> its rank, and its place among the compute ops there


def _places(graph: Graph) -> _Places:
    return {i: (rank, k) for rank, nodes in enumerate(graph.computing) for k, i in enumerate(nodes)}


def _needs(graph: Graph, place: _Places, op: int) -> Iterator[tuple[int, int]]:
    """Yields the places of an op's dependencies on other ranks."""
    for message in graph.arrivals(op):
        sender = graph.before[message]
        if sender in place:
            yield place[sender]
