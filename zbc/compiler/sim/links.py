"""Copies of ranks that share a link to the host: it takes one out and one back at a time, in the order of time.

The order of copies then depends on the times, not on a list, so nodes are walked in the order of their earliest start.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

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
    """Yields all nodes that take time, by their earliest start; reads `end` of a node after yielding it.

    With `posted`, messages wait for their buffer.
    """
    order, _ = graph.ran
    left, after = dict[int, int](), dict[int, list[int]]()
    first = len(graph.ops)
    needs = dict[int, list[int]]()
    for i in order:
        mine = [graph.before[i], *graph.pred[graph.ptr[i] : graph.ptr[i + 1]], *graph.waits.get(i, ())]
        if posted and 0 <= i - first < len(graph.posted):
            mine.append(graph.posted[i - first])
        needs[i] = mine
        left[i] = sum(k >= 0 for k in mine)
        for k in mine:
            if k >= 0:
                after.setdefault(k, []).append(i)
    heap = [(max(end[k] for k in needs[i]), i) for i in order if not left[i]]
    heapq.heapify(heap)
    while heap:
        _, i = heapq.heappop(heap)
        yield i
        for k in after.get(i, ()):
            left[k] -= 1
            if not left[k]:
                heapq.heappush(heap, (max(end[j] for j in needs[k]), k))
