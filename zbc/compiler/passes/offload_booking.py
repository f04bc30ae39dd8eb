"""What to move from one rank, and when: times at which the rank's stream, which does one thing at a time, has room.

Two ways, of which now one and now the other finds the better list: `one_by_one` gives each choice its times at once,
`all_at_once` chooses as if nothing else was copied, gives all their times, and chooses more until it is enough.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

from zbc.compiler.passes.offload_view import EPS, View

AGAIN = 8  # times that more is chosen


class Booking(NamedTuple):
    """When an activation goes and comes back, as items: it is away for [gone, back)."""

    out: int
    gone: int
    back: int


def one_by_one(view: View, limit: float, lead: float) -> dict[int, Booking]:
    """What to move, by its place among the lives: item by item, where more is held than the limit.

    A copy goes out as early and comes back as late as the rank's stream, which does one thing at a time, has room.
    """
    lives, busy, chosen = view.lives, list[tuple[float, float]](), dict[int, Booking]()
    ready = sorted((bisect_left(view.start, view.end[life.a] + EPS), x) for x, life in enumerate(lives))
    waiting, at, away = list[tuple[int, int]](), 0, 0.0
    returns = [0.0] * (len(view.items) + 1)
    for j, base in enumerate(view.base):
        away -= returns[j]
        while at < len(ready) and ready[at][0] <= j:
            x = ready[at][1]
            heapq.heappush(waiting, (-lives[x].z, x))
            at += 1
        again = []
        while base - away > limit + EPS and waiting:
            entry = heapq.heappop(waiting)
            x, life = entry[1], lives[entry[1]]
            if life.z <= j:
                break
            out = _earliest(view.end[life.a], life.out, busy)
            if view.start[j] < out + life.out - EPS:
                again.append(entry)  # not there in time; later it may be
                continue
            gone = (out, out + life.out)
            insort(busy, gone)
            back = _latest(view.start[life.z], lead * life.back, busy)
            until = bisect_right(view.issued, back + EPS) - 1
            if until <= j:
                busy.remove(gone)
                continue
            insort(busy, (back, back + lead * life.back))
            first = max(bisect_left(view.start, out + life.out - EPS), life.a + 1)
            chosen[x] = Booking(max(life.a + 1, bisect_left(view.issued, out - EPS)), first, until)
            away += life.units
            returns[until] += life.units
        for entry in again:
            heapq.heappush(waiting, entry)
    return chosen


def all_at_once(view: View, limit: float, lead: float) -> dict[int, Booking]:
    """What to move, by its place among the lives: enough of what comes back last, all of it given times together."""
    chosen = set[int]()
    booked = dict[int, Booking]()
    for _ in range(AGAIN):
        change = [0.0] * (len(view.items) + 1)
        for x, one in booked.items():
            if one.gone < one.back:
                change[one.gone] += view.lives[x].units
                change[one.back] -= view.lives[x].units
        over = [base - limit - away for base, away in zip(view.base, accumulate(change[:-1]), strict=True)]
        if max(over, default=0.0) <= EPS or not _covered(view, over, chosen, lead):
            break
        booked = _packed(view, chosen, lead)
    return booked


def _packed(view: View, chosen: Collection[int], lead: float) -> dict[int, Booking]:
    """Times for the copies of all that is chosen: back as late as can be, then out as soon as can be."""
    lives, busy, begin, found = view.lives, list[tuple[float, float]](), dict[int, float](), dict[int, Booking]()
    for x in sorted(chosen, key=lambda x: (-view.start[lives[x].z], x)):
        length = lead * lives[x].back
        begin[x] = _latest(view.start[lives[x].z], length, busy)
        insort(busy, (begin[x], begin[x] + length))
    for x in sorted(chosen, key=lambda x: (view.end[lives[x].a], x)):
        life = lives[x]
        out = _earliest(view.end[life.a], life.out, busy)
        insort(busy, (out, out + life.out))
        first = max(bisect_left(view.start, out + life.out - EPS), life.a + 1)
        until = bisect_right(view.issued, begin[x] + EPS) - 1
        found[x] = Booking(max(life.a + 1, bisect_left(view.issued, out - EPS)), first, until)
    return found


def _covered(view: View, over: Sequence[float], chosen: set[int], lead: float) -> bool:
    """Choose more until nothing is `over`, were copies alone on the stream; False where none could be added."""
    alone = dict[int, int]()
    ready = list[tuple[int, int]]()
    for x, life in enumerate(view.lives):
        first = max(bisect_left(view.start, view.end[life.a] + life.out - EPS), life.a + 1)
        until = bisect_right(view.issued, view.start[life.z] - lead * life.back + EPS) - 1
        if x not in chosen and first < until:
            alone[x] = until
            ready.append((first, x))
    ready.sort()
    waiting, at, away, before = list[tuple[int, int]](), 0, 0.0, len(chosen)
    returns = [0.0] * (len(over) + 1)
    for j, above in enumerate(over):
        away -= returns[j]
        while at < len(ready) and ready[at][0] <= j:
            heapq.heappush(waiting, (-alone[ready[at][1]], ready[at][1]))
            at += 1
        while above - away > EPS and waiting and -waiting[0][0] > j:
            until, x = heapq.heappop(waiting)
            chosen.add(x)
            away += view.lives[x].units
            returns[-until] += view.lives[x].units
    return len(chosen) > before


def _earliest(begin: float, length: float, busy: Sequence[tuple[float, float]]) -> float:
    """The first time from `begin` on with room for so long; `busy` is sorted and without overlaps."""
    j = max(0, bisect_left(busy, (begin, float("-inf"))) - 1)
    while j < len(busy) and busy[j][0] < begin + length - EPS:
        begin = max(begin, busy[j][1])
        j += 1
    return begin


def _latest(end: float, length: float, busy: Sequence[tuple[float, float]]) -> float:
    """The last time at which something so long can begin and be over by `end`."""
    j = bisect_left(busy, (end, float("-inf"))) - 1
    while j >= 0 and busy[j][1] > end - length + EPS:
        end = min(end, busy[j][0])
        j -= 1
    return end - length
