"""Lower bounds for every schedule of a placement, in any order, within a memory limit.

For rank r with stages lo..hi of the path, on its own time (`span`): its work and the idle time it cannot avoid.

- warm: from its first F_lo to its first B_hi a microbatch travels to the last stage and back; meanwhile the rank can
  run F only, and no more of them than fit in memory. Before its first F of a later stage it can run F of earlier ones
  only, and has to leave room for that microbatch to come through.
- tail: from its last F_hi to the B_lo of that microbatch likewise; meanwhile only B and W of those in memory can run.
- Little's law: the memory of microbatches, times their least life on the rank, is at most limit times span.
- cycle: with room for k microbatches, F of i+k waits for B of i.
- inside: all F and B of later stages on another rank happen between r's first F and last B.

The makespan adds the path down to r's first stage before it and, after its last B, the path back to stage 0 and one W.
The ideas are those of arXiv 2401.10241 (section 4) and 2405.15362, combined; tests check them with random schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from operator import itemgetter

from zbc.compiler.cost.cost import Costs
from zbc.compiler.sim.bounds_mirrored import mixed
from zbc.compiler.sim.ways import INF, ROOM, Way, fill, longest
from zbc.ir import Placement


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds in ms."""

    makespan: float
    span: float
    memory: bool = True  # whether memory limits count in them, if there are any

    def of(self, objective: str) -> float:
        """The bound for "makespan", "span" or "period": consecutive steps take a rank at least its span each."""
        return self.makespan if objective == "makespan" else self.span


def bounds(placement: Placement, costs: Costs, m: int, limit: Sequence[float] | float | None = None) -> Bounds:
    """Bounds for m microbatches with at most `limit` activation units per rank (one for all, or one each). With several
    pipes, the best distribution of the microbatches among them counts; see bounds_mirrored.py. A rank without a stage
    bounds nothing."""
    if "s" in costs.ms:
        plain = replace(costs, ms={name: ms for name, ms in costs.ms.items() if name not in ("s", "t", "i", "e")})
        return _with_words(bounds(placement, plain, m, limit), placement, costs, m)
    costs = costs.fastest()
    if costs.slices > 1:
        return _of_parts(placement, costs, m, limit)
    if costs.overlap:  # as if every F could overlap, as far as groups allow
        hidden = 1.0 - costs.overlap
        costs = replace(costs.with_ms(f=costs.each(lambda ms: hidden * ms, "f")), overlap=0.0)
    if costs.unequal:
        return _of_parts(placement, costs, m, limit)
    costs = relaxed(costs)
    p = placement.ranks
    limits = [INF if limit is None else float(limit)] * p if not isinstance(limit, Sequence) else list(limit)
    if len(placement.pipes) > 1:
        alone = [
            bounds(placement.only(pipe), replace(costs, links=(links,)), m, limits)
            for pipe, links in enumerate(costs.links)
        ]
        makespan, span = mixed(placement, costs, m, limits)
        return Bounds(min(makespan, *(b.makespan for b in alone)), min(span, *(b.span for b in alone)))
    if placement.branches:
        return Bounds(*_branched(placement, costs, costs, m))
    way = Way(placement, costs)
    others = _busiest(way, m, limits)
    single = [_RankBounds(way, m, limits, r, others[r]).bounds() for r in range(p) if way.stages[r]]
    return Bounds(max(b.makespan for b in single), max(b.span for b in single))


def _branched(placement: Placement, costs: Costs, least: Costs, m: int) -> tuple[float, float]:
    """Makespan and span in ms for a graph of stages, under any limit; no op or transfer takes less than in `least`.
    Before its first backward a microbatch takes the longest path to the loss and back, while the rank can run forwards
    only. After its last backward the longest path back to the data and one W are left."""
    f, b, w = map(least.column, ("f", "b", "w"))
    links = least.lags(0)
    down = longest(placement, f, links, placement.sources)  # to the end of F of each stage, from the data
    ahead = longest(placement, f, links, placement.sinks)  # from its beginning to the end of the last F
    back = longest(placement, b, links, placement.sinks)  # from the loss to the end of its B
    last = [ms + (0.0 if placement.sources(s) else w[s]) for s, ms in enumerate(b)]
    up = longest(placement, last, links, placement.sources)
    makespan = span = 0.0
    for rank in range(placement.ranks):
        mine = placement.stages_of(rank)
        forward, backward, later = (m * sum(each[s] for s in mine) for each in map(costs.column, ("f", "b", "w")))
        work = forward + backward + later
        head = min((down[s] - f[s] for s in mine), default=0.0)
        warm = min((ahead[s] + back[s] - b[s] for s in mine), default=0.0)  # from its first F to its first B
        tail = min((up[s] - b[s] for s in mine), default=0.0)
        idle = max(0.0, warm - forward) if len(mine) == 1 else 0.0
        span = max(span, work + idle)
        makespan = max(makespan, head + work + idle, head + forward + idle + backward + tail)
    return makespan, span


def relaxed(costs: Costs) -> Costs:
    """Costs of separate B and W that are at most those of a BW in their place, too."""
    costs = costs.least()
    kept = costs.units("kept")
    # A fused backward never holds the inputs of W; if those are more than F left, it beats separate B and W.
    return costs.counted(lambda stage, size: min(kept[stage], size.units), "left")


def _of_parts(placement: Placement, costs: Costs, m: int, limit: Sequence[float] | float | None) -> Bounds:
    """Bounds for microbatches in slices, or for unequal ones: the bounds of as many microbatches as there are parts,
    with the least costs of any part, which have at least their freedom; and the work of each rank after the path to
    it."""
    least = costs.unit(min)
    found = bounds(placement, least, m * costs.slices, limit)
    costs = costs.least()
    f, b, w = map(costs.column, ("f", "b", "w"))
    makespan, span = found.makespan, found.span
    if costs.unequal and not placement.branches:
        alone = _of_one(placement, costs)
        makespan, span = max(makespan, alone.makespan), max(span, alone.span)
    if len(placement.pipes) > 1:  # the busiest rank has an equal share at least
        share = m * (sum(f) + sum(b) + sum(w)) / placement.ranks
        return Bounds(max(makespan, share), max(span, share))
    if placement.branches:
        other = _branched(placement, costs, least, m)
        return Bounds(max(makespan, other[0]), max(span, other[1]))
    way = Way(placement, least)
    for stages in way.stages:
        if stages:
            work, later = m * sum(f[s] + b[s] + w[s] for s in stages), m * sum(w[s] for s in stages)
            back = way.up(stages[0], 0) + way.b[0] - way.b[stages[0]]
            span = max(span, work)
            makespan = max(makespan, way.down(0, stages[0]) + max(work, work - later + back))
    return Bounds(makespan, span)


def _of_one(placement: Placement, costs: Costs) -> Bounds:
    """The way of the microbatch with most to do, to the loss and back, from stage 0 on and from any rank on."""
    work = [
        sum(costs.of(name, s, mb) for name in ("f", "b") for s in range(costs.stages)) for mb in range(costs.unequal)
    ]
    one = costs.unit(itemgetter(work.index(max(work))))
    ways = [Way(placement, one, pipe) for pipe in range(len(placement.pipes))]
    makespan = min(way.around(0, 0) + way.b[0] + way.w[0] for way in ways)
    if len(ways) > 1:
        return Bounds(makespan, 0.0)
    return Bounds(makespan, max(ways[0].around(s[0], s[0]) + ways[0].b[s[0]] for s in ways[0].stages if s))


def _with_words(found: Bounds, placement: Placement, costs: Costs, m: int) -> Bounds:
    """Bounds with vocabulary parallelism: each rank also works on its shard, and S, T and E come after the path down to
    it. A waiting rank may work on them, so they add nothing else."""
    way = Way(placement, costs.unit(min))
    f, b, w, bw = map(costs.column, ("f", "b", "w", "bw"))
    s, t, i, e = map(costs.column, ("s", "t", "i", "e"))
    makespan, span = found.makespan, found.span
    for rank, stages in enumerate(way.stages):
        if stages:
            work = m * sum(f[one] + min(bw[one], b[one] + w[one]) for one in stages) + m * (s[rank] + t[rank] + e[rank])
            makespan = max(makespan, way.down(0, stages[0]) + work)
            span = max(span, work + m * i[rank])
    return Bounds(makespan, span)


def with_sums(found: Bounds, placement: Placement, costs: Costs, *, ahead: bool = False) -> Bounds:
    """Bounds for steps with gradient reductions and weight gathers, with times from `costs`. After the last op of any
    rank comes the reduction of its stage. The first op of all waits for the weights of a stage that reads the data,
    while other ranks may gather theirs during their wait for it. `ahead`: weights are gathered after all reductions, a
    rank's one after the other."""
    sums, gather = min(costs.column("reduce")), costs.column("gather")
    if ahead:
        each = [costs.total("gather", placement.stages_of(rank)) for rank in range(placement.ranks)]
        return replace(found, makespan=found.makespan + sums + max(each), span=found.span + sums + min(each))
    first = min(gather[stage] for stage in range(placement.stages) if not placement.sources(stage))
    return replace(found, makespan=found.makespan + sums + first, span=found.span + sums)


def without_a_flush(placement: Placement, costs: Costs, m: int) -> Bounds:
    """Bounds for steps that follow one another without a flush: the work of the busiest rank, since its waits and
    reductions overlap with the next step; the pipes share the microbatches."""
    costs = costs.fastest().least()
    f, b, w = map(costs.column, ("f", "b", "w"))
    work = [0.0] * placement.ranks
    for pipe in placement.pipes:
        for s, rank in enumerate(pipe):
            work[rank] += m * (f[s] * (1 - costs.overlap) + b[s] + w[s]) / len(placement.pipes)
    return Bounds(max(work), max(work), memory=False)


_Later = tuple[int, Sequence[int]]  # a rank, and its stages after some stage


def _busiest(way: Way, m: int, limits: Sequence[float]) -> dict[int, _Later | None]:
    """By rank the other rank, with its stages after this one's first, that holds this one up longest."""
    found, stages = dict[int, _Later | None](), {(s, r): i for r, of in enumerate(way.stages) for i, s in enumerate(of)}
    longest, later = [0.0] * len(way.stages), list[_Later | None]([None] * len(way.stages))
    for (s, rank), index in sorted(stages.items(), reverse=True):
        if not index:  # all stages after this one have been seen, and of its own rank none counts
            own, longest[rank] = longest[rank], 0.0
            most = max(longest)
            found[rank], longest[rank] = later[longest.index(most)] if most else None, own
        inner = way.stages[rank][index:]
        longest[rank] = way.down(0, s) + _work(way, m, limits[rank], inner) + way.up(s, 0)
        later[rank] = rank, inner
    return found


def _work(way: Way, m: int, limit: float, inner: Sequence[int]) -> float:
    """Time of a rank between its first F of the stages `inner` and the begin of its last B of the first of them."""
    both = m * sum(way.f[s] + way.b[s] for s in inner) - way.b[inner[0]]
    return both + _w_before_last_b(way, m, limit, inner)


def _w_before_last_b(way: Way, m: int, limit: float, stages: Sequence[int]) -> float:
    """W time that cannot be deferred past the last B of a rank, since deferred W hold memory."""
    total = m * sum(way.w[s] for s in stages)
    later = fill([(way.left[s], way.w[s], m) for s in stages], limit + ROOM)
    return max(0.0, total - later)


class _RankBounds:
    def __init__(self, way: Way, m: int, limits: Sequence[float], rank: int, busiest: _Later | None) -> None:
        self.way, self.m, self.limits, self.rank, self.busiest = way, m, limits, rank, busiest
        self.limit = limits[rank] + ROOM
        self.stages = way.stages[rank]
        self.low, self.high = self.stages[0], self.stages[-1]

    def bounds(self) -> Bounds:
        way, m = self.way, self.m
        warm, tail = self._warm(), self._tail()
        forced = m * sum(way.kept[s] for s in self.stages) > self.limit  # a B comes before the last F
        work = m * sum(way.f[s] + way.b[s] + way.w[s] for s in self.stages)
        span = work + (warm + tail if forced else max(warm, tail))
        span = max(span, self._little(), self._inside(), self._cycle())
        head = self.way.down(0, self.low)
        both = m * sum(way.f[s] + way.b[s] for s in self.stages)
        back = self.way.up(self.low, 0) + way.w[0] if self.low else way.w[0]
        back -= way.b[self.low] if self.low else 0.0  # the rank's last B is in `both`
        makespan = head + both + _w_before_last_b(way, m, self.limits[self.rank], self.stages) + warm + back
        return Bounds(max(head + span, makespan), span)

    def _warm(self) -> float:
        """Idle time before the first B."""
        meanwhile = self._forwards(self.stages, self.limit)
        idle = max(0.0, self.way.around(self.low, self.high) - meanwhile)
        for k in range(1, len(self.stages)):
            room = self.limit - sum(self.way.kept[s] for s in self.stages[k:])
            meanwhile = self._forwards(self.stages[:k], room)
            idle = max(idle, self.way.down(self.low, self.stages[k]) - meanwhile)
        return idle

    def _forwards(self, stages: Sequence[int], room: float) -> float:
        """The most time for F of these stages within `room`, with nothing freed."""
        way, s = self.way, stages[0]
        if len(stages) == 1 and 0 < way.kept[s] <= room < 1e14:
            return min(self.m, int(room // way.kept[s])) * way.f[s]
        return fill([(way.kept[s], way.f[s], self.m) for s in stages], room)

    def _tail(self) -> float:
        """Idle time between the last F and the B_lo of its microbatch."""
        way, m = self.way, self.m
        window = self.way.around(self.high, self.low) - way.f[self.high]
        items = [(way.kept[s], way.b[s] + way.w[s], m - 1) for s in self.stages]
        items += [(way.left[s], way.w[s], m) for s in self.stages]
        others = fill(items, self.limit - sum(way.kept[s] for s in self.stages))
        own = sum(way.b[s] + way.w[s] for s in self.stages if s != self.low)
        return max(0.0, window - others - own)

    def _little(self) -> float:
        """Memory times time: at most the limit throughout, and less while filling and emptying."""
        if self.limit >= 1e14:
            return 0.0
        way = self.way
        area = sum(way.kept[s] * (self.way.around(s, s) + way.b[s]) + way.left[s] * way.w[s] for s in self.stages)
        return (self.m * area + self._ramps()) / self.limit

    def _ramps(self) -> float:
        """Memory-time that cannot be used: filling takes an F per unit, emptying a B or W."""
        way, limit = self.way, self.limit
        units = [way.kept[s] for s in self.stages]
        unit = max(units)
        if unit <= 0 or any(way.left[s] > way.kept[s] for s in self.stages):
            return 0.0
        step = min(way.f[s] for s in self.stages)
        count = min(int(limit // unit), self.m * len(units))
        filling = sum(max(0.0, limit - (j + 1) * unit) * step for j in range(count))
        rates = [way.b[s] / (way.kept[s] - way.left[s]) for s in self.stages if way.kept[s] > way.left[s]]
        rates += [way.w[s] / way.left[s] for s in self.stages if way.left[s] > 0]
        spare = max(0.0, min(limit, self.m * sum(units)) - unit)
        return filling + 0.5 * spare * spare * min(rates, default=0.0)

    def _inside(self) -> float:
        """The bound from another rank's F and B of stages after `low`, all between this rank's first F and last B."""
        if self.busiest is None:
            return 0.0
        way, m, (rank, inner) = self.way, self.m, self.busiest
        back = way.up(inner[0], self.low) + way.b[self.low] + way.w[self.low]
        return max(0.0, way.down(self.low, inner[0]) + _work(way, m, self.limits[rank], inner) + back)

    def _cycle(self) -> float:
        """For one stage on the rank with room for k microbatches: F of i+k waits for B of i, and for a W if it must."""
        way, m, s = self.way, self.m, self.low
        unit, kept = way.kept[s], way.left[s]
        if len(self.stages) > 1 or unit <= 0 or self.limit >= 1e14:
            return 0.0
        k = int(self.limit // unit)
        if not 1 <= k < m:
            return 0.0
        around, b, w = self.way.around(s, s), way.b[s], way.w[s]
        turn = around + b + _release(self.limit - k * unit, unit, kept, b, w)
        rounds, rest = divmod(m - 1, k)
        return max(rest * way.f[s] + rounds * turn + around + b + w, rounds * turn + around + (m - rounds * k) * b + w)


def _release(room: float, unit: float, kept: float, b: float, w: float) -> float:
    """The least time after a B until a full rank has room for one more F: none, some further B, or a W."""
    if room >= kept:
        return 0.0
    if kept >= unit:
        return w
    # j B's leave j * kept and free j * unit; the first of them is already counted.
    j = max(2.0, ceil((unit - room) / max(unit - kept, 1e-200) - 1e-9))
    return min(w, (j - 1) * b)
