"""The transport of tensors between ranks. Handlers use only this protocol; `hub.py` and `network.py` implement it.

Messages are matched by identity (`ir.Message`: direction, stage, microbatch, pipe, slice), never by arrival
order. Shapes and dtypes are fixed by the plan: the receiver has the buffer before the message arrives.

Wrappers of a transport trace or fill waits, or send through the host's memory. NCCL refuses two ranks on one GPU. Their
tensors are copied to pinned memory before they are sent over gloo, and back to the GPU when they have arrived. The host
waits for its stream when it sends or starts a collective, which the proof allows: nothing enqueued there depends on
later ops. It is slow, and for trials. It also works on a CPU, where tests run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.ir import Kind, Message


class Again(NamedTuple):
    """A message that a repeated forward (REDO) sends again."""

    message: Message

    @property
    def send(self) -> str:
        return f"{self.message.send} again"

    @property
    def recv(self) -> str:
        return f"{self.message.recv} again"


@dataclass(frozen=True)
class Signal:
    """Numbers from a rank to the next (NORM) or back (VERDICT), once per step."""

    kind: Kind

    @property
    def send(self) -> str:
        return self.kind.value

    recv = send


Letter = Message | Again | Signal
Ranks = tuple[int, ...]


class Then(NamedTuple):
    """A reduce that follows a gather, in the background: once all rows have arrived every rank calls `make`, and the
    results are reduced to rank `root` of the run."""

    make: Callable[[], Tensor]
    root: int


class Offer(NamedTuple):
    """A rank's part of a collective: its tensor, and the tensor for the result."""

    what: Literal["sum", "scatter", "gather", "broadcast", "reduce", "swap"]
    source: Tensor
    target: Tensor
    root: int = -1  # the rank of the run whose tensor is sent, or that gets the sum
    then: Then | None = None  # the reduce after a gather
    rows: tuple[int, ...] = ()  # of a swap, to each rank
    into: tuple[int, ...] = ()  # of a swap, from each rank
    ready: torch.cuda.Event | None = None  # when both tensors may be used, if ranks have streams


class Pending(Protocol):
    """A collective that was started. A rank's collectives run in the order in which it starts them. It holds its
    tensors until `wait` has returned: on cuda another stream works on them, and freed memory is reused at once."""

    def wait(self) -> None:
        """Blocks until it has completed (on cuda: makes the current stream wait)."""

    def ready(self) -> bool:
        """Whether it has completed; True also if `wait` would raise."""


class Shared(NamedTuple):
    """Memory of several ranks that all of them can access."""

    tensors: list[Tensor]  # of bytes, by rank
    alive: Callable[[], None]  # raises E702 once a rank is known to have failed; may be called from any thread


class Transport(Protocol):
    """One rank's end. All methods are called from the rank's own thread."""

    rank: int

    def send(self, message: Letter, tensor: Tensor, peer: int) -> None:
        """Starts a send; returns at once. The transport keeps `tensor` alive until it is delivered."""

    def post(self, message: Letter, buffer: Tensor, peer: int) -> None:
        """Posts the buffer of a message; returns at once."""

    def wait(self, message: Letter) -> Tensor:
        """Blocks until a posted message is in its buffer; returns the buffer."""

    def ready(self, message: Letter) -> bool:
        """Whether a posted message has arrived; True also if `wait` would raise."""

    def start(self, offer: Offer, ranks: Ranks) -> Pending:
        """Starts a collective of `ranks`, which all call this."""

    def start_sum(self, tensor: Tensor, ranks: Ranks) -> Pending:
        """Starts an all-reduce (sum) of `tensor` in place over `ranks`."""
        return self.start(Offer("sum", tensor, tensor), ranks)

    def start_scatter(self, parts: Tensor, mine: Tensor, ranks: Ranks) -> Pending:
        """Starts a reduce-scatter (sum) of `parts`, one row per rank, over `ranks`; each gets its row in `mine`."""
        return self.start(Offer("scatter", parts, mine), ranks)

    def start_gather(self, mine: Tensor, parts: Tensor, ranks: Ranks, then: Then | None = None) -> Pending:
        """Starts an all-gather of every rank's `mine` into the rows of `parts`; `then` is part of the collective."""
        return self.start(Offer("gather", mine, parts, then=then), ranks)

    def start_swap(self, mine: Tensor, out: Sequence[int], parts: Tensor, into: Sequence[int], ranks: Ranks) -> Pending:
        """Starts an all-to-all: sends `out[i]` rows of `mine` to the i-th of `ranks` and receives `into[i]` rows from
        it into `parts`; inside an op, so that it does not queue after sums that were started before."""
        return self.start(Offer("swap", mine, parts, rows=tuple(out), into=tuple(into)), ranks)

    def start_broadcast(self, tensor: Tensor, root: int, ranks: Ranks) -> Pending:
        """Starts a broadcast of the `tensor` of rank `root` of the run into that of all `ranks`."""
        return self.start(Offer("broadcast", tensor, tensor, root), ranks)

    def start_reduce(self, tensor: Tensor, root: int, ranks: Ranks) -> Pending:
        """Starts a reduce (sum) of `tensor` over `ranks` to rank `root`; the other ranks' tensors are lost."""
        return self.start(Offer("reduce", tensor, tensor, root), ranks)

    def all_reduce(self, tensor: Tensor, ranks: Ranks) -> None:
        """Sums `tensor` in place over `ranks`; blocks."""
        self.start_sum(tensor, ranks).wait()

    def share(self, size: int, ranks: tuple[int, ...], device: torch.device) -> Shared:
        """`size` zero bytes of each of `ranks` as shared memory; all call this; blocks. Raises E603 if impossible."""

    def watch(self, pending: Pending, *, gather: bool) -> Pending:
        """Wraps a gather, or a sum, through shared memory, for wrappers that observe waits."""
        return pending

    def finish_step(self, *, drain: bool = True) -> None:
        """Blocks until every started send is delivered, unless `drain` is False. Raises E703 if a posted message was
        never waited for."""

    def close(self) -> None:
        """Releases the transport's resources; no further calls."""


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

    def _room(self, like: Tensor) -> Tensor:
        """Host memory for a tensor; pinned memory is reused once copies from it have completed."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._device.type == "cuda")

    def _down(self, tensor: Tensor) -> Tensor:
        """A completed copy on the host."""
        host = self._room(tensor).copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return host
