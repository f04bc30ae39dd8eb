"""braid-v: an order of overlap groups, in which each op computes during the collectives of the other.

Under tensor parallelism F and B of a layer wait for all-reduces of ranks that share it; two ops of different
microbatches that run unit by unit in turn need not (arXiv 2510.27257). On a V, for rank r of p and n >= 3p microbatches
(f, b, d, w are F, B, BW and W of the leg down, F, B, D and W of the leg up, f+D a group; q = p-1-r):

    phase   ops                                           times
    1       f                                             2q
    2       f F                                           r + 1
    3       f, if r + 1 is odd; then f+f                  (r + 1) // 2
    4       F+B f+w                                       q
    5       F+D f+d in turn, the last r with B and b      2(n-3p+1) + 1 + 2r
    6       d F+B                                         2p-2-r
    7       d D                                           r + 1
    8       d w w                                         q
    9       d, then every remaining w

With f = b = w = 1 and collectives of a in each f and b, a step takes 6n + (p-1)(1 + a) + (2p + p mod 2) a, rank 0 waits
for collectives for (2p+1) a, and holds 4p-1 chunks. Fewer microbatches use the order of 3p without the ops of the
missing ones, a list scheduler's order of groups of ready ops, or one searched without groups: the best at the costs of
the job. With more, it is the first or the second.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules.phases import ANY, Group, Leg, Step, emitted, marked
from zbc.compiler.schedules.request import Request
from zbc.compiler.schedules.searched import found
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement, Program

DOWN, UP = 0, 1  # legs of the V
LARGE = 200_000  # ops that all list schedulers together may place


def braid_v(request: Request) -> Program:
    """The V placement in groups; the best order, by formula or by a few list schedulers, at the costs of the job."""
    p, m = request.p, request.m
    placement = Placement.vshape(p)
    costs = request.costs or Costs.uniform(placement)
    formula = ((_phases(rank, p, max(m, 3 * p)), (Leg(rank), Leg(2 * p - 1 - rank))) for rank in range(p))
    made = [_program(placement, m, [emitted(*each, m) for each in formula])] if p > 1 else []  # would hold 4p
    tries = max(2 if m < 3 * p or p == 1 else 0, LARGE // (12 * p * m))
    lists = [order for policy in POLICIES[:tries] if (order := _Lists(placement, m, costs, policy).run()) is not None]
    if lists:
        made.append(_program(placement, m, min(lists, key=lambda order: order[0])[1]))
    if m < 3 * p:  # few pairs form then, and an order without groups can be better
        with contextlib.suppress(ZbcError):  # E303: its limit is in units, and uneven stages may need more
            made.append(found("v-auto", Placement.vshape, replace(request, costs=costs, memory_limit=2 * p - 0.5)))
    if len(made) > 1:
        made.sort(key=lambda program: round(Context(program, costs).step_ms(request.objective), 9))
    return replace(made[0], history=("braid-v",))


def _program(placement: Placement, m: int, lists: Sequence[Sequence[Group]]) -> Program:
    ranks = tuple(tuple(op for group in groups for op in marked(group)) for groups in lists)
    return Program(placement, m, ranks, ("braid-v",))


# ---- by formula -----------------------------------------------------------------------------------------------------


def _phases(rank: int, p: int, n: int) -> Iterator[tuple[Step, ...]]:
    """The phases of the module's table, except the last W; each W is the oldest pending one."""
    rest = p - 1 - rank
    f, up, d, d_up, b_up, w = (Kind.F, DOWN), (Kind.F, UP), (Kind.BW, DOWN), (Kind.BW, UP), (Kind.B, UP), (Kind.W, ANY)
    yield from [(f,)] * (2 * rest)
    yield from [(f,), (up,)] * (rank + 1)
    yield from [(f,)] * ((rank + 1) % 2)
    yield from [(f, f)] * ((rank + 1) // 2)
    yield from [(up, b_up), (f, w)] * rest
    turns = 2 * (n - 3 * p + 1) + 1 + 2 * rank
    for i in range(turns):
        leg = DOWN if i % 2 else UP
        yield (Kind.F, leg), (Kind.B if i >= turns - rank else Kind.BW, leg)
    yield from [(d,), (up, b_up)] * (2 * p - 2 - rank)
    yield from [(d,), (d_up,)] * (rank + 1)
    yield from [(d,), (w,), (w,)] * rest
    yield (d,)


# ---- by lists -------------------------------------------------------------------------------------------------------


class Pick(Enum):
    """The preferred one of two legs."""

    UP = "the one that comes up"
    DOWN = "the one that goes down"
    SAME = "for F: that of the backward in its group"
    OTHER = "for F: the other one"
    TURN = "for backwards: not that of the last"


class Policy(NamedTuple):
    """Preferences of a list scheduler; counts are a + b p for (a, b)."""

    room: tuple[int, int]  # chunks that a rank may hold after an F of the leg that goes down
    forward: Pick
    backward: Pick
    split: tuple[int, int]  # B and W are apart once no more F than this are left
    both: bool  # F of both legs may be a group
    wait: float  # a group may wait for its second op for this share of an F


# These ten of 1,500 had the best order of each of 50 cases: p to 8, m to 2p + 2, collectives of 0 to .6 of an F.
POLICIES = (
    Policy((-2, 4), Pick.OTHER, Pick.UP, (0, 3), False, 0.0),
    Policy((-1, 4), Pick.SAME, Pick.TURN, (0, 2), False, 0.5),
    Policy((-2, 4), Pick.UP, Pick.DOWN, (0, 2), True, 0.0),
    Policy((-2, 4), Pick.UP, Pick.TURN, (0, 0), True, 0.5),
    Policy((0, 2), Pick.UP, Pick.UP, (0, 2), False, 0.5),
    Policy((0, 3), Pick.UP, Pick.DOWN, (0, 2), True, 1.0),
    Policy((-2, 4), Pick.UP, Pick.DOWN, (0, 0), True, 0.0),
    Policy((0, 3), Pick.UP, Pick.TURN, (0, 0), True, 1.0),
    Policy((-2, 4), Pick.UP, Pick.TURN, (0, 2), True, 0.0),
    Policy((0, 2), Pick.UP, Pick.UP, (0, 0), False, 0.0),
)


class _Lists:
    """Schedules all ranks at once: each free rank takes its policy's favourite group of ops that are ready."""

    def __init__(self, placement: Placement, m: int, costs: Costs, policy: Policy) -> None:
        self.placement, self.m, self.costs, self.policy = placement, m, costs, policy
        self.p, self.homes = placement.ranks, placement.pipes[0]
        self.stages = [(rank, placement.stages - 1 - rank) for rank in range(self.p)]
        (a, b), (c, d) = policy.room, policy.split
        self.most, self.room, self.split = 4 * self.p - 1, a + b * self.p, c + d * self.p
        f = costs.column("f")
        self.wait = policy.wait * sum(f) / len(f)
        self.ready = {(Kind.F, 0, mb): 0.0 for mb in range(m)}  # F and B by stage and microbatch: their earliest ms
        self.done = [{(kind, leg): 0 for kind in (Kind.F, Kind.B) for leg in (DOWN, UP)} for _ in range(self.p)]
        self.last, self.held = [UP] * self.p, [0] * self.p
        self.due = [list[Op]() for _ in range(self.p)]
        self.free = [0.0] * self.p
        self.groups = [list[Group]() for _ in range(self.p)]
        self.events = [(0.0, rank) for rank in range(self.p)]

    def run(self) -> tuple[float, list[list[Group]]] | None:
        """ms of the step, and the groups of each rank; None if ranks wait for room forever."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now >= self.free[rank] - 1e-9:
                self._take(now, rank)
        whole = all(count == self.m for done in self.done for count in done.values())
        return (max(self.free), self.groups) if whole and not any(self.due) else None

    def _take(self, now: float, rank: int) -> None:
        group = self._choose(now, rank)
        if not group:
            return
        begin = max([now, *(self.ready.get(self._key(op), now) for op in group)])
        alone = [self.costs.duration(op) for op in group]
        end = begin + (alone[0] if len(group) == 1 else self.costs.pair(group[0], group[1], *alone))
        for op in group:
            self._place(rank, op, begin, end)
        self.groups[rank].append(group)
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))

    def _choose(self, now: float, rank: int) -> Group:
        policy, due = self.policy, self.due[rank]
        forward = [leg for leg in (UP, DOWN) if self._fits(rank, leg) and self._at_hand(Kind.F, rank, leg, now)]
        backward = [leg for leg in (UP, DOWN) if self._at_hand(Kind.B, rank, leg, now)]
        if backward:
            if policy.backward is Pick.DOWN or (policy.backward is Pick.TURN and self.last[rank] == UP):
                backward.reverse()
            leg = backward[0]
            left = 2 * self.m - self.done[rank][Kind.F, DOWN] - self.done[rank][Kind.F, UP]
            op = self._next(Kind.B, rank, leg, Kind.B if left <= self.split else Kind.BW)
            if not forward:
                return (op,)
            wanted = {Pick.SAME: leg, Pick.OTHER: DOWN if leg == UP else UP}.get(policy.forward, UP)
            return self._next(Kind.F, rank, wanted if wanted in forward else forward[0]), op
        apart = self.done[rank][Kind.F, DOWN] != self.done[rank][Kind.F, UP]  # the next microbatches of both legs
        if len(forward) == 2 and policy.both and apart and self.held[rank] + 2 <= self.most:
            return self._next(Kind.F, rank, UP), self._next(Kind.F, rank, DOWN)
        if forward:
            op = self._next(Kind.F, rank, forward[0])
            return (op, due.pop(0)) if due else (op,)
        return (due.pop(0),) if due else ()

    def _fits(self, rank: int, leg: int) -> bool:
        return self.held[rank] < (self.most if leg == UP else min(self.most, self.room))

    def _at_hand(self, kind: Kind, rank: int, leg: int, now: float) -> bool:
        """Whether the next op of a leg could start, or soon."""
        mb = self.done[rank][kind, leg]
        return mb < self.m and self.ready.get((kind, self.stages[rank][leg], mb), float("inf")) <= now + self.wait

    def _next(self, family: Kind, rank: int, leg: int, kind: Kind | None = None) -> Op:
        return Op(kind or family, self.stages[rank][leg], self.done[rank][family, leg])

    def _key(self, op: Op) -> tuple[Kind, int, int]:
        return (Kind.B if op.kind is Kind.BW else op.kind), op.stage, op.mb

    def _place(self, rank: int, op: Op, begin: float, end: float) -> None:
        if op.kind is Kind.W:
            self.held[rank] -= 1
            return
        leg = DOWN if op.stage < self.p else UP
        kind, s, mb = self._key(op)
        self.done[rank][kind, leg] += 1
        if kind is Kind.F:
            self.held[rank] += 1
        else:
            self.last[rank] = leg
        if op.kind is Kind.BW:
            self.held[rank] -= 1
        elif op.kind is Kind.B:
            self.due[rank].append(op._replace(kind=Kind.W))
        after = (Kind.F, s + 1) if kind is Kind.F else (Kind.B, s - 1)
        if after[1] == self.placement.stages:
            after = Kind.B, s
        if after[1] < 0:
            return
        reader = self.homes[after[1]]
        if after[1] != s:
            end += self.costs.link(0, s, after[1], mb)
        self.ready[(*after, mb)] = end
        heapq.heappush(self.events, (end, reader))
        if self.wait:
            heapq.heappush(self.events, (max(begin, end - self.wait), reader))
