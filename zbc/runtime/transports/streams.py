"""Ranks as threads that share one GPU, a stream each: the hub between streams.

A thread comes to a message or a collective when its host does; what is to be moved may still be computed then. So who
sends records an event, and the stream of who takes waits for it; whoever comes last to a collective computes it on its
own stream, after the events of all, and each member's stream waits for its end. No host waits for a device here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zbc.runtime.transports.hub import Hub, Offer, Round
from zbc.runtime.transports.transport import Letter


class StreamHub(Hub):
    """A hub whose ranks each have a stream of their own, current in their threads."""

    def __init__(self, ranks: int, *, tp: int = 1) -> None:
        super().__init__(ranks, tp=tp)
        self._made: dict[tuple[int, Letter], torch.cuda.Event] = {}  # (to, message) -> when its tensor is there

    def put(self, source: int, message: Letter, tensor: Tensor, peer: int) -> None:
        self._made[peer, message] = _now()  # before anybody can take it
        super().put(source, message, tensor, peer)

    def take(self, rank: int, message: Letter, peer: int) -> Tensor:
        tensor = super().take(rank, message, peer)
        _after(self._made.pop((rank, message)), tensor)
        return tensor

    def join(self, rank: int, offer: Offer, ranks: tuple[int, ...]) -> Round:
        return super().join(rank, offer._replace(ready=_now()), ranks)

    def _end(self, meeting: Round) -> None:
        for offer in meeting.offers.values():
            if offer.ready is not None:
                _after(offer.ready, offer.source, offer.target)
        super()._end(meeting)
        meeting.ended = _now()

    def complete(self, rank: int, meeting: Round) -> None:
        super().complete(rank, meeting)
        if meeting.ended is not None:
            torch.cuda.current_stream().wait_event(meeting.ended)


def _now() -> torch.cuda.Event:
    """When the current stream has done what it was given so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _after(event: torch.cuda.Event, *tensors: Tensor) -> None:
    """Let the current stream wait, and use these tensors of another one: their memory stays theirs until it has."""
    stream = torch.cuda.current_stream()
    stream.wait_event(event)
    for tensor in tensors:
        tensor.record_stream(stream)
