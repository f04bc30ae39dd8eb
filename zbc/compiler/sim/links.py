"""Copies of ranks that share a link to the host: it takes one out and one back at a time, in the order of time.

The order of copies then depends on the times, not on a list, so nodes are walked in the order of their earliest start.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter

from zbc.compiler.cost.cost import Costs
from zbc.compiler.graph import Graph
from zbc.ir import COPY
from zbc.ops import Lane


class Links:
    """The time until which each link is taken, either way; `lane_of` has the link and the direction of each copy."""

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.alone = costs.alone
        self.lane_of = dict[int, tuple[int, bool]]()
        for event, ops in graph.met.items():
            kind = graph.ops[ops[0]].kind
            if kind in COPY:
                self.lane_of[event] = graph.rank(ops[0]) // costs.shared, kind.row.lane is Lane.OUT
        self.free = dict.fromkeys({(link, out) for link, _ in self.lane_of.values() for out in (True, False)}, 0.0)

    def copy(self, event: int, ready: float, length: float) -> tuple[float, float]:
        """The start and the ms of a copy that is ready at `ready`."""
        link, out = self.lane_of[event]
        begin = max(ready, self.free[link, out])
        if self.free[link, not out] <= begin:
            length *= self.alone
        self.free[link, out] = begin + length
        return begin, length


def by_time(graph: Graph, end: Sequence[float], *, posted: bool) -> Iterator[int]:
    """Yields all nodes that take time, by their earliest start; reads `end` of a node after yielding it. With `posted`,
    messages wait for their buffer."""
    needs = {i: needs_of(graph, i, posted=posted) for i in graph.ran[0]}
    nodes, heap = (
        TopologicalSorter({i: [k for k in mine if k >= 0] for i, mine in needs.items()}),
        list[tuple[float, int]](),
    )
    nodes.prepare()
    while nodes.is_active():
        for i in nodes.get_ready():
            heapq.heappush(heap, (max(end[k] for k in needs[i]), i))
        _, i = heapq.heappop(heap)
        yield i
        nodes.done(i)


def needs_of(graph: Graph, i: int, *, posted: bool) -> list[int]:
    """The nodes that node i waits for, a message with `posted` also for its buffer; negative: the beginning."""
    needs = [graph.before[i], *graph.pred[graph.ptr[i] : graph.ptr[i + 1]], *graph.waits.get(i, ())]
    message = i - len(graph.ops)
    return [*needs, graph.posted[message]] if posted and 0 <= message < len(graph.posted) else needs
