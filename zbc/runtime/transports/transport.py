"""How tensors move between ranks. Handlers see only this protocol; `hub.py` and `network.py` implement it.

Messages are matched by what they are (`ir.Message`: direction, stage, microbatch, pipe, slice), never by arrival
order. Shapes and dtypes are fixed by the plan: the receiver owns the buffer before the message comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zbc.ir import Kind, Message


class Again(NamedTuple):
    """A message of a forward that runs again."""

    message: Message

    @property
    def send(self) -> str:
        return f"{self.message.send} again"

    @property
    def recv(self) -> str:
        return f"{self.message.recv} again"


class Signal(NamedTuple):
    """Numbers from a rank to the next (NORM) or back (VERDICT), once a step."""

    kind: Kind

    @property
    def send(self) -> str:
        return self.kind.value

    @property
    def recv(self) -> str:
        return self.kind.value


Letter = Message | Again | Signal
Ranks = tuple[int, ...]


class Then(NamedTuple):
    """What follows a gather at once, beside the rank's own work: when all rows are there every rank calls `make`, and
    what that returns is summed into that of rank `root` of the run."""

    make: Callable[[], Tensor]
    root: int


class Pending(Protocol):
    """A collective that was started. Those of one rank happen in the order in which it starts them.

    It holds its tensors until it was waited for: on cuda another stream works on them, and memory that is given back is
    used again at once.
    """

    def wait(self) -> None:
        """Block until it has happened (on cuda: make the current stream wait)."""

    def ready(self) -> bool:
        """Whether it has happened; also where `wait` would raise."""


class Shared(NamedTuple):
    """Memory of several ranks that all of them see."""

    tensors: list[Tensor]  # of bytes, by rank
    alive: Callable[[], None]  # raises E702 once a rank is known to have failed; from any thread


class Transport(Protocol):
    """One rank's end. All methods are called from the rank's own thread."""

    rank: int

    def send(self, message: Letter, tensor: Tensor, peer: int) -> None:
        """Start sending; return at once. The transport keeps `tensor` alive until it is delivered."""

    def post(self, message: Letter, buffer: Tensor, peer: int) -> None:
        """Announce the buffer a message is to arrive in; return at once."""

    def wait(self, message: Letter) -> Tensor:
        """Block until a posted message is in its buffer; return the buffer."""

    def ready(self, message: Letter) -> bool:
        """Whether a posted message is there; also where `wait` would raise."""

    def start_sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        """Start to sum `tensor` in place over `ranks`, which all call this."""

    def start_scatter(self, parts: Tensor, mine: Tensor, ranks: tuple[int, ...]) -> Pending:
        """Start to sum `parts` over `ranks`; its row of the result (one per rank) goes into each rank's `mine`."""

    def start_gather(self, mine: Tensor, parts: Tensor, ranks: tuple[int, ...], then: Then | None = None) -> Pending:
        """Start to collect every rank's `mine` as the rows of `parts`; with `then` it is over when that is."""

    def start_swap(self, mine: Tensor, out: Sequence[int], parts: Tensor, into: Sequence[int], ranks: Ranks) -> Pending:
        """Start to give each of `ranks` its rows of `mine`, `out` of them, and to take theirs into `parts`, `into` of
        them; inside of an op, so that it waits for no sum that was started before."""

    def start_broadcast(self, tensor: Tensor, root: int, ranks: tuple[int, ...]) -> Pending:
        """Start to send the `tensor` of rank `root` of the run to all `ranks`, into theirs."""

    def start_reduce(self, tensor: Tensor, root: int, ranks: tuple[int, ...]) -> Pending:
        """Start to sum `tensor` over `ranks` into that of rank `root`; those of the others are lost."""

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Sum `tensor` in place over `ranks`, which all call this; blocks."""

    def share(self, size: int, ranks: tuple[int, ...], device: torch.device) -> Shared:
        """`size` bytes of zeros of each of `ranks`, which all call this; blocks. Raises E620 where they cannot."""

    def watch(self, pending: Pending, *, gather: bool) -> Pending:
        """What is to be waited for in place of a gather, or a sum, that goes by way of such memory."""

    def finish_step(self, *, drain: bool = True) -> None:
        """Block until every started send is delivered, unless `drain` is False.

        Raises E703 if a posted message was never waited for.
        """

    def close(self) -> None:
        """Release what the transport holds; no further calls."""
