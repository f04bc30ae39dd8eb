"""The list of a rank with offload copies: as booked if memory allows, else with waits."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from operator import itemgetter

from zbc.compiler.passes.offload_booking import Booking
from zbc.compiler.passes.offload_view import EPS, Life, View
from zbc.ir import Key, Kind, Op


def assemble(ops: Sequence[Op], view: View, booked: Mapping[int, Booking], limit: float) -> list[Op]:
    """The ops of a rank with its copies, which keep it within `limit` units."""
    return _List(view, booked, limit).run(ops)


class _List:
    """Walks the items of a rank, tracking resident, offloaded and reloaded activations; `marks[j]` go before item j."""

    def __init__(self, view: View, booked: Mapping[int, Booking], limit: float) -> None:
        self.view, self.limit = view, limit
        self.life = {life.key: life for life in view.lives}
        self.booked = {view.lives[x].key: booking for x, booking in booked.items() if booking.gone < booking.back}
        self.release = [list[Key]() for _ in view.items]
        for key, booking in self.booked.items():
            self.release[booking.gone].append(key)
        self.now = 0.0
        self.here: dict[Key, Life] = {}
        self.back: set[Key] = set()
        self.away: list[tuple[int, Key]] = []  # (the item that needs it, key)
        self.marks = [list[Op]() for _ in view.items]
        self.last = dict[Key, int]()  # the item before its RELOAD
        self.first = dict[Key, int]()  # the item before its RELEASE

    def run(self, ops: Sequence[Op]) -> list[Op]:
        for j, changes in enumerate(self.view.change):
            for key in self.release[j]:
                if key in self.here:
                    self._let_go(key, j)
            extra = self.view.rises[j]
            own = [self.life[key] for _, key in self.away[: bisect_right(self.away, j, key=itemgetter(0))]]
            while self.now + extra + sum(life.units for life in own) > self.limit + EPS:
                self._make_room(j, [op.key for op, _ in changes])
            for life in own:
                self._fetch(life.key, j)
            self._come_back(j, extra)
            for op, units in changes:
                self.now += units
                if op.kind is Kind.F:
                    if op.key in self.life:
                        self.here[op.key] = self.life[op.key]
                elif op.kind in (Kind.B, Kind.BW):
                    self.here.pop(op.key, None)
                    self.back.discard(op.key)
        return self._written(ops)

    def _let_go(self, key: Key, j: int) -> None:
        self.marks[j].append(Op(Kind.RELEASE, *key))
        life = self.here.pop(key)
        self.now -= life.units
        self.first[key] = j
        insort(self.away, (life.z, key))

    def _fetch(self, key: Key, j: int) -> None:
        self.marks[j].append(Op(Kind.RELOAD, *key))
        life = self.life[key]
        self.away.remove((life.z, key))
        self.now += life.units
        self.back.add(key)
        self.last[key] = j

    def _make_room(self, j: int, mine: Sequence[Key]) -> None:
        """Releases the activation needed last, preferably a booked one; else cancels the latest RELOAD."""
        there = [life for key, life in self.here.items() if key not in mine]
        if there:
            chosen = [life for life in there if life.key in self.booked] or there
            self._let_go(max(chosen, key=lambda life: (life.z, life.key)).key, j)
            return
        late = max((self.life[key] for key in self.back if key not in mine), key=lambda life: (life.z, life.key))
        self.marks[self.last.pop(late.key)].remove(Op(Kind.RELOAD, *late.key))
        self.back.discard(late.key)
        self.now -= late.units
        insort(self.away, (late.z, late.key))

    def _come_back(self, j: int, extra: float) -> None:
        """Starts due reloads, while there is room, in the order of need."""
        while self.away:
            z, key = self.away[0]
            due = self.booked[key].back if key in self.booked else 0
            if due > j or z <= j or self.now + extra + self.life[key].units > self.limit + EPS:
                return
            self._fetch(key, j)

    def _written(self, ops: Sequence[Op]) -> list[Op]:
        issue = [list[Op]() for _ in self.view.items]
        for key in sorted(self.first, key=lambda key: (self.life[key].a, key)):
            early = self.booked[key].out if key in self.booked else 0
            issue[min(self.first[key], max(self.life[key].a + 1, early))].append(Op(Kind.OFFLOAD, *key))
        written, at = list[Op](), 0
        for item, out, marks in zip(self.view.items, issue, self.marks, strict=True):
            written += [*ops[at : item.at], *out, *marks]
            at = item.at
        return [*written, *ops[at:]]
