"""Wrappers of a transport: the base of those that trace, fill waits, or send through the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zbc.runtime.transports.transport import Letter, Pending, Ranks, Shared, Then, Transport


class Through(NamedTuple):
    """A `Pending` whose `wait` calls `how`."""

    inner: Pending
    how: Callable[[Pending], None]

    def wait(self) -> None:
        self.how(self.inner)

    def ready(self) -> bool:
        return self.inner.ready()


class Around:
    """A `Transport` that delegates to its `inner` one: subclasses override some methods."""

    def __init__(self, inner: Transport) -> None:
        self.rank, self.inner = inner.rank, inner

    def started(self, pending: Pending, *, gather: bool) -> Pending:
        """Wraps a collective that was started: a gather, or another one."""
        return pending

    def send(self, message: Letter, tensor: Tensor, peer: int) -> None:
        self.inner.send(message, tensor, peer)

    def post(self, message: Letter, buffer: Tensor, peer: int) -> None:
        self.inner.post(message, buffer, peer)

    def wait(self, message: Letter) -> Tensor:
        return self.inner.wait(message)

    def ready(self, message: Letter) -> bool:
        return self.inner.ready(message)

    def start_sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        return self.started(self.inner.start_sum(tensor, ranks), gather=False)

    def start_scatter(self, parts: Tensor, mine: Tensor, ranks: tuple[int, ...]) -> Pending:
        return self.started(self.inner.start_scatter(parts, mine, ranks), gather=False)

    def start_gather(self, mine: Tensor, parts: Tensor, ranks: tuple[int, ...], then: Then | None = None) -> Pending:
        return self.started(self.inner.start_gather(mine, parts, ranks, then), gather=True)

    def start_swap(self, mine: Tensor, out: Sequence[int], parts: Tensor, into: Sequence[int], ranks: Ranks) -> Pending:
        return self.started(self.inner.start_swap(mine, out, parts, into, ranks), gather=False)

    def start_broadcast(self, tensor: Tensor, root: int, ranks: tuple[int, ...]) -> Pending:
        return self.started(self.inner.start_broadcast(tensor, root, ranks), gather=False)

    def start_reduce(self, tensor: Tensor, root: int, ranks: tuple[int, ...]) -> Pending:
        return self.started(self.inner.start_reduce(tensor, root, ranks), gather=False)

    def watch(self, pending: Pending, *, gather: bool) -> Pending:
        return self.started(self.inner.watch(pending, gather=gather), gather=gather)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        self.start_sum(tensor, ranks).wait()

    def share(self, size: int, ranks: tuple[int, ...], device: torch.device) -> Shared:
        return self.inner.share(size, ranks, device)

    def finish_step(self, *, drain: bool = True) -> None:
        self.inner.finish_step(drain=drain)

    def close(self) -> None:
        self.inner.close()
