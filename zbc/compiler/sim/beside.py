"""What a rank does beside compute: offload copies, and tensor-parallel collectives inside of ops.

The collectives are no ops of a plan. An F or a B on its own waits for its collectives; a BW's collectives run during
its own W; in an overlap group each op runs during collectives of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.graph import Graph
from zbc.compiler.sim.simulate import Timeline
from zbc.ir import COPY, Key, Op
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


class Shared(NamedTuple):
    """Collectives of one op, as one piece; ms in the time of the timeline."""

    op: Op
    start: float
    end: float
    hidden: bool  # by the compute of its rank meanwhile


class Sums(NamedTuple):
    """ms of all these collectives on a rank in a step, the mean of the ranks, and of these the exposed ms."""

    ms: float
    exposed_ms: float

    @property
    def hidden(self) -> float:
        """The share that no rank waits for."""
        return 1 - self.exposed_ms / self.ms


def sums_of(timeline: Timeline, costs: Costs) -> Sums | None:
    """The collectives inside the ops of a timeline; None if there are none."""
    whole = exposed = 0.0
    for rank in range(timeline.ranks):
        for piece in shared(timeline, costs, rank):
            ms = piece.end - piece.start
            whole, exposed = whole + ms, exposed + (0.0 if piece.hidden else ms)
    return Sums(whole / timeline.ranks, exposed / timeline.ranks) if whole > 0 else None


def shared(timeline: Timeline, costs: Costs, rank: int) -> Iterator[Shared]:
    """Yields the collectives inside the ops of a rank, in order."""
    graph, skip = timeline.graph, 0
    for i in graph.mine(rank):
        if skip:
            skip -= 1
        elif graph.ops[i].kind.is_mark:
            yield from _of_group(timeline, costs, i)
            skip = 2
        else:
            op, end = graph.ops[i], timeline.end[i]
            sums, wait = costs.sums(op)
            if sums > wait:
                yield Shared(op, end - sums, end - wait, hidden=True)
            if wait > 0:
                yield Shared(op, end - wait, end, hidden=False)


def _of_group(timeline: Timeline, costs: Costs, mark: int) -> Iterator[Shared]:
    """Yields each op's collectives under the other op; at the end those that exceed the compute of both."""
    one, other = timeline.graph.ops[mark + 1], timeline.graph.ops[mark + 2]
    begin, middle, end = timeline.start[mark + 1], timeline.end[mark + 1], timeline.end[mark + 2]
    first, second = costs.sums(one)[0], costs.sums(other)[0]
    if first + second <= 0:
        return
    alone = [costs.duration(op) - costs.sums(op)[1] for op in (one, other)]
    exposed = max(0.0, first + second - sum(alone))
    scale = 1 - exposed / (first + second)
    first, second = first * scale, second * scale
    if second > 0:
        yield Shared(other, begin, begin + second, hidden=True)
    if first > 0:
        start = min(max(middle, begin + second), end - exposed - first)
        yield Shared(one, start, start + first, hidden=True)
    if exposed > 0:
        yield Shared(one, end - exposed, end, hidden=False)
