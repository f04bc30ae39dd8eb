"""Wrappers of a transport: the base of those that trace or fill waits, and one that sends through the host's memory.

NCCL refuses two ranks on one GPU. Their tensors are copied to pinned memory before they are sent over gloo, and back to
the GPU when they have arrived. The host waits for its stream when it sends or starts a collective, which the proof
allows: nothing enqueued there depends on later ops. It is slow, and for trials. It also works on a CPU, where tests run
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zbc.errors import ZbcError
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


# ---- ranks that share a GPU ----------------------------------------------------------------------------------


class Staged(Around):
    """A `Transport` for tensors on `device` over one for tensors on the host."""

    def __init__(self, inner: Transport, device: torch.device) -> None:
        super().__init__(inner)
        self._device = device
        self._buffers: dict[Letter, Tensor] = {}  # on the device, of posted messages

    def send(self, message: Letter, tensor: Tensor, peer: int) -> None:
        self.inner.send(message, self._down(tensor), peer)

    def post(self, message: Letter, buffer: Tensor, peer: int) -> None:
        self.inner.post(message, self._room(buffer), peer)
        self._buffers[message] = buffer

    def wait(self, message: Letter) -> Tensor:
        arrived = self.inner.wait(message)
        return self._buffers.pop(message).copy_(arrived, non_blocking=True)

    def start_sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        host = self._down(tensor)
        return _Landing(self.inner.start_sum(host, ranks), [(host, tensor)])

    def start_scatter(self, parts: Tensor, mine: Tensor, ranks: tuple[int, ...]) -> Pending:
        host = self._room(mine)
        return _Landing(self.inner.start_scatter(self._down(parts), host, ranks), [(host, mine)])

    def start_gather(self, mine: Tensor, parts: Tensor, ranks: tuple[int, ...], then: Then | None = None) -> Pending:
        host = self._room(parts)
        if then is None:
            return _Landing(self.inner.start_gather(self._down(mine), host, ranks), [(host, parts)])
        made: list[tuple[Tensor, Tensor]] = []

        def make() -> Tensor:
            parts.copy_(host)
            result = then.make()
            made.append((self._down(result), result))
            return made[0][0]

        return _Landing(self.inner.start_gather(self._down(mine), host, ranks, Then(make, then.root)), made)

    def start_swap(self, mine: Tensor, out: Sequence[int], parts: Tensor, into: Sequence[int], ranks: Ranks) -> Pending:
        host = self._room(parts)
        return _Landing(self.inner.start_swap(self._down(mine), out, host, into, ranks), [(host, parts)])

    def start_broadcast(self, tensor: Tensor, root: int, ranks: tuple[int, ...]) -> Pending:
        host = self._down(tensor)
        return _Landing(self.inner.start_broadcast(host, root, ranks), [(host, tensor)])

    def start_reduce(self, tensor: Tensor, root: int, ranks: tuple[int, ...]) -> Pending:
        host = self._down(tensor)
        return _Landing(self.inner.start_reduce(host, root, ranks), [(host, tensor)])

    def share(self, size: int, ranks: tuple[int, ...], device: torch.device) -> Shared:
        if device.type != "cpu":
            text = "run: ranks that share a GPU cannot take weights from each other's memory"
            raise ZbcError("E620", text, hint='set parallel.exchange = "collective"')
        return self.inner.share(size, ranks, device)

    def close(self) -> None:
        self.inner.close()
        self._buffers.clear()

    def _room(self, like: Tensor) -> Tensor:
        """Host memory for a tensor; pinned memory is reused once copies from it have completed."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._device.type == "cuda")

    def _down(self, tensor: Tensor) -> Tensor:
        """A completed copy on the host."""
        host = self._room(tensor).copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return host


class _Landing(NamedTuple):
    """A `Pending`: a collective on the host, then copies to the device: `pairs` of host and device tensors, which are
    known once it has completed."""

    inner: Pending
    pairs: list[tuple[Tensor, Tensor]]

    def wait(self) -> None:
        self.inner.wait()
        for host, target in self.pairs:
            target.copy_(host, non_blocking=True)

    def ready(self) -> bool:
        return self.inner.ready()
