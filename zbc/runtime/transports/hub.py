"""All ranks in one process: a transport whose ranks are threads.

It is stricter than networks: it checks shapes, dtypes and peers of each message, fills receive buffers with NaN, and
raises at once when all ranks wait and none can go on. A message is copied into its buffer by `wait`, so that a reader
that does not wait computes with NaN; a `prompt` hub copies it as soon as it is both sent and posted, as networks do,
and no longer holds the sender's tensor.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.runtime.seeding import let_go
from zbc.runtime.transports.transport import Letter, Offer, Ranks, Shared, Transport


@dataclass
class Round:
    ranks: tuple[int, ...]
    offers: dict[int, Offer] = field(default_factory=dict)
    over: bool = False
    ended: torch.cuda.Event | None = None  # when it has completed on the device, if ranks have streams


class Hub:
    """The state shared by all ranks. `end(rank)` is the transport of a rank; `leave(rank)` ends its participation."""

    def __init__(self, ranks: int, *, prompt: bool = False, inside: Iterable[tuple[int, ...]] = ()) -> None:
        """`inside`: sets of ranks with collectives inside of ops."""
        self._lock = threading.Lock()
        self._buffers: dict[tuple[int, Letter], Tensor] | None = {} if prompt else None
        self._wake = [threading.Condition(self._lock) for _ in range(ranks)]
        self._letters: dict[tuple[int, Letter], tuple[int, Tensor]] = {}  # (to, message) -> from, tensor
        self._rounds: dict[tuple[tuple[int, ...], int], Round] = {}  # ranks, number of the collective -> its state
        self._joined: dict[tuple[int, tuple[int, ...]], int] = {}  # rank, ranks -> collectives that it has started
        self._queues: list[deque[tuple[tuple[int, ...], int]]] = [deque() for _ in range(ranks)]
        self._shared: dict[tuple[tuple[int, ...], int], dict[int, Tensor]] = {}  # ranks, number -> memory of each rank
        self._blocked: dict[int, tuple[Callable[[], bool], str]] = {}  # rank -> condition and text of its wait
        self._left: set[int] = set()
        self._failure: tuple[int, str] | None = None
        self.ranks = ranks
        self._inside = {*inside}

    def end(self, rank: int) -> HubTransport:
        return HubTransport(self, rank)

    def leave(self, rank: int) -> None:
        """The rank makes no more calls; raises in the others if all of them wait and none can go on."""
        with self._lock:
            self._left.add(rank)
            if self._stuck():
                self._fail(rank, self._explain())

    def poison(self, rank: int, reason: str) -> None:
        """`rank` failed: every call that waits, and every later one, raises E702 with the reason."""
        with self._lock:
            self._fail(rank, reason)

    # ---- for the transports; `_lock` is held in the private ones ------------------------------------------------

    def put(self, source: int, message: Letter, tensor: Tensor, peer: int) -> None:
        with self._lock:
            self._check()
            if (peer, message) in self._letters:
                raise ZbcError("E703", f"run: {message.send} was sent twice", where=f"rank {source}")
            self._letters[peer, message] = source, tensor
            self._wake[peer].notify()
            self._deliver((peer, message))

    def post(self, rank: int, message: Letter, buffer: Tensor) -> None:
        """Registers the buffer of a message, for a `prompt` hub."""
        if self._buffers is not None:
            with self._lock:
                self._buffers[rank, message] = buffer
                self._deliver((rank, message))

    def _deliver(self, place: tuple[int, Letter]) -> None:
        """Copies a message that was sent into its posted buffer, if it fits; `take` raises if it does not."""
        if self._buffers is None or place not in self._letters or place not in self._buffers:
            return
        buffer, (source, tensor) = self._buffers.pop(place), self._letters[place]
        if tensor.shape == buffer.shape and tensor.dtype is buffer.dtype:
            self._letters[place] = source, buffer.copy_(tensor)

    def take(self, rank: int, message: Letter, peer: int) -> Tensor:
        place = rank, message
        with self._lock:
            self._block(rank, lambda: place in self._letters, f"{message.recv} from rank {peer}")
            source, tensor = self._letters.pop(place)
            self._wake[source].notify()
        if source != peer:
            text = f"run: {message.recv} came from rank {source}, the plan says rank {peer}"
            raise ZbcError("E703", text, where=f"rank {rank}")
        return tensor

    def there(self, rank: int, message: Letter) -> bool:
        """Whether `take` would return or raise at once."""
        with self._lock:
            return (rank, message) in self._letters or self._failure is not None

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def drain(self, rank: int) -> None:
        with self._lock:
            sent = self._letters.values
            self._block(rank, lambda: all(source != rank for source, _ in sent()), "the delivery of what it sent")

    def join(self, rank: int, offer: Offer, ranks: tuple[int, ...]) -> Round:
        """Starts a collective of `ranks`. A rank's collectives run in the order in which it starts them, as on one
        device; only collectives inside of ops do not queue after sums that were started before."""
        with self._lock:
            self._check()
            if rank not in ranks:
                text = f"run: a collective over ranks {', '.join(map(str, ranks))}, to which it does not belong"
                raise ZbcError("E703", text, where=f"rank {rank}")
            number = self._joined.get((rank, ranks), 0)
            self._joined[rank, ranks] = number + 1
            meeting = self._rounds.setdefault((ranks, number), Round(ranks))
            meeting.offers[rank] = offer
            if ranks not in self._inside and offer.what != "swap":
                self._queues[rank].append((ranks, number))
                self._meet()
            elif len(meeting.offers) == len(ranks):
                self._end(self._rounds.pop((ranks, number)))
            return meeting

    def complete(self, rank: int, meeting: Round) -> None:
        with let_go(), self._lock:
            self._block(rank, lambda: meeting.over, f"a sum over ranks {', '.join(map(str, meeting.ranks))}")

    def share(self, rank: int, memory: Tensor, ranks: tuple[int, ...], number: int) -> list[Tensor]:
        """Waits for the memory of all `ranks` in their `number`th call."""
        with self._lock:
            memories = self._shared.setdefault((ranks, number), {})
            memories[rank] = memory
            for r in ranks:
                self._wake[r].notify()
            self._block(rank, lambda: len(memories) == len(ranks), f"memory of ranks {', '.join(map(str, ranks))}")
            return [memories[r] for r in ranks]

    def alive(self) -> None:
        """Raises E702 once a rank has failed."""
        with self._lock:
            self._check()

    def _meet(self) -> None:
        """Runs every collective that is first in the queues of all its ranks."""
        waiting = True
        while waiting:
            waiting = False
            for queue in self._queues:
                key = queue[0] if queue else None
                if key is not None and all(self._queues[r] and self._queues[r][0] == key for r in key[0]):
                    waiting = True
                    for r in key[0]:
                        self._queues[r].popleft()
                    self._end(self._rounds.pop(key))

    def _end(self, meeting: Round) -> None:
        offers = [meeting.offers[r] for r in meeting.ranks]
        _combine(offers, meeting.ranks)
        following = [offer.then for offer in offers if offer.then is not None]
        if following:
            made = [then.make() for then in following]
            _combine([Offer("reduce", tensor, tensor, root=following[0].root) for tensor in made], meeting.ranks)
        meeting.offers.clear()  # ranks that still wait for it do not hold the others' tensors
        meeting.over = True
        for r in meeting.ranks:
            self._wake[r].notify()

    def _block(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        self._check()
        while not ready():
            self._blocked[rank] = ready, what
            try:
                if self._stuck():
                    text = self._explain()
                    self._fail(rank, text)
                    raise ZbcError("E703", text, details=self._waits())
                self._wake[rank].wait()
            finally:
                del self._blocked[rank]
            self._check()

    def _check(self) -> None:
        if self._failure is not None:
            rank, reason = self._failure
            raise ZbcError("E702", f"run: stopped, because rank {rank} failed: {reason}")

    def _fail(self, rank: int, reason: str) -> None:
        self._failure = self._failure or (rank, reason)
        for condition in self._wake:
            condition.notify_all()

    def _stuck(self) -> bool:
        """Whether every running rank is blocked, and none can go on."""
        return (
            bool(self._blocked)
            and len(self._blocked.keys() | self._left) == self.ranks
            and not any(ready() for ready, _ in self._blocked.values())
        )

    def _explain(self) -> str:
        return "all ranks wait for what cannot come: " + "; ".join(self._waits())

    def _waits(self) -> list[str]:
        waits = [f"rank {rank} waits for {what}" for rank, (_, what) in sorted(self._blocked.items())]
        letters = sorted(((source, message, to) for (to, message), (source, _) in self._letters.items()), key=str)
        return [*waits, *(f"rank {source} sent {m.send}, which rank {to} does not take" for source, m, to in letters)]


@torch.no_grad()  # by whoever comes last, in the middle of any op
def _combine(offers: Sequence[Offer], ranks: tuple[int, ...]) -> None:
    """Runs a collective, for which all offers are of one kind; sums are in the order of the ranks."""
    if offers[0].what == "swap":
        parts = [torch.split(offer.source, list(offer.rows)) for offer in offers]
        for place, offer in enumerate(offers):
            torch.cat([mine[place] for mine in parts], out=offer.target)
        return
    shapes = {(offer.what, tuple(offer.source.shape), offer.source.dtype, offer.root) for offer in offers}
    if len(shapes) > 1:
        text = f"run: ranks sum tensors of different shapes: {sorted(map(str, shapes))}"
        raise ZbcError("E703", text, where=f"rank {ranks[0]}")
    what, root = offers[0].what, offers[0].root
    if what == "broadcast":
        sent = offers[ranks.index(root)].source
        for offer in offers:
            if offer.target is not sent:
                offer.target.copy_(sent)
        return
    if what == "gather":
        for offer in offers:
            for row, other in zip(offer.target, offers, strict=True):
                row.copy_(other.source)
        return
    if what == "scatter":  # without a temporary: the memory of ranks is measured
        for index, offer in enumerate(offers):
            offer.target.copy_(offers[0].source[index])
            for other in offers[1:]:
                offer.target.add_(other.source[index])
        return
    total = offers[0].target  # source and target are the same tensor; no temporary here, too
    for offer in offers[1:]:
        total += offer.source
    for rank, offer in zip(ranks, offers, strict=True):
        if what == "sum" or rank == root:
            offer.target.copy_(total)
    for rank, offer in zip(ranks, offers, strict=True):
        if what == "reduce" and rank != root:
            offer.target.fill_(torch.nan)  # undefined on networks


class Started(NamedTuple):
    hub: Hub
    rank: int
    meeting: Round
    held: tuple[Tensor, Tensor]  # as networks hold a rank's tensors

    def wait(self) -> None:
        self.hub.complete(self.rank, self.meeting)

    def ready(self) -> bool:
        return self.meeting.over or self.hub.failed


class HubTransport(Transport):
    """A `Transport`: one rank's end of a hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub, self.rank = hub, rank
        self._posted: dict[Letter, tuple[Tensor, int]] = {}
        self._shares = Counter[tuple[int, ...]]()

    def send(self, message: Letter, tensor: Tensor, peer: int) -> None:
        self._hub.put(self.rank, message, tensor, peer)

    def post(self, message: Letter, buffer: Tensor, peer: int) -> None:
        if message in self._posted:
            raise ZbcError("E703", f"run: {message.recv} was posted twice", where=f"rank {self.rank}")
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
        self._posted[message] = buffer, peer
        self._hub.post(self.rank, message, buffer)

    def wait(self, message: Letter) -> Tensor:
        try:
            buffer, peer = self._posted.pop(message)
        except KeyError:
            text = f"run: {message.recv} is needed but was not posted"
            raise ZbcError("E703", text, where=f"rank {self.rank}") from None
        tensor = self._hub.take(self.rank, message, peer)
        if tensor.shape != buffer.shape or tensor.dtype is not buffer.dtype:
            found, wanted = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (tensor, buffer))
            text = f"run: {message.recv} got {found} from rank {peer}, its buffer is {wanted}"
            raise ZbcError("E505", text, where=f"rank {self.rank}")
        return buffer if tensor is buffer else buffer.copy_(tensor)

    def ready(self, message: Letter) -> bool:
        return message not in self._posted or self._hub.there(self.rank, message)

    def start(self, offer: Offer, ranks: Ranks) -> Started:
        arrives = offer.what == "swap" or (offer.what == "broadcast" and self.rank != offer.root)
        if arrives and offer.target.is_floating_point():
            offer.target.fill_(torch.nan)
        return Started(self._hub, self.rank, self._hub.join(self.rank, offer, ranks), (offer.source, offer.target))

    def share(self, size: int, ranks: tuple[int, ...], device: torch.device) -> Shared:
        memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._shares[ranks] += 1
        return Shared(self._hub.share(self.rank, memory, ranks, self._shares[ranks]), self._hub.alive)

    def finish_step(self, *, drain: bool = True) -> None:
        if self._posted:
            names = ", ".join(str(message.recv) for message in self._posted)
            raise ZbcError("E703", f"run: received but never used: {names}", where=f"rank {self.rank}")
        if drain:
            self._hub.drain(self.rank)

    def close(self) -> None:
        self._hub.leave(self.rank)
