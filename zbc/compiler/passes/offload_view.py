"""One rank as the offload pass sees it: its items in order, the memory of each, and activations that can be offloaded.

An item is a compute op, or the two of a group; copies can be inserted before it. Times are ms, memory is activation
units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.sim.simulate import Timeline
from zbc.ir import Key, Kind, Op, Program

EPS = 1e-7  # ms, and units


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
    steps: list[list[int]]  # per item the steps of its ops
    lives: list[Life]
    change: list[list[tuple[Op, float]]]  # per item the units that each of its ops adds
    rises: list[float]  # per item the most by which its ops raise the memory held
    base: list[float] = field(default_factory=list)  # units held while an item runs, without copies
    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    issued: list[float] = field(default_factory=list)  # start of the copies before an item

    @classmethod
    def of(cls, program: Program, rank: int, costs: Costs, stages: frozenset[int], first: int = 0) -> View:
        """`stages` may be moved, except forwards before step `first`."""
        items, steps = _items(program.ranks[rank])
        change = [[(op, costs.held(op)) for op in item.ops] for item in items]
        ends = {op.key: j for j, item in enumerate(items) for op in item.ops if op.kind in (Kind.B, Kind.BW)}
        lives = []
        for j, item in enumerate(items):
            for op in item.ops:
                if op.kind is Kind.F and op.stage in stages and item.at >= first and ends[op.key] > j + 1:
                    move = op._replace(kind=Kind.RELOAD)
                    out = costs.duration(op._replace(kind=Kind.OFFLOAD))
                    units = costs.held(move)
                    if units > EPS:
                        lives.append(Life(op.key, j, ends[op.key], units, out, costs.duration(move)))
        view = cls(rank, items, steps, lives, change, [rise(changes) for changes in change])
        now = 0.0
        for changes, extra in zip(change, view.rises, strict=True):
            view.base.append(now + extra)
            now += sum(units for _, units in changes)
        return view

    def set(self, timeline: Timeline) -> None:
        """Reads the times of its items."""
        first = timeline.graph.first[self.rank]
        of = _steps_after(timeline, first, len(self.steps), self.rank)
        self.start = [min(timeline.start[i] for i in nodes) for nodes in of]
        self.end = [max(timeline.end[i] for i in nodes) for nodes in of]
        self.issued = [0.0, *self.end[:-1]]

    @property
    def floor(self) -> float:
        """The least limit: an op's own activation, inputs left for W by earlier backwards, and immovable ones."""
        movable, fixed, most = {life.key: life.units for life in self.lives}, 0.0, 0.0
        for changes, extra in zip(self.change, self.rises, strict=True):
            own = sum(movable.get(op.key, 0.0) for op, _ in changes if op.kind in (Kind.B, Kind.BW))
            most = max(most, fixed + own + extra)
            for op, units in changes:
                fixed += units
                if op.key in movable and op.kind is Kind.F:
                    fixed -= movable[op.key]
                elif op.key in movable and op.kind in (Kind.B, Kind.BW):
                    fixed += movable[op.key]
        return most


def rise(changes: Sequence[tuple[Op, float]]) -> float:
    """The most by which the ops of an item raise the memory held."""
    return max(0.0, *accumulate(units for _, units in changes))


def _items(ops: Sequence[Op]) -> tuple[list[Item], list[list[int]]]:
    items, steps, skip = list[Item](), list[list[int]](), 0
    for i, op in enumerate(ops):
        if skip:
            skip -= 1
        elif op.kind is Kind.OVERLAP:
            items.append(Item(i, tuple(ops[i + 1 : i + 3])))
            steps.append([i + 1, i + 2])
            skip = 2
        elif op.kind.computes:
            items.append(Item(i, (op,)))
            steps.append([i])
    return items, steps


def _steps_after(timeline: Timeline, first: int, count: int, rank: int) -> list[list[int]]:
    """The nodes of the items of a rank, for any copies between them."""
    steps = list[list[int]]()
    ops, grouped = timeline.graph.ops, 0
    for i in timeline.graph.mine(rank):
        if ops[i].kind is Kind.OVERLAP:
            steps.append([])
            grouped = 2
        elif ops[i].kind.computes:
            if grouped:
                steps[-1].append(i)
                grouped -= 1
            else:
                steps.append([i])
    assert len(steps) == count
    return steps
