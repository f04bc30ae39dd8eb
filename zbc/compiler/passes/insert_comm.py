"""Make the transfers between ranks explicit: a value that is written on one rank and read on another is a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from zbc.compiler.sim.context import Context
from zbc.ir import Edge, Message, Op, Placement, Program, groups
from zbc.ops import VALUES, At, Kind, Lane, Ref

Position = int
POSTED = 1  # compute ops between the post of a receive and the op that waits for it
_Places = dict[tuple[Kind, int, int], list[Edge]]  # (kind, stage, pipe) -> (stage that makes, stage that reads)


@dataclass(frozen=True, slots=True)
class InsertComm:
    """Put a SEND right after each op whose result another rank needs, and post the RECV one compute op ahead.

    Receives of one channel (sender, receiver) are posted in the order the sender sends, which FIFO transports demand;
    where that order is not the order of use, a receive is posted earlier. Stages on the same rank hand tensors over in
    memory and get no transfer. Groups stay together: receives are posted before a group, sends follow it.

        rank 1           rank 1
        F s1 m0          RECV_F s1 m0 <r0
        F s1 m1    ->    RECV_F s1 m1 <r0
                         F s1 m0
                         SEND_F s1 m0 >r2
                         F s1 m1
                         SEND_F s1 m1 >r2
    """

    name: ClassVar[str] = "insert-comm"

    def run(self, program: Program, context: Context) -> Program:
        inside = [groups(ops) for ops in program.ranks]
        sends, channels = _sends(program)
        posts = _posts(program, channels, inside)
        ranks = [_woven(ops, posts[rank], sends, inside[rank]) for rank, ops in enumerate(program.ranks)]
        return program.with_ranks(ranks, by=self.name)


def _woven(
    ops: Sequence[Op], posts: dict[Position, list[Op]], sends: dict[Op, list[Op]], inside: dict[int, int]
) -> list[Op]:
    """The ops of a rank with its transfers among them."""
    listed: list[Op] = []
    held: list[Op] = []  # sends of a group
    for step, op in enumerate(ops):
        if step in posts:
            listed += posts[step]
        listed.append(op)
        held += sends.get(op, ())
        if held and (step not in inside or inside[step] + 2 == step):
            listed += held
            held = []
    return listed


def _sends(program: Program) -> tuple[dict[Op, list[Op]], dict[tuple[int, int], list[Message]]]:
    """The SENDs after each op, and per channel the messages in sending order."""
    placement, made = program.placement, _crossing(program.placement, written=True)
    sends: dict[Op, list[Op]] = {}
    channels: dict[tuple[int, int], list[Message]] = {}
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            kind, stage, mb, pipe, part = op
            for source, sink in made.get((kind, stage, pipe), ()):
                message = Message(source, sink, mb, pipe, part)
                sends.setdefault(op, []).append(message.send)
                channels.setdefault((rank, placement.pipes[pipe][sink]), []).append(message)
    return sends, channels


def _posts(
    program: Program, channels: dict[tuple[int, int], list[Message]], inside: Sequence[dict[int, int]]
) -> list[dict[Position, list[Op]]]:
    """Per rank, the receives to post right before the op at a position."""
    taken = _crossing(program.placement, written=False)
    users: list[dict[tuple[int, int, int, int, int], Position]] = [{} for _ in program.ranks]
    for rank, ops in enumerate(program.ranks):
        for step, (kind, stage, mb, pipe, part) in enumerate(ops):
            for source, sink in taken.get((kind, stage, pipe), ()):
                users[rank][source, sink, mb, pipe, part] = step
    posts: list[dict[Position, list[Op]]] = [{} for _ in program.ranks]
    for (_, receiver), messages in sorted(channels.items()):
        position = len(program.ranks[receiver])
        placed = []
        for message in reversed(messages):  # a receive comes no later than the ones sent after it
            user = users[receiver][message]
            post = max(0, inside[receiver].get(user, user) - POSTED)
            position = min(position, inside[receiver].get(post, post))
            placed.append((position, message))
        for position, message in reversed(placed):
            posts[receiver].setdefault(position, []).append(message.recv)
    return posts


def _crossing(placement: Placement, *, written: bool) -> _Places:
    """What each kind of op writes for another rank, or reads from one, by its row."""
    found: _Places = {}
    for kind in Kind:
        refs = kind.row.writes if written else kind.row.reads
        for ref in refs if kind.row.lane is Lane.COMPUTE else ():
            if VALUES[ref.what].scope == "edge":
                for pipe in range(len(placement.pipes)):
                    for stage in range(placement.stages):
                        edges = _edges(placement, stage, ref, written=written)
                        crossing = [edge for edge in edges if placement.crosses(*edge, pipe)]
                        if crossing:
                            found.setdefault((kind, stage, pipe), []).extend(crossing)
    return found


def _edges(placement: Placement, stage: int, ref: Ref, *, written: bool) -> Iterator[Edge]:
    """The ways of a value to or from a stage: (stage that makes it, stage that reads it)."""
    others = placement.sinks(stage) if ref.at is At.SINKS else placement.sources(stage)
    return ((stage, other) if written else (other, stage) for other in others)
