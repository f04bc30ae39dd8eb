"""One rank as the offload pass sees it: its items in order, the memory of each, and activations that can be offloaded.

An item is a compute op, or the two of a group; copies can be inserted before it. Times are ms, memory is activation
units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from zbc.compiler.cost.cost import CacheKey, Costs
from zbc.compiler.sim.simulate import Timeline
from zbc.ir import Key, Kind, Op, Program

EPS = 1e-7  # ms, and units
_BACKWARD = frozenset({Kind.B, Kind.BW})
Spans = tuple[list[float], list[float]]  # ms when each item of a rank starts, and ends


class Life(NamedTuple):
    """The movable part of the activations from an F to its backward."""

    key: Key
    a: int  # the item of its F
    z: int  # the item of its B or BW
    units: float
    out: float  # ms of the copy to the host
    back: float  # ms of the copy back


class Item(NamedTuple):
    """Ops without insertions between them."""

    at: int  # the step of its first op, or of the mark before it
    ops: tuple[Op, ...]


@dataclass
class View:
    """A rank's items with their changes; `start`, `end` and `issued` are from a timeline."""

    rank: int
    items: list[Item]
    lives: list[Life]
    change: list[list[tuple[Op, float]]]  # per item the units that each of its ops adds
    rises: list[float]  # per item the most by which its ops raise the memory held
    base: list[float] = field(default_factory=list)  # units held while an item runs, without copies
    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    issued: list[float] = field(default_factory=list)  # start of the copies before an item

    @classmethod
    def of(cls, program: Program, rank: int, costs: Costs, stages: frozenset[int]) -> View:
        """`stages` may be moved."""
        items, held = _items(program.ranks[rank]), dict[CacheKey, float]()
        ends = {op[1:5]: j for j, item in enumerate(items) for op in item.ops if op[0] in _BACKWARD}
        moved = dict[tuple[CacheKey, int], tuple[float, float, float]]()
        view = cls(rank, items, [], [], [])
        now = 0.0
        for j, item in enumerate(items):
            changes = list[tuple[Op, float]]()
            for op in item.ops:
                key = costs.key(op)
                if key not in held:
                    held[key] = costs.held(op)
                changes.append((op, held[key]))
                if op[0] is Kind.F and op[1] in stages and ends[op[1:5]] > j + 1:
                    if (key, op[3]) not in moved:
                        out, back = op._replace(kind=Kind.OFFLOAD), op._replace(kind=Kind.RELOAD)
                        moved[key, op[3]] = costs.held(back), costs.duration(out), costs.duration(back)
                    if moved[key, op[3]][0] > EPS:
                        view.lives.append(Life(op.key, j, ends[op[1:5]], *moved[key, op[3]]))
            view.change.append(changes)
            view.rises.append(rise(changes))
            view.base.append(now + view.rises[j])
            now += sum(units for _, units in changes)
        return view

    def spans(self, timeline: Timeline) -> Spans:
        """The times of its items, by a timeline with any copies between them."""
        nodes, start, end = timeline.graph.computing[self.rank], timeline.start, timeline.end
        if len(nodes) == len(self.items):
            return [start[i] for i in nodes], [end[i] for i in nodes]
        left = iter(nodes)
        groups = [[next(left) for _ in item.ops] for item in self.items]
        return [min(start[i] for i in group) for group in groups], [max(end[i] for i in group) for group in groups]

    def set(self, spans: Spans) -> None:
        """Takes these times of its items."""
        self.start, self.end = spans
        self.issued = [0.0, *self.end[:-1]]

    @cached_property
    def floor(self) -> float:
        """The least limit: an op's own activation, inputs left for W by earlier backwards, and immovable ones."""
        movable = {tuple(life.key): life.units for life in self.lives}
        fixed = most = 0.0
        for changes, extra in zip(self.change, self.rises, strict=True):
            own = sum(movable.get(op[1:5], 0.0) for op, _ in changes if op[0] in _BACKWARD)
            most = max(most, fixed + own + extra)
            for op, units in changes:
                fixed += units
                if op[0] is Kind.F:
                    fixed -= movable.get(op[1:5], 0.0)
                elif op[0] in _BACKWARD:
                    fixed += movable.get(op[1:5], 0.0)
        return most


def rise(changes: Sequence[tuple[Op, float]]) -> float:
    """The most by which the ops of an item raise the memory held."""
    return max(0.0, *accumulate(units for _, units in changes))


def _items(ops: Sequence[Op]) -> list[Item]:
    items, skip = list[Item](), 0
    for i, op in enumerate(ops):
        if skip:
            skip -= 1
        elif op[0] is Kind.OVERLAP:
            items.append(Item(i, tuple(ops[i + 1 : i + 3])))
            skip = 2
        elif op[0].computes:
            items.append(Item(i, (op,)))
    return items
