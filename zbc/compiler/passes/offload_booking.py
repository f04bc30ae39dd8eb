"""Chooses and books offload copies for the ranks of one link: times at which stream and link are free.

A rank runs one copy at a time, or one out and one back (`duplex`); if ranks share a link, it takes one copy out and one
back at a time between them. There are two ways, either of which may find the better list: `one_by_one` books each
choice at once; `all_at_once` chooses as if nothing else was copied, books all together, and chooses more until it is
enough.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from zbc.compiler.passes.offload_view import EPS, View

AGAIN = 8  # rounds of choosing more
Busy = list[tuple[float, float]]  # booked intervals, sorted and without overlaps


class Booking(NamedTuple):
    """The items of an activation's offload and reload: it is away for [gone, back)."""

    out: int
    gone: int
    back: int


Booked = dict[int, Booking]  # of one rank, by the index of the life


class _Room(NamedTuple):
    """The lanes of one rank that a copy takes: its stream, and the link that it may share."""

    out: Sequence[Busy]
    back: Sequence[Busy]


def _rooms(count: int, *, duplex: bool) -> Iterator[_Room]:
    link: list[list[Busy]] = [[[]], [[]]] if count > 1 else [[], []]
    for _ in range(count):
        out: Busy = []
        yield _Room([out, *link[0]], [[] if duplex else out, *link[1]])


def _take(lanes: Sequence[Busy], begin: float, end: float) -> None:
    """Books an interval; adjacent intervals are merged."""
    for busy in lanes:
        j, first, last = bisect_left(busy, (begin, end)), begin, end
        if j < len(busy) and busy[j][0] <= end + EPS:
            last = max(last, busy.pop(j)[1])
        if j and busy[j - 1][1] >= begin - EPS:
            first = busy.pop(j - 1)[0]
            j -= 1
        busy.insert(j, (first, last))


# ---- one by one ------------------------------------------------------------------------------------------------------


def one_by_one(views: Sequence[View], limits: Sequence[float], lead: float, *, duplex: bool) -> list[Booked]:
    """Chooses item by item in time, while the limit is exceeded. A copy goes out as early and comes back as late as
    stream and link have room."""
    rooms = _rooms(len(views), duplex=duplex)
    ranks = [_Chooser(*row, lead) for row in zip(views, limits, rooms, strict=True)]
    if len(ranks) == 1:
        for j in range(len(views[0].items)):
            ranks[0].item(j)
    else:
        items = ((start, n, j) for n, view in enumerate(views) for j, start in enumerate(view.start))
        for _, n, j in sorted(items):
            ranks[n].item(j)
    return [rank.chosen for rank in ranks]


class _Chooser:
    """Chooses for one rank, item by item."""

    def __init__(self, view: View, limit: float, room: _Room, lead: float) -> None:
        self.view, self.limit, self.room, self.lead = view, limit, room, lead
        self.chosen: Booked = {}
        self.ready = sorted((bisect_left(view.start, view.end[life.a] + EPS), x) for x, life in enumerate(view.lives))
        self.waiting, self.late = list[tuple[int, int]](), list[tuple[float, int]]()
        self.at, self.away = 0, 0.0
        self.returns = [0.0] * (len(view.items) + 1)
        self.out = [view.end[life.a] for life in view.lives]  # when a copy can begin: later with every one booked

    def item(self, j: int) -> None:
        """Chooses activations to be away during item j, of those reloaded last."""
        view = self.view
        self.away -= self.returns[j]
        while self.at < len(self.ready) and self.ready[self.at][0] <= j:
            x = self.ready[self.at][1]
            heapq.heappush(self.waiting, (-view.lives[x].z, x))
            self.at += 1
        while self.late and self.late[0][0] <= view.start[j] + EPS:
            x = heapq.heappop(self.late)[1]
            heapq.heappush(self.waiting, (-view.lives[x].z, x))
        while view.base[j] - self.away > self.limit + EPS and self.waiting:
            last, x = heapq.heappop(self.waiting)
            if -last <= j:
                break
            self._book(x, j)

    def _book(self, x: int, j: int) -> None:
        """Books one activation; if its copy out would be too late for item j, it may be in time later: further copies
        only leave less room."""
        view, room, life = self.view, self.room, self.view.lives[x]
        out = self.out[x] = _earliest(self.out[x], life.out, room.out)
        if view.start[j] < out + life.out - EPS:
            heapq.heappush(self.late, (out + life.out, x))
            return
        back = _latest(view.start[life.z], self.lead * life.back, room.back)
        until = bisect_right(view.issued, back + EPS) - 1
        if until <= j:  # also if both would use one stream at once
            return
        _take(room.out, out, out + life.out)
        _take(room.back, back, back + self.lead * life.back)
        first = max(bisect_left(view.start, out + life.out - EPS), life.a + 1)
        self.chosen[x] = Booking(max(life.a + 1, bisect_left(view.issued, out - EPS)), first, until)
        self.away += life.units
        self.returns[until] += life.units


# ---- all at once -----------------------------------------------------------------------------------------------------


def all_at_once(views: Sequence[View], limits: Sequence[float], lead: float, *, duplex: bool) -> list[Booked]:
    """Chooses enough activations of those reloaded last, and books all of them together."""
    chosen, booked = [set[int]() for _ in views], [Booked() for _ in views]
    for _ in range(AGAIN):
        grew = False
        for view, limit, picked, bookings in zip(views, limits, chosen, booked, strict=True):
            change = [0.0] * (len(view.items) + 1)
            for x, booking in bookings.items():
                if booking.gone < booking.back:
                    change[booking.gone] += view.lives[x].units
                    change[booking.back] -= view.lives[x].units
            over = [base - limit - away for base, away in zip(view.base, accumulate(change[:-1]), strict=True)]
            grew |= max(over, default=0.0) > EPS and _covered(view, over, picked, lead)
        if not grew:
            break
        booked = _packed(views, chosen, lead, [*_rooms(len(views), duplex=duplex)])
    return booked


def _packed(
    views: Sequence[View], chosen: Sequence[Collection[int]], lead: float, rooms: Sequence[_Room]
) -> list[Booked]:
    """Books the copies of all choices: back as late as possible, then out as soon as possible."""
    begin, bookings = dict[tuple[int, int], float](), [Booked() for _ in views]
    every = [(n, x) for n, picked in enumerate(chosen) for x in picked]
    for n, x in sorted(every, key=lambda pair: (-views[pair[0]].start[views[pair[0]].lives[pair[1]].z], pair)):
        life, room = views[n].lives[x], rooms[n]
        length = lead * life.back
        begin[n, x] = _latest(views[n].start[life.z], length, room.back)
        _take(room.back, begin[n, x], begin[n, x] + length)
    for n, x in sorted(every, key=lambda pair: (views[pair[0]].end[views[pair[0]].lives[pair[1]].a], pair)):
        view, life, room = views[n], views[n].lives[x], rooms[n]
        out = _earliest(view.end[life.a], life.out, room.out)
        _take(room.out, out, out + life.out)
        first = max(bisect_left(view.start, out + life.out - EPS), life.a + 1)
        until = bisect_right(view.issued, begin[n, x] + EPS) - 1
        bookings[n][x] = Booking(max(life.a + 1, bisect_left(view.issued, out - EPS)), first, until)
    return bookings


def _covered(view: View, over: Sequence[float], chosen: set[int], lead: float) -> bool:
    """Chooses more until nothing is `over`, as if copies were alone on the stream; False if none could be added."""
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


# ---- room on the lanes -----------------------------------------------------------------------------------------------


def _earliest(begin: float, length: float, lanes: Sequence[Busy]) -> float:
    """The first time from `begin` on at which all lanes are free for `length` ms."""
    start, seen = begin, None
    while start != seen:
        seen = start
        for busy in lanes:
            for j in range(max(0, bisect_left(busy, (start, float("-inf"))) - 1), len(busy)):
                if busy[j][0] >= start + length - EPS:
                    break
                start = max(start, busy[j][1])
        if len(lanes) == 1:
            break
    return start


def _latest(end: float, length: float, lanes: Sequence[Busy]) -> float:
    """The last time at which `length` ms can begin and end by `end`, on all lanes."""
    seen = None
    while end != seen:
        seen = end
        for busy in lanes:
            j = bisect_left(busy, (end, float("-inf"))) - 1
            while j >= 0 and busy[j][1] > end - length + EPS:
                end = min(end, busy[j][0])
                j -= 1
        if len(lanes) == 1:
            break
    return end - length
