"""Least times along the path of a microbatch, and the most time within a memory limit: the parts of bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from zbc.compiler.cost.cost import Costs
from zbc.ir import Edge, Placement

INF = float("inf")
ROOM = 1e-6  # limits are compared with this slack everywhere


class Way:
    """Least times between ops of one microbatch of a pipe, by prefix sums along its path. `f`, `b` and `w` are ms per
    stage, `kept` and `left` activation units."""

    def __init__(self, placement: Placement, costs: Costs, pipe: int = 0) -> None:
        self.placement = placement
        self.f, self.b, self.w = map(costs.column, ("f", "b", "w"))
        self.kept, self.left = map(costs.units, ("kept", "left"))
        self.stages = [placement.stages_of(rank) for rank in range(placement.ranks)]
        (self.last,) = (s for s in range(placement.stages) if not placement.sinks(s))
        self._f = [0.0, *accumulate(self.f)]  # of the previous stages
        self._b = list(accumulate(self.b))  # of the previous stages and this one
        self._lag = [0.0, *accumulate(costs.lags(pipe).values())]

    def down(self, s: int, t: int) -> float:
        """From the start of F_s to the start of F_t."""
        return self._f[t] - self._f[s] + self._lag[t] - self._lag[s]

    def up(self, t: int, s: int) -> float:
        """From the start of B_t to the start of B_s, s <= t."""
        return self._b[t] - self._b[s] + self._lag[t] - self._lag[s]

    def around(self, s: int, t: int) -> float:
        """From the start of F_s to the start of B_t."""
        return self.down(s, self.last) + self.f[self.last] + self.up(self.last, t)


def fill(items: Sequence[tuple[float, float, int]], room: float) -> float:
    """The most time whose memory fits in `room`: items are (memory, time, count). Fractions of an item are allowed."""
    if room >= 1e14:
        return sum(time * count for _, time, count in items)
    total = 0.0
    for memory, time, count in sorted(items, key=lambda item: -item[1] / item[0] if item[0] > 0 else -INF):
        if memory <= 0:
            total += time * count
            continue
        if room <= 0:
            break
        take = min(float(count), room / memory)
        total += take * time
        room -= take * memory
    return total


def longest(
    placement: Placement, ms: Sequence[float], links: Mapping[Edge, float], reads: Callable[[int], tuple[int, ...]]
) -> list[float]:
    """For each stage the longest path that ends with it: `ms` of its stages and `links` of the edges between them.
    `reads` are the stages before it: `placement.sources` for paths from the data, `placement.sinks` from the loss."""
    found = [0.0] * placement.stages
    for s in range(placement.stages) if not reads(0) else reversed(range(placement.stages)):  # those before it first
        found[s] = ms[s] + max((found[other] + links[min(s, other), max(s, other)] for other in reads(s)), default=0.0)
    return found
