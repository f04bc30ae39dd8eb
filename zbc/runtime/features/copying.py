"""Copies of activations to the host and back, beside the compute of a rank.

    ThreadCopier   ranks on a CPU: a thread copies into slabs of ordinary memory, one copy at a time
    StreamCopier   ranks on a GPU: a stream for each direction, and slabs of pinned memory

What is copied are whole storages, `Piece`s of a slab. Who needs the end of a copy asks its ticket.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, UntypedStorage

from zbc.errors import ZbcError


class Ticket(Protocol):
    """A copy that was started."""

    def result(self) -> object:
        """Let the compute of the rank wait for its end. Raises what the copy raised."""

    def done(self) -> bool: ...


@dataclass(eq=False)
class Slab:
    """Host memory of one parcel at a time; `read` is the last copy that reads it."""

    memory: Tensor
    read: Ticket | None = field(default=None)


class Piece(NamedTuple):
    """A storage on the device, and where in the slab its bytes go."""

    storage: UntypedStorage
    at: int


_Copy = Callable[[Slab, Sequence[Piece]], None]


class Copier(Protocol):
    """What copies for one rank. With a list in `spans` it adds to it, for each copy in the order in which they are
    started, when it begins and ends: ns, or on a GPU events, which are known once compute has waited for the copy."""

    spans: list[list[Any]] | None

    def slab(self, size: int) -> Tensor:
        """Bytes of the host."""

    def take(self, size: int) -> UntypedStorage:
        """Memory on the device for what comes back."""

    def out(self, slab: Slab, pieces: Sequence[Piece]) -> Ticket: ...
    def release(self, storage: UntypedStorage) -> None:
        """Nobody needs it on the device any more; called behind the wait for the copy out."""

    def back(self, slab: Slab, pieces: Sequence[Piece], gone: Ticket) -> Ticket:
        """Copy into the pieces, behind `gone`, the copy out of the same parcel."""

    def close(self) -> None: ...


class HostMemory:
    """What copiers on a CPU have in common: device and host are the same memory."""

    spans: list[list[Any]] | None = None

    def slab(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def take(self, size: int) -> UntypedStorage:
        return torch.empty(size, dtype=torch.uint8).untyped_storage()

    def release(self, storage: UntypedStorage) -> None:
        pass

    def close(self) -> None:
        pass


class ThreadCopier(HostMemory):
    """Copies in the order they are started, in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zbc-copies")

    def out(self, slab: Slab, pieces: Sequence[Piece]) -> Future[None]:
        return self._start(copy_out, slab, pieces)

    def back(self, slab: Slab, pieces: Sequence[Piece], gone: Ticket) -> Future[None]:
        return self._start(copy_back, slab, pieces)

    def _start(self, copy: _Copy, slab: Slab, pieces: Sequence[Piece]) -> Future[None]:
        if self.spans is None:
            return self._thread.submit(copy, slab, pieces)
        self.spans.append([])
        return self._thread.submit(_timed, copy, slab, pieces, self.spans[-1])

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def copy_out(slab: Slab, pieces: Sequence[Piece]) -> None:
    """By memmove, which lets other threads run; torch's own copy would wake as many threads as there are cores."""
    start = slab.memory.data_ptr()
    for storage, at in pieces:
        ctypes.memmove(start + at, storage.data_ptr(), storage.nbytes())


def copy_back(slab: Slab, pieces: Sequence[Piece]) -> None:
    start = slab.memory.data_ptr()
    for storage, at in pieces:
        ctypes.memmove(storage.data_ptr(), start + at, storage.nbytes())


def _timed(copy: _Copy, slab: Slab, pieces: Sequence[Piece], span: list[int]) -> None:
    span.append(time.perf_counter_ns())
    copy(slab, pieces)
    span.append(time.perf_counter_ns())


class _Recorded(NamedTuple):
    """A copy on a stream, over when its event is."""

    event: torch.cuda.Event

    def result(self) -> None:
        """The host goes on; the stream of compute waits."""
        torch.cuda.current_stream().wait_event(self.event)

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class StreamCopier:
    """Copies on a GPU. No host waits for a device, and no memory changes its stream: what is copied out is released
    behind the compute stream's wait for the copy, what comes back is taken on that stream."""

    spans: list[list[Any]] | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = _stream(device), _stream(device)

    def slab(self, size: int) -> Tensor:
        """Pinned. Raises E619. It may stop the device for a moment, so slabs are made once and kept."""
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            text = f"run: {size / 2**20:.1f} MiB of pinned host memory for activations cannot be had ({error})"
            hint = "raise the limit of locked memory (ulimit -l), or let fewer stages move: memory.activations"
            raise ZbcError("E619", text, hint=hint) from error

    def take(self, size: int) -> UntypedStorage:
        return torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()

    def release(self, storage: UntypedStorage) -> None:
        pass

    def out(self, slab: Slab, pieces: Sequence[Piece]) -> _Recorded:
        """Behind the F that made the pieces, and behind the last copy out of this slab: it may be read still."""
        waits = [_now()]  # of the compute stream, which is another one inside
        if isinstance(slab.read, _Recorded):
            waits.append(slab.read.event)
        with torch.cuda.stream(self._out):
            for event in waits:
                self._out.wait_event(event)
            begin = self._began()
            for storage, at in pieces:
                slab.memory[at : at + storage.nbytes()].copy_(_bytes(storage), non_blocking=True)
            return self._over(begin)

    def back(self, slab: Slab, pieces: Sequence[Piece], gone: Ticket) -> _Recorded:
        """Behind who had the memory before, and behind the parcel's own copy out."""
        waits = [_now()]
        if isinstance(gone, _Recorded):
            waits.append(gone.event)
        with torch.cuda.stream(self._back):
            for event in waits:
                self._back.wait_event(event)
            begin = self._began()
            for storage, at in pieces:
                _bytes(storage).copy_(slab.memory[at : at + storage.nbytes()], non_blocking=True)
            return self._over(begin)

    def _began(self) -> torch.cuda.Event | None:
        return None if self.spans is None else _now(timed=True)

    def _over(self, begin: torch.cuda.Event | None) -> _Recorded:
        end = _now(timed=begin is not None)
        if self.spans is not None:
            self.spans.append([begin, end])
        return _Recorded(end)

    def close(self) -> None:
        pass


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _now(*, timed: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def copier_for(device: torch.device) -> Copier:
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()
