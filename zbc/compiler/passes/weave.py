"""Inserts the ops of vocabulary shards into any order of F, B and W of one pipe.

First each order is widened: each B comes `sums` units later, so that all ranks can do their part for the last stage in
between. Between the last F and the first B of a unit any number of whole periods of a schedule fits; each keeps one
unit more in flight and costs no bubble. Then the widened order is played at the costs of the ops: S as soon as
possible; T if more than `late` units would wait for theirs, or if the rank would wait; W if the rank would wait or its
memory is full. Collectives are listed in the order in which they then happen, the same on all ranks. A rank starts one
right after its own part, never later than it happens, so the common order costs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import accumulate
from typing import ClassVar

from zbc.compiler.blocks import SLOTS, Offsets, later, walking
from zbc.compiler.cost.cost import Costs
from zbc.compiler.sim.context import Context
from zbc.ir import Kind, Op, Placement, Program, nth

SAME = 1e-9  # ms
FEW = 4  # building blocks played in full
AHEAD = 2  # units looked up ahead of their F of the first stage
Unit = tuple[int, int]  # microbatch, slice


@dataclass(frozen=True, slots=True)
class Weave:
    """`sums` per unit, 1 or 2; up to `late` units keep their logits waiting for T; `quick`: only the given order.
    `known`: the best blocks of a V placement by costs, `late` and room, which hardly differ between orders."""

    name: ClassVar[str] = "weave"
    sums: int
    late: int = 1
    quick: bool = False
    known: dict[tuple[object, ...], tuple[Costs, list[Offsets]]] = field(default_factory=dict, compare=False)

    def run(self, program: Program, context: Context) -> Program:
        shared = replace(program, vocabulary=self.sums)
        room = [in_flight(ops) + self.sums * len(program.placement.stages_of(r)) for r, ops in enumerate(program.ranks)]
        blocks = [] if self.quick else self._blocks(shared, context, room)
        orders = [*_moved(context, self.sums), *(_block(shared, offsets) for offsets in blocks)]
        played = [_Play(shared, context.costs, self.late, order, room) for order in orders]
        best = min((run for run in played if run.whole), key=lambda run: (run.over_room, round(run.end, 9), run.most))
        return shared.with_ranks(best.lists(), by=self.name)

    def _blocks(self, program: Program, context: Context, room: Sequence[int]) -> list[Offsets]:
        split = any(kind.splits for kind in program.kinds)
        if not split or program.placement != Placement.vshape(program.placement.ranks):
            return []
        key = id(context.costs), program.microbatches, program.slices, self.late, *room
        if key not in self.known:
            self.known[key] = context.costs, [*_best_blocks(program, context.costs, self.late, room)]
        return self.known[key][1]


Orders = list[list[Op]]  # F and backwards of each rank


def _moved(context: Context, sums: int) -> Iterator[Orders]:
    """Yields orders with each backward moved by whole periods: by time, which keeps simultaneous ops together, and by
    the number of forwards."""
    program, timeline = context.program, context.timeline
    period = max(timeline.busy(rank) for rank in range(timeline.ranks)) / (program.microbatches * program.slices)
    nodes = [timeline.ops(rank) for rank in range(timeline.ranks)]
    ranks = [[timeline.graph.ops[i] for i in mine] for mine in nodes]
    begins = ([timeline.start[i] for i in mine] for mine in nodes)
    yield [_late(ops, at, sums * period - SAME) for ops, at in zip(ranks, begins, strict=True)]
    stages = [len(program.placement.stages_of(rank)) for rank in range(timeline.ranks)]
    counts = (accumulate(op.kind is Kind.F for op in ops) for ops in ranks)
    yield [_late(ops, at, sums * v + 0.5) for ops, at, v in zip(ranks, counts, stages, strict=True)]


def _late(ops: Sequence[Op], places: Iterable[float], more: float) -> list[Op]:
    """F and backwards of a rank in the order of their places, of which backwards have `more`; W ops are left out."""
    kept = [(at + more * op.kind.is_backward, k) for k, (op, at) in enumerate(zip(ops, places, strict=True))]
    return [ops[k] for _, k in sorted(kept) if ops[k].kind is not Kind.W]


def _best_blocks(program: Program, costs: Costs, late: int, room: Sequence[int]) -> Iterator[Offsets]:
    """Yields the building blocks of a V placement that fit the room, the best for few microbatches first."""
    p = program.placement.ranks
    if p < 2:
        return
    few = replace(program, microbatches=min(program.microbatches, p // program.slices + 2))
    times = list[tuple[float, int]]()
    blocks = [later(offsets, program.slices - 1 + program.vocabulary) for _, offsets in walking(p)]
    for number, offsets in enumerate(blocks):
        order = _block(few, offsets)
        if all(_waiting(ops) <= most for ops, most in zip(order, room, strict=True)):
            play = _Play(few, costs, late, order, room)
            times += [(play.end, number)] if play.whole else []
    for _, number in sorted(times)[:FEW]:
        yield blocks[number]


def _block(program: Program, offsets: Offsets) -> Orders:
    """All units of a block, one each period."""
    p, k = program.placement.ranks, program.slices
    orders = []
    for r in range(p):
        stages = (r, 2 * p - 1 - r)
        at = list[tuple[int, Op]]()
        for n in range(program.microbatches * k):
            for leg, stage in enumerate((*stages, *stages[::-1])):
                at.append((offsets[leg][r] + SLOTS * n, nth(Kind.B if leg > 1 else Kind.F, stage, n, k)))
        orders.append([op for _, op in sorted(at, key=lambda entry: entry[0])])
    return orders


def in_flight(ops: Iterable[Op]) -> int:
    """The most forwards whose activations exist at once."""
    change = {Kind.F: 1, Kind.W: -1, Kind.BW: -1}
    return max(accumulate(change.get(op.kind, 0) for op in ops), default=0)


@dataclass
class _Rank:
    """The remaining work of a rank."""

    ready: deque[Op]  # F and backwards, in order
    room: int  # the most forwards whose activations it may hold
    weights: deque[Op] = field(default_factory=deque)
    now: deque[tuple[float, Op]] = field(default_factory=deque)  # S and I, with their earliest times
    later: deque[tuple[float, Op]] = field(default_factory=deque)  # T
    last: deque[tuple[float, Op]] = field(default_factory=deque)  # E
    free: float = 0.0
    held: int = 0
    done: list[Op] = field(default_factory=list)


class _Play:
    """A simulation of a widened order that runs each op as soon as possible."""

    def __init__(self, program: Program, costs: Costs, late: int, orders: Orders, room: Sequence[int]) -> None:
        self.placement, self.costs, self.late = program.placement, costs, late
        self.sums, self.top = program.vocabulary, program.placement.ends[-1]  # the stage whose outputs are broadcast
        self.units = [(mb, part) for mb in range(program.microbatches) for part in range(program.slices)]
        self.last = program.placement.rank_of(self.top)
        self.ranks = []
        for order, most in zip(orders, room, strict=True):
            self.ranks.append(_Rank(deque(order), max(most, _waiting(order))))
        self.over: dict[tuple[bool, int, Unit], float] = {}  # forward or not, stage, unit -> its end
        self.parts: dict[tuple[Kind, Unit], list[float]] = {}
        self.met: dict[tuple[Kind, Unit], float] = {}  # collective -> its end
        self.begun: dict[tuple[Kind, Unit], tuple[float, int]] = {}  # collective -> its start, and a number in order
        self.heap = [(0.0, rank) for rank in range(len(self.ranks))]
        self._looked_up(0, 0.0)
        self._run()
        self.whole = not any(rank.ready or rank.weights or rank.later or rank.last or rank.now for rank in self.ranks)
        self.end = max(rank.free for rank in self.ranks)
        held = [in_flight(rank.done) for rank in self.ranks]
        self.most, self.over_room = max(held), any(peak > most for peak, most in zip(held, room, strict=True))

    def _run(self) -> None:
        while self.heap:
            now, r = heappop(self.heap)
            rank = self.ranks[r]
            if now < rank.free:
                continue
            op = self._next(rank, r, now)
            if op is not None:
                self._put(rank, r, now, op)

    def _next(self, rank: _Rank, r: int, now: float) -> Op | None:
        """The next op of a rank; None if it sleeps until something arrives."""
        if rank.now and rank.now[0][0] <= now:
            return rank.now.popleft()[1]
        waiting = sum(at <= now for at, _ in rank.later)
        if waiting and (self.sums == 2 or waiting >= self.late):
            return rank.later.popleft()[1]
        if sum(at <= now for at, _ in rank.last) > self.late:
            return rank.last.popleft()[1]
        at = self._when(rank.ready[0]) if rank.ready else None
        if at is not None and at <= now and not (rank.weights and self._full(rank)):
            return rank.ready.popleft()
        if rank.weights:
            return rank.weights.popleft()
        for queue in (rank.later, rank.last):
            if queue and queue[0][0] <= now:
                return queue.popleft()[1]
        if at is not None and at > now:
            heappush(self.heap, (at, r))
        return None

    def _when(self, op: Op) -> float | None:
        """The earliest time of an F or a backward; None if not known yet."""
        unit, forward, start = (op.mb, op.slice), op.kind is Kind.F, 0.0
        for near in self.placement.sources(op.stage) if forward else self.placement.sinks(op.stage):
            over = self.over.get((forward, near, unit))
            if over is None:
                return None
            if self.placement.crosses(near, op.stage):
                over += self.costs.link(op.pipe, near, op.stage, op.mb)
            start = max(start, over)
        needs = [] if forward else [self.over.get((True, op.stage, unit))]
        if forward and op.stage == 0:
            needs.append(self.met.get((Kind.GIVE, unit)))
        if not forward and op.stage == self.top:
            needs.append(self.met.get((Kind.MEET if self.sums == 1 else Kind.SUM, unit)))
        for need in needs:
            if need is None:
                return None
            start = max(start, need)
        return start

    def _put(self, rank: _Rank, r: int, now: float, op: Op) -> None:
        kind, unit = op.kind, (op.mb, op.slice)
        wide = kind.unit_wide
        end = now + (self.costs.of(kind.row.cost, r, self.costs.part(*unit)) if wide else self.costs.duration(op))
        rank.free = end
        rank.done.append(op)
        heappush(self.heap, (end, r))
        if kind.unit_wide:
            self._shared(op, end)
        elif kind is Kind.W:
            rank.held -= 1
        else:
            self._of_stage(rank, op, unit, end)

    def _of_stage(self, rank: _Rank, op: Op, unit: Unit, end: float) -> None:
        forward = op.kind is Kind.F
        self.over[forward, op.stage, unit] = end
        rank.held += 1 if forward else -1 if op.kind is Kind.BW else 0
        if op.kind is Kind.B:
            rank.weights.append(op._replace(kind=Kind.W))
        for near in (*self.placement.sources(op.stage), op.stage, *self.placement.sinks(op.stage)):
            for link in (0.0, self._link(op, near)):
                heappush(self.heap, (end + link, self.placement.rank_of(near)))
        if forward and op.stage == self.top:
            self._meets(Kind.SPREAD, unit, end)
        if forward and op.stage == 0:
            self._looked_up(unit[0] * (len(self.units) // (1 + self.units[-1][0])) + unit[1] + 1, end)
        if not forward and op.stage == 0:
            self._meets(Kind.TAKE, unit, end)

    def _full(self, rank: _Rank) -> bool:
        return rank.ready[0].kind is Kind.F and rank.held >= rank.room

    def _link(self, op: Op, near: int) -> float:
        forward = op.kind is Kind.F
        if near == op.stage or not self.placement.crosses(near, op.stage):
            return 0.0
        reads = near > op.stage if forward else near < op.stage
        return self.costs.link(op.pipe, op.stage, near, op.mb) if reads else 0.0

    def _looked_up(self, first: int, now: float) -> None:
        """Once `first` units have begun, queues the next look-ups."""
        for number in range(AHEAD) if not first else (first + AHEAD - 1,):
            if number < len(self.units):
                self._all(Kind.I, self.units[number], now)

    def _shared(self, op: Op, end: float) -> None:
        """Records that a rank has done its part of a collective."""
        unit = (op.mb, op.slice)
        together = {Kind.I: Kind.GIVE, Kind.S: Kind.MEET, Kind.T: Kind.SUM}.get(op.kind)
        if together is None or (together is Kind.SUM and self.sums == 1):
            return
        ends = self.parts.setdefault((together, unit), [])
        ends.append(end)
        if len(ends) == len(self.ranks):
            self._meets(together, unit, max(ends))

    def _meets(self, kind: Kind, unit: Unit, now: float) -> None:
        """Runs a collective to which all ranks have come."""
        self.begun[kind, unit] = now, len(self.begun)
        at = self.met[kind, unit] = now + self.costs.of(kind.row.cost, 0, self.costs.part(*unit))
        follows = {Kind.SPREAD: Kind.S, Kind.MEET: Kind.T, Kind.TAKE: Kind.E}.get(kind)
        if follows is not None:
            self._all(follows, unit, at)
        for rank in {self.placement.rank_of(0), self.last}:
            heappush(self.heap, (at, rank))

    def _all(self, kind: Kind, unit: Unit, at: float) -> None:
        """Queues an op on every rank from `at` on."""
        for r, rank in enumerate(self.ranks):
            queue = rank.later if kind is Kind.T else rank.last if kind is Kind.E else rank.now
            queue.append((at, Op(kind, 0, unit[0], 0, unit[1])))
            heappush(self.heap, (at, r))

    def lists(self) -> list[list[Op]]:
        """The ops of each rank with their collectives."""
        order = sorted(self.begun, key=self.begun.__getitem__)
        return [list(self._listed(r, rank.done, order)) for r, rank in enumerate(self.ranks)]

    def _listed(self, r: int, ops: Sequence[Op], order: Sequence[tuple[Kind, Unit]]) -> Iterator[Op]:
        """Yields the ops, and each collective of the common order after this rank's part of it and all earlier ones."""
        first, last = self.placement.rank_of(0) == r, self.last == r
        have = {key for key in order if (key[0] is Kind.SPREAD and not last) or (key[0] is Kind.TAKE and not first)}
        todo = deque(order)
        closes = {Kind.I: Kind.GIVE, Kind.S: Kind.MEET, Kind.T: Kind.SUM}
        for op in [*ops, None]:
            while todo and todo[0] in have:
                kind, (mb, part) = todo.popleft()
                yield Op(kind, 0, mb, 0, part)
            if op is None:
                return
            yield op
            unit = (op.mb, op.slice)
            if op.kind in closes:
                have.add((closes[op.kind], unit))
            elif last and op.kind is Kind.F and op.stage == self.top:
                have.add((Kind.SPREAD, unit))
            elif first and op.kind.is_backward and op.stage == 0:
                have.add((Kind.TAKE, unit))


def _waiting(ops: Iterable[Op]) -> int:
    """The most forwards whose backward has not run."""
    return max(accumulate(1 if op.kind is Kind.F else -1 for op in ops), default=0)
