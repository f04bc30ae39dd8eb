"""The list of a rank with offload copies: as booked if memory allows, else with waits."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter

from zbc.compiler.passes.offload_booking import Booking
from zbc.compiler.passes.offload_view import EPS, Life, View
from zbc.ir import Key, Kind, Op

_Key = tuple[int, int, int, int]  # a Key, or the same part of an op


def assemble(ops: Sequence[Op], view: View, booked: Mapping[int, Booking], limit: float) -> list[Op]:
    """The ops of a rank with its copies, which keep it within `limit` units."""
    return _List(view, booked, limit).run(ops)


class _List:
    """Walks the items of a rank, tracking resident, offloaded and reloaded activations; `marks[j]` go before item j."""

    def __init__(self, view: View, booked: Mapping[int, Booking], limit: float) -> None:
        self.view, self.limit = view, limit
        self.life: dict[_Key, Life] = {life.key: life for life in view.lives}
        self.booked = {view.lives[x].key: booking for x, booking in booked.items() if booking.gone < booking.back}
        self.release = defaultdict[int, list[Key]](list)
        for key, booking in self.booked.items():
            self.release[booking.gone].append(key)
        self.now = 0.0
        self.here: dict[_Key, Life] = {}
        self.back: set[_Key] = set()
        self.away: list[tuple[int, Key]] = []  # (the item that needs it, key)
        self.marks = defaultdict[int, list[Op]](list)
        self.last = dict[Key, int]()  # the item before its RELOAD
        self.first = dict[Key, int]()  # the item before its RELEASE

    def run(self, ops: Sequence[Op]) -> list[Op]:
        away, most = self.away, self.limit + EPS
        for j, (changes, extra) in enumerate(zip(self.view.change, self.view.rises, strict=True)):
            for key in self.release.get(j, ()):
                if key in self.here:
                    self._let_go(key, j)
            due = away and away[0][0] <= j
            own = [self.life[key] for _, key in away[: bisect_right(away, j, key=itemgetter(0))]] if due else []
            units = sum(life.units for life in own) if due else 0.0
            while self.now + extra + units > most:
                self._make_room(j, [op[1:5] for op, _ in changes])
            for life in own:
                self._fetch(life.key, j)
            if away:
                self._come_back(j, extra)
            for op, change in changes:
                self.now += change
                unit = op[1:5]
                if op[0] is Kind.F:
                    if unit in self.life:
                        self.here[unit] = self.life[unit]
                elif op[0] is Kind.B or op[0] is Kind.BW:
                    self.here.pop(unit, None)
                    self.back.discard(unit)
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

    def _make_room(self, j: int, mine: Sequence[_Key]) -> None:
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
        issue = defaultdict[int, list[Op]](list)
        for key in sorted(self.first, key=lambda key: (self.life[key].a, key)):
            early = self.booked[key].out if key in self.booked else 0
            issue[min(self.first[key], max(self.life[key].a + 1, early))].append(Op(Kind.OFFLOAD, *key))
        written, at = list[Op](), 0
        for j in sorted({*issue, *self.marks}):
            stop = self.view.items[j].at
            written += [*ops[at:stop], *issue.get(j, ()), *self.marks.get(j, ())]
            at = stop
        return [*written, *ops[at:]]
