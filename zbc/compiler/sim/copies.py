"""Offload copies in a timeline: their time, and the time ranks wait for them."""

from __future__ import annotations

from typing import NamedTuple

from zbc.compiler.graph import Graph
from zbc.compiler.sim.simulate import Timeline
from zbc.ir import COPY, Key
from zbc.ops import Lane


class Copying(NamedTuple):
    """ms of one rank's copies in a step."""

    copying: float = 0.0
    waited: float = 0.0  # by the rank, for its copies

    @property
    def hidden(self) -> float:
        """The share of the copies that no rank waits for."""
        return max(0.0, 1 - self.waited / self.copying) if self.copying else 1.0


def copied(timeline: Timeline) -> list[Copying]:
    """The copies of every rank."""
    graph = timeline.graph
    found = [[0.0, 0.0] for _ in range(timeline.ranks)]
    events = {event: ops[0] for event, ops in graph.met.items() if graph.ops[ops[0]].kind in COPY}
    waiting = _waiting(graph) if events else {}
    for event, start in events.items():
        op, mine = graph.ops[start], found[graph.rank(start)]
        i = waiting[op.kind.row.lane, graph.rank(start), op.key]
        others = [timeline.end[x] for x in graph.arrivals(i)] if op.kind.row.lane is Lane.BACK else []
        mine[0] += timeline.end[event] - timeline.start[event]
        mine[1] += max(0.0, timeline.end[event] - max([timeline.end[graph.before[i]], *others]))
    return [Copying(*pair) for pair in found]


def _waiting(graph: Graph) -> dict[tuple[Lane, int, Key], int]:
    """The op that waits for each copy of a rank: RELEASE for an OFFLOAD, the backward for a RELOAD."""
    found = dict[tuple[Lane, int, Key], int]()
    for i, op in enumerate(graph.ops):
        if op.kind in COPY and op.kind.row.lane is Lane.COMPUTE:
            found[Lane.OUT, graph.rank(i), op.key] = i
        elif op.kind.is_backward:
            found[Lane.BACK, graph.rank(i), op.key] = i
    return found
