"""The shortest cycle of waits among the ops that never run, found with networkx.

Waits of an op for an op of another rank count 1; the order of a rank counts 0. Nodes
are (START, op), its beginning; (END, op), the end of an op that blocks its rank; for a collective, which a rank starts
without waiting for it, (NEXT, op), its turn in the queue of its rank, and (OVER, op), its completion. Nodes in no cycle
are removed before the search.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import networkx as nx

from zbc.compiler.graph import Graph
from zbc.ops import Kind

START, END, NEXT, OVER = range(4)
WINDOW = 40_000  # stuck ops examined: the first ones of each rank; some cycle is among them
EFFORT = 400  # waits through which a shortest cycle is searched, at the first stops of ranks

Node = tuple[int, int]


class CycleWait(NamedTuple):
    """One wait of a cycle; `behind` is the op that blocks the target's rank, if not the target itself."""

    op: int
    target: int
    behind: int | None

    def text(self, g: Graph) -> str:
        order = "" if self.behind is None else f", after step {g.place(self.behind)[1]}"
        return f"{g.text(self.op)}  waits for  {g.text(self.target)}{order}"


def shortest_cycle(g: Graph, done: bytearray, *, blocking_sends: bool = False) -> list[CycleWait]:
    """The lines of a cycle with few waits, each blocked by the next and the last by the first; [] if there is none. The
    fewest possible, unless more than `EFFORT` waits are in cycles."""
    graph = nx.DiGraph()
    for a, b, weight in _Waits(g, done, blocking_sends).edges():
        if not graph.has_edge(a, b) or graph[a][b]["weight"] > weight:
            graph.add_edge(a, b, weight=weight)
    alone = (part for part in nx.strongly_connected_components(graph) if len(part) == 1)
    graph.remove_nodes_from([v for part in alone for v in part if not graph.has_edge(v, v)])
    best: list[Node] = []
    length = len(g.ops)
    waits = sorted((a, b) for a, b, weight in graph.edges(data="weight") if weight)
    for a, b in sorted(waits, key=lambda wait: g.place(wait[0][1])[1])[:EFFORT]:
        try:
            cost, path = nx.single_source_dijkstra(graph, b, a, cutoff=length - 2)
        except nx.NetworkXNoPath:
            continue
        if cost + 1 < length:
            length, best = cost + 1, [a, *path]
    crossed = [(a, b) for a, b in pairwise(best) if graph[a][b]["weight"]]
    lines = []
    for (a, b), (following, _) in zip(crossed, [*crossed[1:], *crossed[:1]], strict=True):
        lines.append(CycleWait(a[1], b[1], following[1] if following[1] != b[1] else None))
    first = lines.index(min(lines)) if lines else 0
    return lines[first:] + lines[:first]


def holds(g: Graph, done: bytearray, op: int, *, blocking_sends: bool) -> bool:
    """Whether an op has begun and its event, for which its rank waits, never completes."""
    event = g.party[op]
    return event >= 0 and not done[event] and blocks(g, op, blocking_sends=blocking_sends)


def blocks(g: Graph, op: int, *, blocking_sends: bool) -> bool:
    """Whether an op blocks its rank until its event is completed."""
    kind: Kind = g.ops[op].kind
    return g.layout.rows[kind].blocks or (blocking_sends and kind.is_send)


class _Waits:
    """The waits of nodes that never happen, as edges (waiter, target, 1; 0 for the order of a rank)."""

    def __init__(self, g: Graph, done: bytearray, blocking_sends: bool) -> None:
        self.g, self.done, self.blocking_sends = g, done, blocking_sends
        ranks = len(g.first) - 1
        window = max(100, WINDOW // ranks)
        self.stuck = [
            [i for i in g.mine(rank) if not done[i] or holds(g, done, i, blocking_sends=blocking_sends)][:window]
            for rank in range(ranks)
        ]
        self.queued = self._queues()

    def _blocks(self, i: int) -> bool:
        return blocks(self.g, i, blocking_sends=self.blocking_sends)

    def _queues(self) -> dict[int, int]:
        """For each unfinished collective, the previous one in the queue of its rank, -1 for none."""
        previous: dict[int, int] = {}
        last: dict[int, int] = {}
        for i in sorted(i for ops in self.g.met.values() for i in ops if self.g.ops[i].kind.is_collective):
            rank = self.g.rank(i)
            if not self.done[self.g.party[i]]:
                previous[i] = last.get(rank, -1)
            last[rank] = i if not self.done[self.g.party[i]] else -1
        return previous

    def edges(self) -> Iterator[tuple[Node, Node, int]]:
        for ops in self.stuck:
            for before, i in pairwise(ops):
                yield (START, i), (END if self._blocks(before) else START, before), 0
            for i in ops:
                if self._blocks(i):
                    yield (END, i), (START, i), 0
                    yield from self._for_event((END, i), self.g.party[i])
                yield from self._needs(i)
        yield from self._collectives()

    def _needs(self, i: int) -> Iterator[tuple[Node, Node, int]]:
        """Yields the waits of an op for its inputs, or its group's."""
        g, done, n = self.g, self.done, len(self.g.ops)
        for node in g.pred[g.ptr[i] : g.ptr[i + 1]]:
            if not done[node]:
                if node < n:
                    yield (START, i), (START, node), 1
                elif node in g.met:
                    yield from (((START, i), (OVER, j), 1) for j in g.met[node] if g.rank(j) == g.rank(i))
                else:
                    yield from self._for_event((START, i), node)

    def _for_event(self, who: Node, event: int) -> Iterator[tuple[Node, Node, int]]:
        """Yields the waits of `who` for a message's ends that never come, or for a collective's completion."""
        g, done, n = self.g, self.done, len(self.g.ops)
        if event < 0 or done[event]:
            return
        if event in g.met:
            yield who, (OVER, who[1]), 0
            return
        x = event - n
        if x < len(g.sender):
            for end in (g.sender[x], g.receiver[x]):
                if end >= 0 and not done[end] and end != who[1]:
                    yield who, (START, end), 1

    def _collectives(self) -> Iterator[tuple[Node, Node, int]]:
        """A collective completes when all its ranks have come to it and completed the earlier ones in their queues."""
        g, done = self.g, self.done
        for i, before in self.queued.items():
            yield (OVER, i), (NEXT, i), 0
            if not done[i]:
                yield (OVER, i), (START, i), 0
            if before >= 0:
                yield (NEXT, i), (OVER, before), 0
            for j in g.met[g.party[i]]:
                if j != i:
                    yield (OVER, i), (NEXT, j), 1
                    if not done[j]:
                        yield (OVER, i), (START, j), 1
