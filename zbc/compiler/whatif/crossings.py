"""The values of a number of the world (link speed, latency, the time of a transfer) at which schedules change places.

A comparison knows the order of its rows at the swept values. If two of them are in opposite orders at two neighbouring
values, the value between at which they are level is found by planning both again and again, at the middle of the
remaining interval. If they are in the same order at both, they may have swapped twice: if the slower one could be ahead
in between, by its time at its better end, both are planned in the middle as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from zbc.compiler.whatif.compare import WORLD, Candidate, ComparedPlan, Planner, Setting

Pair = tuple[str, tuple[Setting, ...], frozenset[Candidate]]  # (key, world, candidates)

SAME = 1e-9  # times this close, relatively, are level
CLOSE = 2e-3  # relative width at which an interval counts as a point
CUTS = 24


@dataclass(frozen=True, slots=True)
class Crossing:
    """As `key` grows beyond `at`, `after` overtakes `before`."""

    key: str
    at: float
    before: Candidate
    after: Candidate
    ms: float  # per sequence, of both at this value
    world: tuple[Setting, ...]  # other swept settings
    leading: bool  # whether nothing is faster at this value

    @property
    def pair(self) -> Pair:
        return self.key, self.world, frozenset((self.before, self.after))


def sweeps(rows: Sequence[ComparedPlan], plan: Planner) -> Iterator[Sweep]:
    """Yields every number of the world that was swept over two values and more, in each world of the others."""
    for key in dict.fromkeys(key for row in rows for key, _ in row.settings if key.startswith(WORLD)):
        worlds: dict[tuple[Setting, ...], list[ComparedPlan]] = {}
        for row in rows:
            worlds.setdefault(tuple(setting for setting in row.world if setting[0] != key), []).append(row)
        swept = (Sweep(key, world, inside, plan) for world, inside in worlds.items())
        yield from (sweep for sweep in swept if len(sweep.values) > 1)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class Sweep:
    """One key in one world: times per sequence at any value of it, planned if no row has them."""

    def __init__(self, key: str, world: tuple[Setting, ...], rows: Sequence[ComparedPlan], plan: Planner) -> None:
        self.key, self.world, self._plan = key, world, plan
        self._order = [key for key, _ in rows[0].settings]
        self.candidates = [*dict.fromkeys((row.schedule, row.choice) for row in rows)]
        self._known: dict[tuple[Candidate, float], float] = {}
        for row in rows:
            if (value := _number(dict(row.settings)[key])) is not None:
                self._known[(row.schedule, row.choice), value] = _ms(row)
        self.values = sorted({value for _, value in self._known})  # the swept ones

    def ms(self, candidate: Candidate, value: float) -> float:
        """ms per sequence; infinite if there is no plan."""
        place = candidate, value
        if place not in self._known:
            schedule, choice = candidate
            settings = {**dict(self.world), **dict(choice), self.key: f"{value:.12g}"}
            self._known[place] = _ms(self._plan(schedule, tuple((key, settings[key]) for key in self._order)))
        return self._known[place]

    def ahead(self, one: Candidate, other: Candidate, value: float) -> int:
        """1 if `one` is faster than `other`, -1 if slower, 0 if they are level or one has no plan."""
        a, b = self.ms(one, value), self.ms(other, value)
        if math.isinf(a) or math.isinf(b) or abs(a - b) <= SAME * max(a, b):
            return 0
        return 1 if a < b else -1

    def first(self, among: Sequence[Candidate], value: float) -> Candidate:
        """The fastest at this value. Candidates slower at both sides than another one is here are not planned."""
        best, least = among[0], math.inf
        for candidate in sorted(among, key=lambda candidate: self._least(candidate, value)):
            if self._least(candidate, value) < least and (ms := self.ms(candidate, value)) < least:
                best, least = candidate, ms
        return best

    def _least(self, candidate: Candidate, value: float) -> float:
        """The time at the better of the two swept values around: times are monotonic in the key."""
        if (candidate, value) in self._known:
            return self._known[candidate, value]
        low = max(point for point in self.values if point <= value)
        high = min(point for point in self.values if point >= value)
        return min(self.ms(candidate, low), self.ms(candidate, high))

    def hidden(self, behind: Candidate, leader: Candidate, low: float, high: float) -> float | None:
        """A value in between at which a candidate that is slower at both ends is ahead, as far as the middle can tell.
        Nothing is planned if that is impossible: times grow with the swept number, or shrink with it."""
        least = min(self.ms(behind, low), self.ms(behind, high))
        if high - low <= CLOSE * abs(high) or not least < max(self.ms(leader, low), self.ms(leader, high)):
            return None
        middle = _middle(low, high)
        if not least < self.ms(leader, middle) or self.ahead(behind, leader, middle) <= 0:
            return None
        return middle

    def level(self, before: Candidate, after: Candidate, low: float, high: float, *, leading: bool) -> Crossing:
        """The value at which `after`, slower at `low`, overtakes `before`, slower at `high`. Intervals are halved by
        ratio while they are wide, then cut where a straight line between the ends is level (the times of one order are
        piecewise linear), and in the middle if that did not help."""
        ends = [self._lead(before, after, value) for value in (low, high)]
        halve = False
        for _ in range(CUTS):
            width = high - low
            if width <= CLOSE * abs(high) or not all(map(math.isfinite, ends)):
                break
            if halve or (low > 0 and high > 2 * low):
                middle = _middle(low, high)
            else:
                middle = low + width * ends[0] / (ends[0] - ends[1])
            lead = self._lead(before, after, middle)
            if abs(lead) <= SAME * self.ms(before, middle):
                low, high, ends = middle, middle, [lead, lead]
                break
            side = 0 if lead > 0 else 1
            low, high = (middle, high) if lead > 0 else (low, middle)
            ends[side] = lead
            halve = high - low > width / 2
        share = ends[0] / (ends[0] - ends[1]) if all(map(math.isfinite, ends)) and ends[0] > ends[1] else 0.0
        at = low + share * (high - low)
        ms = self.ms(before, low)
        if share > 0:
            ms += share * (self.ms(before, high) - ms)
        return Crossing(self.key, at, before, after, ms, self.world, leading)

    def _lead(self, before: Candidate, after: Candidate, value: float) -> float:
        """ms by which `before` is ahead; not a number if neither has a plan."""
        return self.ms(after, value) - self.ms(before, value)


def _middle(low: float, high: float) -> float:
    """The middle, by ratio if the interval is wide."""
    return math.sqrt(low * high) if low > 0 and high > 2 * low else (low + high) / 2


def _ms(one: ComparedPlan) -> float:
    return one.sequence_ms if one.report is not None else math.inf


def crossings(plan: Planner, rows: Sequence[ComparedPlan], *, every: bool = False) -> list[Crossing]:
    """Values where the fastest changes, by key, world and value; with `every`, also where any two swap."""
    swaps = []
    for sweep in sweeps(rows, plan):
        leaders = [*_changes(sweep, sweep.candidates, sweep.values)]
        pairs: list[Crossing] = []
        for pair in combinations(sweep.candidates, 2) if every else ():
            apart = [value for value in sweep.values if sweep.ahead(*pair, value)]  # both planned, and not level
            pairs += _changes(sweep, pair, apart, leading=False)
        swaps += sorted(leaders, key=lambda cross: cross.at)
        swaps += sorted((cross for cross in pairs if not _among(cross, leaders)), key=lambda cross: cross.at)
    return swaps


def _changes(
    sweep: Sweep, among: Sequence[Candidate], values: Sequence[float], *, leading: bool = True
) -> Iterator[Crossing]:
    """Yields crossings of the fastest candidate between neighbouring values; a third one may be fastest for a while."""
    for low, high in pairwise(values):
        before, after = sweep.first(among, low), sweep.first(among, high)
        if sweep.ahead(before, after, low) <= 0 or sweep.ahead(after, before, high) <= 0:
            # Another may overtake the fastest one at both values, and fall back again.
            hidden = (sweep.hidden(rival, before, low, high) for rival in among if rival != before)
            middle = next((value for value in hidden if value is not None), None)
            if middle is not None:
                yield from _changes(sweep, among, (low, middle, high), leading=leading)
            continue
        cross = sweep.level(before, after, low, high, leading=leading)
        best = sweep.first(among, cross.at)
        if sweep.ms(best, cross.at) < cross.ms * (1 - CLOSE / 10) and high - low > 4 * CLOSE * abs(high):
            yield from _changes(sweep, among, (low, cross.at, high), leading=leading)
        else:
            yield cross


def _among(one: Crossing, leaders: Sequence[Crossing]) -> bool:
    return any(
        {one.before, one.after} == {lead.before, lead.after} and abs(one.at - lead.at) <= 2 * CLOSE * abs(lead.at)
        for lead in leaders
    )


def changed(rows: Sequence[ComparedPlan]) -> set[Pair]:
    """The pairs in opposite orders at two of the swept values; nothing is planned."""
    pairs = set()
    for sweep in sweeps(rows, lambda schedule, settings: rows[0]):
        for left, right in combinations(sweep.candidates, 2):
            signs = [sign for value in sweep.values if (sign := sweep.ahead(left, right, value))]
            if any(a != b for a, b in pairwise(signs)):
                pairs.add((sweep.key, sweep.world, frozenset((left, right))))
    return pairs
