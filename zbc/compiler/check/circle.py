"""The shortest circle of waits among the ops that never run.

What counts is which rank waits for which. A *wait* leads from a place on one rank to a place on another; having come to
a place on a rank, one can go on by any wait that stands there or before, so of all places reached on a rank only the
farthest matters. That makes the search a breadth-first walk over ranks, each step one look-up in running maxima, and a
shortest circle passes each rank at most once.

The collectives of a rank, which it starts and does not wait for, queue on a *line* of their own beside it: op `i` in
the queue is place `size + i`, and only what stands before it in the queue holds it up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zbc.compiler.check.numbered import Numbered
from zbc.compiler.check.waits import Waits

EFFORT = 1_000_000  # look-ups in search of the shortest circle before a circle near where the ranks stop will do


class Wait(NamedTuple):
    """Op `op` waits for op `target`. Places are doubled op ids, one more where an op ends instead of starts."""

    op: int
    place: int
    target: int
    there: int


class Line(NamedTuple):
    """One wait of a circle; `behind` is the op that holds up the target's rank, if not the target itself."""

    op: int
    target: int
    behind: int | None

    def text(self, n: Numbered) -> str:
        order = "" if self.behind is None else f", behind step {n.place(self.behind)[1]}"
        return f"{n.text(self.op)}  waits for  {n.text(self.target)}{order}"


def shortest_circle(waits: Waits, done: bytearray) -> list[Line]:
    """The lines of a circle with the fewest waits, each held up by the next and the last by the first; [] if none.

    Among hundreds of thousands of stuck ops a circle of more than a few waits may not be the shortest.
    """
    size, ranks = waits.n.size, waits.n.program.ranks
    rank_of = [rank for rank, ops in enumerate(ranks) for _ in ops]
    rank_of += [len(ranks) + rank for rank in rank_of]
    found = Roads(rank_of, list(_waits(waits, done))).shortest()
    lines = []
    for wait, following in zip(found, [*found[1:], *found[:1]], strict=True):
        op, target, behind = wait.op % size, wait.target % size, following.op % size
        lines.append(Line(op, target, behind if behind != target else None))
    return lines


# ---- gathering -----------------------------------------------------------------------------------------------


def _waits(waits: Waits, done: bytearray) -> Iterator[Wait]:
    """Every wait of a stuck op for another op, by place.

    An op that blocks waits for its event at its end; that it has started is all the others of that event wait for.
    """
    size, met = waits.n.size, waits.met
    ends: dict[int, list[int]] = {}  # event -> the ops of it that have not run
    for i, event in enumerate(waits.event):
        if event >= 0 and not done[i]:
            ends.setdefault(event, []).append(i)
    for i in range(size):
        if not done[i]:
            for node in waits.needs(i):
                if node < size and not done[node]:
                    yield Wait(i, 2 * i, node, 2 * node + 1)
                elif size <= node < 2 * size:
                    yield from _for_event(i, 2 * i, node - size, ends, met, size)
            if waits.blocks[i]:
                yield from _for_event(i, 2 * i + 1, waits.event[i], ends, met, size)
        if waits.event[i] in met and not done[size + waits.event[i]]:
            yield from _for_event(size + i, 2 * i + 1, waits.event[i], ends, met, size)


def _for_event(
    op: int, place: int, event: int, ends: dict[int, list[int]], met: dict[int, list[int]], size: int
) -> Iterator[Wait]:
    """`op` waits for all that take part in an event: to come to it, and as a collective to be the next in the queue."""
    yield from (Wait(op, place, j, 2 * j) for j in ends.get(event, ()) if j != op % size)
    yield from (Wait(op, place, size + j, 2 * j) for j in met.get(event, ()) if size + j != op)


# ---- searching -----------------------------------------------------------------------------------------------


class _Road:
    """The waits from one rank to another: up to each place, the one that leads farthest."""

    __slots__ = ("farthest", "places")

    def __init__(self) -> None:
        self.places: list[int] = []
        self.farthest: list[Wait] = []

    def add(self, wait: Wait) -> None:
        """Add a wait that stands behind those there are."""
        best = self.farthest[-1] if self.farthest and self.farthest[-1].there >= wait.there else wait
        self.places.append(wait.place)
        self.farthest.append(best)

    def up_to(self, place: int) -> Wait | None:
        k = bisect_right(self.places, place)
        return self.farthest[k - 1] if k else None


class Roads:
    """The waits between ranks, sorted for the search; `rank_of` is the rank of each op, `waits` are sorted by place."""

    def __init__(self, rank_of: Sequence[int], waits: Sequence[Wait]) -> None:
        self.rank_of, self.waits = rank_of, waits
        self.from_rank: dict[int, dict[int, _Road]] = {}
        for wait in waits:
            roads = self.from_rank.setdefault(rank_of[wait.op], {})
            roads.setdefault(rank_of[wait.target], _Road()).add(wait)
        self.effort = 0

    def shortest(self) -> list[Wait]:
        """A circle with the fewest waits, or [] if there is none."""
        for limit in range(1, len(self.from_rank) + 1):
            for wait in self.waits:
                circle = self._through(wait, limit)
                if circle:
                    return circle
                if self.effort > EFFORT:
                    return self._near_the_stops()
        return []

    def _near_the_stops(self) -> list[Wait]:
        """The shortest circle through the first wait of a rank. Unless something never comes, each rank stops for what
        another has still to do, so there is one."""
        first: dict[int, Wait] = {}
        for wait in self.waits:
            first.setdefault(self.rank_of[wait.op], wait)
        circles = [self._through(wait, len(self.from_rank)) for wait in first.values()]
        return min(filter(None, circles), key=len, default=[])

    def _through(self, start: Wait, limit: int) -> list[Wait]:
        """A circle of at most `limit` waits that begins with `start`, or []."""
        home, rank = self.rank_of[start.op], self.rank_of[start.target]
        reached = {rank: start.there}
        trail: dict[Wait, Wait] = {}  # wait -> the one before it
        heads = {rank: start}
        for _ in range(limit):
            end = heads.get(home)
            if end is not None and end.there >= start.place:
                circle = [end]
                while circle[-1] is not start:
                    circle.append(trail[circle[-1]])
                return circle[::-1]
            heads = self._go_on(heads, reached, trail)
        return []

    def _go_on(self, heads: dict[int, Wait], reached: dict[int, int], trail: dict[Wait, Wait]) -> dict[int, Wait]:
        """One wait on from each head: where that leads farther on a rank than ever before."""
        found: dict[int, Wait] = {}
        for rank, head in heads.items():
            for other, road in self.from_rank.get(rank, {}).items():
                self.effort += 1
                wait = road.up_to(head.there)
                if wait is not None and wait.there > reached.get(other, -1):
                    reached[other] = wait.there
                    found[other] = wait
                    trail[wait] = head
        return found
