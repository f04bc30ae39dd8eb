"""Lower bounds for placements with several pipes, when more than one gets microbatches.

With two, rank r holds stages lo..hi of each pipe, or of one of them. The bounds of one pipe (bounds.py) hold for the
pipe with the smaller ones:

- nothing starts on r before the shorter of the paths down to its first stages;
- before the first B on r, some microbatch has been to the end of its pipe and back; meanwhile r can run F only, and no
  more of them than fit in memory; likewise after its last F;
- after the last B on r, a gradient takes the shorter of the paths back to stage 0, and a W has to run there; of its own
  work r can have left only the W that fit in memory.

Work depends on how many microbatches each pipe gets; the split with the least bound counts. With three pipes and more
the busiest rank has no less than an equal share of all work, and one microbatch has to take its path.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbc.compiler.cost.cost import Costs
from zbc.compiler.sim.ways import ROOM, Way, fill
from zbc.ir import Placement


class _MirroredRank:
    """Times of one rank in ms, valid for every split, and of one microbatch per pipe."""

    def __init__(self, ways: Sequence[Way], m: int, limit: float, r: int) -> None:
        one, chunks = ways[0], [[s for s, rank in enumerate(pipe) if rank == r] for pipe in ways[0].placement.pipes]
        held = [(way, c[0], c[-1]) for way, c in zip(ways, chunks, strict=True) if c]
        stages = [s for c in chunks for s in c]
        around = [way.around(s, t) for way, s, t in held]
        down = [way.down(0, s) for way, s, _ in held]
        forwards = fill([(one.kept[s], one.f[s], m) for s in stages], limit)
        last = [(one.kept[s], one.b[s] + one.w[s], m) for s in stages]
        last += [(one.left[s], one.w[s], m) for s in stages]
        windows = [way.around(t, s) - one.f[t] for way, s, t in held]
        self.head = min(down)  # before its first op
        # Before its first B, less the F that can run meanwhile; and the same, from its own first op on.
        self.first_b = min(a + b for a, b in zip(down, around, strict=True)) - forwards
        self.warm = max(0.0, min(around) - forwards)
        self.tail = max(0.0, min(windows) - fill(last, limit))  # idle after its last F
        # From its last B to the end, and W that can run after it; whether a B comes before the last F.
        self.back = min(way.up(s, 0) - one.b[s] + one.b[0] + one.w[0] for way, s, _ in held)
        self.late_w = fill([(one.left[s], one.w[s], m) for s in stages], limit)
        self.forced = m * min(sum(one.kept[s] for s in c) for c in chunks) > limit
        self.life = [  # least memory-time over the limit
            sum(one.kept[s] * (way.around(s, s) + one.b[s]) + one.left[s] * one.w[s] for s in c) / limit
            for way, c in zip(ways, chunks, strict=True)
        ]
        self.f_and_b = [sum(one.f[s] + one.b[s] for s in c) for c in chunks]
        self.w = [sum(one.w[s] for s in c) for c in chunks]

    def span(self, split: Sequence[int]) -> float:
        idle = self.warm + self.tail if self.forced else max(self.warm, self.tail)
        return max(_of(split, self.f_and_b) + _of(split, self.w) + idle, _of(split, self.life))

    def makespan(self, split: Sequence[int]) -> float:
        begin = max(self.head, self.first_b)
        early = max(0.0, _of(split, self.w) - self.late_w)
        whole = _of(split, self.f_and_b) + _of(split, self.w)
        return max(begin + _of(split, self.f_and_b) + early + self.back, begin + whole, self.head + self.span(split))


def _of(split: Sequence[int], each: Sequence[float]) -> float:
    return sum(n * x for n, x in zip(split, each, strict=True))


def mixed(placement: Placement, costs: Costs, m: int, limits: Sequence[float]) -> tuple[float, float]:
    """Lower bounds of makespan and span in ms of all orders with microbatches in several pipes; infinite for m = 1."""
    ways = [Way(placement, costs, pipe) for pipe in range(len(placement.pipes))]
    if len(ways) > 2:
        one = ways[0]
        share = m * (sum(one.f) + sum(one.b) + sum(one.w)) / placement.ranks
        return max(share, min(way.around(0, 0) for way in ways) + one.b[0] + one.w[0]), share
    ranks = [_MirroredRank(ways, m, limits[r] + ROOM, r) for r in range(placement.ranks) if ways[0].stages[r]]
    splits = [(x, m - x) for x in range(1, m)]
    makespan = min((max(rank.makespan(split) for rank in ranks) for split in splits), default=float("inf"))
    span = min((max(rank.span(split) for rank in ranks) for split in splits), default=float("inf"))
    return makespan, span
