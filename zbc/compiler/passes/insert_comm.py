"""Makes the transfers between ranks explicit: a value written on one rank and read on another is a message."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, NamedTuple

from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import Timeline
from zbc.ir import WHOLE, Message, Op, Placement, Program, groups
from zbc.ops import MAKER, VALUES, At, Kind, Lane, experts_of

POSTED = 1  # compute ops between the post of a receive and the op that waits for it


class _Crossing(NamedTuple):
    """A value that goes from a stage to another one on another rank."""

    source: int
    sink: int
    send: Kind
    other: int  # `other` of the SEND


class _Line(NamedTuple):
    """The messages of a channel in sending order, as plain tuples: there are many."""

    messages: list[tuple[int, int, int, int, int]]
    sent: list[float]  # their times in ms; empty if no message waits for a buffer


_Places = dict[tuple[Kind, int, int], list[_Crossing]]  # by kind, stage and pipe of the op at one end


@dataclass(frozen=True, slots=True)
class InsertComm:
    """Put a SEND right after each op whose result another rank needs, and post the RECV one compute op ahead.

    Receives of one channel (sender, receiver) are posted in the order of the sends, which FIFO transports demand; if
    that differs from the order of use, a receive is posted earlier. If messages wait for their buffer
    (`Costs.rendezvous`), a receive is posted before its message is sent, by costs: then none has to wait. Stages on the
    same rank hand tensors over in memory and get no transfer. Groups stay together: receives are posted before a group,
    sends follow it. `ahead`: post this many compute ops ahead at any costs, for the body of a cycle.

        rank 1           rank 1
        F s1 m0          RECV_F s1 m0 <r0
        F s1 m1    ->    RECV_F s1 m1 <r0
                         F s1 m0
                         SEND_F s1 m0 >r2
                         F s1 m1
                         SEND_F s1 m1 >r2
    """

    ahead: int = 0

    name: ClassVar[str] = "insert-comm"

    def run(self, program: Program, context: Context) -> Program:
        made, taken = (_crossing(program.placement, written=written) for written in (True, False))
        timeline = context.timeline if context.costs.rendezvous and not self.ahead else None
        arriving = _arriving(program, made, timeline)
        ranks = []
        for rank, ops in enumerate(program.ranks):
            inside = groups(ops)
            mine = [] if timeline is None else [timeline.end[i] for i in timeline.graph.mine(rank)]
            ends = list(accumulate(mine, max))  # ms when each op, and all before it, are completed
            posts = _posts(program.placement, ops, arriving[rank], taken, inside, ends, self.ahead or POSTED)
            arriving[rank] = []  # freed early: the largest list here
            ranks.append(_woven(ops, posts, made, inside))
        return program.with_ranks(ranks, by=self.name)


def sent(ops: Sequence[Op], i: int, *kinds: Kind) -> int:
    """The index of the last send (or op of these kinds) right after op i, or i: messages are urgent."""
    while i + 1 < len(ops) and (ops[i + 1].kind.is_send or ops[i + 1].kind in kinds):
        i += 1
    return i


def with_experts(ops: Sequence[Op], program: Program, *kinds: Kind) -> list[Op]:
    """Puts in place of each of these ops of a stage: the op, and the same op of its experts, each if several replicas
    hold the same weights."""
    listed: list[Op] = []
    for op in ops:
        both = (op, op._replace(stage=experts_of(op.stage))) if op.kind in kinds and op.stage >= 0 else ()
        listed += [one for one in both if program.shared(Op(MAKER["weights"], one.stage))] if both else [op]
    return listed


def _arriving(program: Program, made: _Places, timeline: Timeline | None) -> list[list[_Line]]:
    """Per rank the channels that lead to it, by sender."""
    pipes = program.placement.pipes
    channels: list[list[_Line]] = [[] for _ in program.ranks]
    first = 0  # node of the rank's first op
    for ops in program.ranks:
        lines: dict[int, _Line] = {}
        for i, (kind, stage, mb, pipe, part, *_) in enumerate(ops, first):
            for source, sink, *_ in made.get((kind, stage, pipe), ()):
                line = lines.setdefault(pipes[pipe][sink], _Line([], []))
                line.messages.append((source, sink, mb, pipe, part))
                if timeline is not None:
                    line.sent.append(timeline.end[i])
        first += len(ops)
        for receiver, line in lines.items():
            channels[receiver].append(line)
    return channels


def _posts(
    placement: Placement,
    ops: Sequence[Op],
    arriving: Sequence[_Line],
    taken: _Places,
    inside: dict[int, int],
    ends: Sequence[float],
    ahead: int,
) -> dict[int, list[Op]]:
    """The receives to post right before the op at a step of a rank; `ends` are the times of its ops, if they matter."""
    users: dict[tuple[int, int, int, int, int], int] = {}
    for step, (kind, stage, mb, pipe, part, *_) in enumerate(ops):
        for source, sink, *_ in taken.get((kind, stage, pipe), ()):
            users[source, sink, mb, pipe, part] = step
    posts: dict[int, list[Op]] = {}
    for line in arriving:
        step, placed = len(ops), []
        for k in reversed(range(len(line.messages))):  # a receive comes no later than the receives of later sends
            user = users[line.messages[k]]
            post = max(0, inside.get(user, user) - ahead)
            if ends:
                post = min(post, bisect_right(ends, line.sent[k]))
            step = min(step, inside.get(post, post))
            placed.append(step)
        posted: dict[tuple[int, int], Op] = {}  # by the two stages
        for message in line.messages:
            way = message[:2]
            if way not in posted:
                posted[way] = placement.recv(Message(*message))
            kind, stage, *_, end = posted[way]
            posts.setdefault(placed.pop(), []).append(Op(kind, stage, *message[2:], WHOLE, end))
    return posts


def _woven(ops: Sequence[Op], posts: dict[int, list[Op]], made: _Places, inside: dict[int, int]) -> list[Op]:
    """The ops of a rank with its transfers."""
    listed: list[Op] = []
    held: list[Op] = []  # sends of a group
    for step, op in enumerate(ops):
        if step in posts:
            listed += posts[step]
        listed.append(op)
        kind, stage, mb, pipe, part, *_ = op
        for source, _, send, end in made.get((kind, stage, pipe), ()):
            held.append(Op(send, source, mb, pipe, part, WHOLE, end))
        if held and (step not in inside or inside[step] + 2 == step):
            listed += held
            held = []
    return listed


def _crossing(placement: Placement, *, written: bool) -> _Places:
    """The values that each kind of op writes for another rank, or reads from one, by its row."""
    places: _Places = {}
    for kind in Kind:
        refs = kind.row.writes if written else kind.row.reads
        for ref in refs if kind.row.lane is Lane.COMPUTE else ():
            if VALUES[ref.what].scope == "edge":
                for pipe in range(len(placement.pipes)):
                    for stage in range(placement.stages):
                        ends = placement.sinks(stage) if ref.at is At.SINKS else placement.sources(stage)
                        for edge in ((stage, end) if written else (end, stage) for end in ends):
                            if placement.crosses(*edge, pipe):
                                send = placement.send(Message(*edge, 0, pipe, 0))
                                crossing = _Crossing(*edge, send.kind, send.other)
                                places.setdefault((kind, stage, pipe), []).append(crossing)
    return places
