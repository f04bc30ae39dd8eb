"""Make the transfers between ranks explicit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zbc.compiler.context import Context
from zbc.ir import Kind, Message, Op, Program, groups

Position = int
USERS = frozenset({Kind.F, Kind.B, Kind.BW})  # of what comes from other ranks
AHEAD = 1  # compute ops between the post of a receive and the op that waits for it


def insert_comm(program: Program) -> Program:
    """Put a SEND right behind each op whose result another rank needs, and post the RECV one compute op ahead.

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
    sends, channels = _sends(program)
    posts = _posts(program, channels)
    ranks = []
    for rank, ops in enumerate(program.ranks):
        listed: list[Op] = []
        held: list[Op] = []  # sends of a group
        inside = groups(ops)
        for step, op in enumerate(ops):
            listed += posts[rank].get(step, ())
            listed.append(op)
            message = sends.get(op)
            if message is not None:
                held.append(message.send)
            if step not in inside or inside[step] + 2 == step:
                listed += held
                held = []
        ranks.append(listed)
    return program.with_ranks(ranks, by="insert-comm")


def _sends(program: Program) -> tuple[dict[Op, Message], dict[tuple[int, int], list[Message]]]:
    """The message each op starts, and per channel the messages in sending order."""
    placement = program.placement
    last = placement.stages - 1
    sends: dict[Op, Message] = {}
    channels: dict[tuple[int, int], list[Message]] = {}
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            kind, stage, mb, pipe, part = op
            if kind not in USERS or (stage == last if kind is Kind.F else stage == 0):
                continue
            there = stage + 1 if kind is Kind.F else stage - 1
            peer = placement.pipes[pipe][there]
            if peer != rank:
                sends[op] = message = Message(stage, there, mb, pipe, part)
                channels.setdefault((rank, peer), []).append(message)
    return sends, channels


def _posts(program: Program, channels: dict[tuple[int, int], list[Message]]) -> list[dict[Position, list[Op]]]:
    """Per rank, the receives to post right before the op at a position."""
    users: list[dict[tuple[bool, int, int, int, int], Position]] = [
        {(op.kind is Kind.F, *op[1:]): step for step, op in enumerate(ops) if op.kind in USERS} for ops in program.ranks
    ]
    inside = [groups(ops) for ops in program.ranks]
    posts: list[dict[Position, list[Op]]] = [{} for _ in program.ranks]
    for (_, receiver), messages in sorted(channels.items()):
        position = len(program.ranks[receiver])
        placed = []
        for message in reversed(messages):  # a receive comes no later than the ones sent after it
            user = users[receiver][message.forward, *message[1:]]
            post = max(0, inside[receiver].get(user, user) - AHEAD)
            position = min(position, inside[receiver].get(post, post))
            placed.append((position, message))
        for position, message in reversed(placed):
            posts[receiver].setdefault(position, []).append(message.recv)
    return posts


@dataclass(frozen=True, slots=True)
class InsertComm:
    """See `insert_comm`."""

    name: ClassVar[str] = "insert-comm"

    def run(self, program: Program, context: Context) -> Program:
        return insert_comm(program)
