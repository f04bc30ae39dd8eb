"""Where tensors travel, and the FIFO queues they travel in.

A tensor travels between neighbouring stages of one pipe that live on different ranks: the output of a stage to the
stage after it, a gradient to the stage before it. All messages from rank a to rank b share one channel, `a -> b`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zbc.compiler.check.numbered import Numbered
from zbc.ir import Kind

Channel = tuple[int, int]  # sending rank, receiving rank


class Crossing(NamedTuple):
    """Tensors from `sender`'s row to `receiver`'s row, place by place: op ids, -1 where no rank runs the op."""

    sender: int
    receiver: int
    channel: Channel
    send_kind: Kind
    recv_kind: Kind
    producers: list[int]
    sends: list[int]
    recvs: list[int]
    consumers: list[int]


def crossings(n: Numbered) -> Iterator[Crossing]:
    """Every pair of neighbouring rows on different ranks, in both directions."""
    for row, owner in enumerate(n.owners):
        if row % n.program.placement.stages and n.owners[row - 1] != owner:
            yield _crossing(n, row - 1, row, Kind.SEND_F, Kind.RECV_F, n.at[Kind.F])
            yield _crossing(n, row, row - 1, Kind.SEND_B, Kind.RECV_B, n.backward)


def _crossing(n: Numbered, sender: int, receiver: int, send: Kind, recv: Kind, compute: list[int]) -> Crossing:
    return Crossing(
        sender,
        receiver,
        (n.owners[sender], n.owners[receiver]),
        send,
        recv,
        n.cut(compute, sender),
        n.cut(n.at[send], sender),
        n.cut(n.at[recv], receiver),
        n.cut(compute, receiver),
    )


def matched(n: Numbered, crossing: Crossing) -> list[tuple[int, int]]:
    """The (send, recv) ids of messages with both ends on the ranks they belong to."""
    low, high = n.span(crossing.sender)
    start, end = n.span(crossing.receiver)
    return [
        (send, recv)
        for send, recv in zip(crossing.sends, crossing.recvs, strict=True)
        if low <= send < high and start <= recv < end
    ]


def channels(n: Numbered) -> dict[Channel, list[tuple[int, int]]]:
    """Per channel its matched messages as (send, recv) ids, in the order they are sent."""
    found: dict[Channel, list[tuple[int, int]]] = {}
    for crossing in crossings(n):
        found.setdefault(crossing.channel, []).extend(matched(n, crossing))
    for pairs in found.values():
        pairs.sort()
    return found


def disorder(pairs: list[tuple[int, int]]) -> tuple[int, int, int] | None:
    """The first message of a channel that is not received where it is sent: (position, send, receive there)."""
    received = sorted(recv for _, recv in pairs)
    for k, ((send, own), recv) in enumerate(zip(pairs, received, strict=True)):
        if own != recv:
            return k, send, recv
    return None
