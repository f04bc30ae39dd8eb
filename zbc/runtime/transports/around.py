"""Wrappers of a transport: the base of those that trace or fill waits, and one that sends through the host's memory.

NCCL refuses two ranks on one GPU. Their tensors are copied to pinned memory before they are sent over gloo, and back to
the GPU when they have arrived. The host waits for its stream when it sends or starts a collective, which the proof
allows: nothing enqueued there depends on later ops. It is slow, and for trials. It also works on a CPU, where tests run
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.runtime.transports.transport import Letter, Offer, Pending, Ranks, Shared, Then, Transport


class Through(NamedTuple):
    """A `Pending` whose `wait` calls `how`."""

    inner: Pending
    how: Callable[[Pending], None]

    def wait(self) -> None:
        self.how(self.inner)

    def ready(self) -> bool:
        return self.inner.ready()


class Around(Transport):
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

    def start(self, offer: Offer, ranks: Ranks) -> Pending:
        return self.started(self.inner.start(offer, ranks), gather=offer.what == "gather")

    def watch(self, pending: Pending, *, gather: bool) -> Pending:
        return self.started(self.inner.watch(pending, gather=gather), gather=gather)

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

    def start(self, offer: Offer, ranks: Ranks) -> Pending:
        source, after = self._down(offer.source), offer.then
        target = source if offer.target is offer.source else self._room(offer.target)
        staged, pairs = offer._replace(source=source, target=target), [(target, offer.target)]
        if after is not None:
            pairs.clear()

            def make() -> Tensor:
                offer.target.copy_(target)
                result = after.make()
                pairs.append((self._down(result), result))
                return pairs[0][0]

            staged = staged._replace(then=Then(make, after.root))

        def land(pending: Pending) -> None:
            pending.wait()
            for host, there in pairs:  # known once it has completed
                there.copy_(host, non_blocking=True)

        return Through(self.inner.start(staged, ranks), land)

    def share(self, size: int, ranks: tuple[int, ...], device: torch.device) -> Shared:
        if device.type != "cpu":
            text = "run: ranks that share a GPU cannot take weights from each other's memory"
            raise ZbcError("E603", text, hint='set parallel.exchange = "collective"')
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
