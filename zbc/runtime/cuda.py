"""Code for GPUs only: a clock of stream events, offload overlapped with compute, ranks as threads that share a GPU.

Tests on a CPU run it with stand-ins only (tests/runtime/test_clock.py, test_copying.py, test_streams.py);
tests/runtime/test_on_a_gpu.py and bench/gpu.py run it. A few lines elsewhere use CUDA: transports/network.py (NCCL),
background.py and features/shards/windows.py (side streams), seeding.py (generators), core/validate.py (peaks).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from zbc.errors import ZbcError
from zbc.runtime.core.progress import Busy, Clock, Progress
from zbc.runtime.features.offload.copying import Copier, Piece, Slab, Ticket, bytes_of
from zbc.runtime.transports.hub import Hub, Round
from zbc.runtime.transports.transport import Letter, Offer

# ---- the clock -----------------------------------------------------------------------------------------------

# Compute ops that the host of a GPU may have started and that have not ended. While one runs the next one is launched.
# Driver queues hold a thousand launches, many ops: with that lead sent tensors would not be freed, and the watchdog
# could not tell in which op a rank hangs.
LEAD = 2


@dataclass(slots=True)
class _Sum:
    seconds: float = 0.0
    open: int = 0  # ops that have not ended, as far as the host knows


@dataclass(slots=True)
class _Mark:
    """A compute op that the host has started: events on the stream after its inputs have arrived and at its end."""

    place: Progress
    sum: _Sum
    begin: torch.cuda.Event
    end: torch.cuda.Event
    ended: bool = False  # whether `end` is on the stream


class CudaClock(Clock):
    """For cuda, where a call only enqueues work: measures it by events on the stream. Waits for events of the compute
    stream only, never for the whole device: that would wait for posted receives, too. `start` waits for the end of the
    op `LEAD` ops before; a proven plan allows that, since a rank's compute ops end in order."""

    def __init__(self, device: torch.device, progress: Progress) -> None:
        self._device, self._progress = device, progress
        self._marks: deque[_Mark] = deque()  # ops that have not ended, as far as the host knows
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._sum = _Sum()
        self._seen: tuple[_Mark | None, bool] = (None, False)  # the last state seen by `behind`
        self._since = 0.0  # when it first saw that state
        progress.behind = self.behind

    def start(self) -> float:
        while len(self._marks) >= LEAD:
            self._settle()
        begin, end = self._free.pop() if self._free else (_event(), _event())
        begin.record(torch.cuda.current_stream(self._device))
        self._sum.open += 1
        self._marks.append(_Mark(replace(self._progress, behind=None), self._sum, begin, end))
        return 0.0

    def stop(self, began: float) -> None:
        mark = self._marks[-1]
        mark.end.record(torch.cuda.current_stream(self._device))
        mark.ended = True

    def read(self) -> Busy:
        total, self._sum = self._sum, _Sum()

        def busy() -> float:
            while total.open:
                self._settle()
            return total.seconds

        return busy

    def _settle(self) -> None:
        """Waits until the oldest op has ended, and adds its time."""
        mark = self._marks[0]
        mark.end.synchronize()
        mark.sum.seconds += mark.begin.elapsed_time(mark.end) / 1e3
        mark.sum.open -= 1
        self._marks.popleft()
        self._free.append((mark.begin, mark.end))

    def behind(self, now: float) -> Progress:
        """The op the device is in, seen from the watchdog's thread; `waiting` until the op's inputs have arrived. If
        the device has completed all its work, this is the op that the host is in."""
        torch.cuda.set_device(self._device)
        try:
            mark = next((mark for mark in tuple(self._marks) if not (mark.ended and _passed(mark.end))), None)
            begun = mark is not None and _passed(mark.begin)
        except RuntimeError:  # the device has failed, which the rank's own thread will report
            return self._progress
        if self._seen[0] is not mark or self._seen[1] is not begun:
            self._seen, self._since = (mark, begun), now
        if mark is None:
            return replace(self._progress, since=max(self._progress.since, self._since))
        return replace(mark.place, waiting=not begun, since=self._since)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


# ---- copies to the host --------------------------------------------------------------------------------------


class Pinned:
    """`memory` (size,) of bytes of the host, pinned: a GPU copies from and to it asynchronously. It is ordinary memory
    that is pinned afterwards: torch's pinned allocations are powers of two, up to twice the size."""

    def __init__(self, size: int) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8)
        if size:
            torch.cuda.check_error(int(_runtime().cudaHostRegister(self.memory.data_ptr(), size, 0)))

    def close(self) -> None:
        """Must be called before the memory is freed."""
        if len(self.memory):
            torch.cuda.check_error(int(_runtime().cudaHostUnregister(self.memory.data_ptr())))


_IN_USE: list[Pinned] = []  # slabs whose copies had not ended


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Recorded(NamedTuple):
    """A copy on a stream, completed when its event is."""

    event: torch.cuda.Event

    def result(self) -> None:
        """Makes the compute stream wait; the host does not."""
        torch.cuda.current_stream().wait_event(self.event)

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class StreamCopier(Copier):
    """Copies on a GPU. The host never waits for the device, and no memory changes its stream: offloaded memory is freed
    after the compute stream's wait for the copy, memory to reload into is allocated on that stream."""

    def __init__(self, device: torch.device, *, duplex: bool) -> None:
        self.device, self._out, self._slabs = device, _stream(device), list[Pinned]()
        self._back = _stream(device) if duplex else self._out

    def slab(self, size: int) -> Tensor:
        """Pinned host memory. Raises E603. Allocation may stall the device, so slabs are made once and kept."""
        try:
            self._slabs.append(Pinned(size))
        except RuntimeError as error:
            text = f"run: {size / 2**20:.1f} MiB of pinned host memory for activations cannot be had ({error})"
            hint = "raise the limit of locked memory (ulimit -l), or let fewer stages move: memory.activations"
            raise ZbcError("E603", text, hint=hint) from error
        return self._slabs[-1].memory

    def take(self, size: int) -> UntypedStorage:
        return torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()

    def out(self, slab: Slab, pieces: Sequence[Piece]) -> _Recorded:
        """Offloads after the F that made the pieces, and after the last copy that reads this slab."""
        pairs = [(slab.memory[at : at + storage.nbytes()], bytes_of(storage)) for storage, at in pieces]
        return self._copy(self._out, slab.read, pairs)

    def back(self, slab: Slab, pieces: Sequence[Piece], gone: Ticket) -> _Recorded:
        """Reloads after the previous use of the memory, and after the parcel's own offload."""
        pairs = [(bytes_of(storage), slab.memory[at : at + storage.nbytes()]) for storage, at in pieces]
        return self._copy(self._back, gone, pairs)

    def _copy(self, stream: torch.cuda.Stream, last: Ticket | None, pairs: list[tuple[Tensor, Tensor]]) -> _Recorded:
        """Copies after the work enqueued on the compute stream so far, and after `last`."""
        now = _now()  # of the compute stream, which is not current inside
        with torch.cuda.stream(stream):
            for event in (now, last.event) if isinstance(last, _Recorded) else (now,):
                stream.wait_event(event)
            begin = None if self.spans is None else _now(timed=True)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            end = _now(timed=begin is not None)
            if self.spans is not None:
                self.spans.append([begin, end])
            return _Recorded(end)

    def close(self) -> None:
        """Frees the slabs, unless a copy runs, as where a rank has failed: it must not wait for the device."""
        if not (self._out.query() and self._back.query()):
            _IN_USE.extend(self._slabs)
            return
        for slab in self._slabs:
            slab.close()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _now(*, timed: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record()
    return event


# ---- ranks as threads that share a GPU -----------------------------------------------------------------------


class StreamHub(Hub):
    """A hub whose ranks each have a stream of their own, current in their threads.

    A thread reaches a message or a collective while its tensors may still be computed. So a sender records an event,
    for which the receiver's stream waits; the last rank to reach a collective computes it on its own stream, after the
    events of all ranks, and the stream of each rank waits for its end. The host never waits for the device here.
    """

    def __init__(self, ranks: int, *, inside: Iterable[tuple[int, ...]] = ()) -> None:
        super().__init__(ranks, inside=inside)
        self._made: dict[tuple[int, Letter], torch.cuda.Event] = {}  # (to, message) -> when its tensor is computed

    def put(self, source: int, message: Letter, tensor: Tensor, peer: int) -> None:
        self._made[peer, message] = _now()  # before the receiver can take it
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


def _after(event: torch.cuda.Event, *tensors: Tensor) -> None:
    """Makes the current stream wait for `event` before it uses `tensors` of another stream; their memory is not reused
    before that use has completed."""
    stream = torch.cuda.current_stream()
    stream.wait_event(event)
    for tensor in tensors:
        tensor.record_stream(stream)
