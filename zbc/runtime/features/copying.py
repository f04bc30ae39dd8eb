"""Copies of activations to the host and back, beside the compute of a rank.

    ThreadCopier   ranks on a CPU: a thread copies into slabs of ordinary memory, one copy at a time
    StreamCopier   ranks on a GPU: a stream for each direction, and slabs of pinned memory (runtime/cuda.py)

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


def bytes_of(storage: UntypedStorage) -> Tensor:
    """All of a storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def copier_for(device: torch.device) -> Copier:
    if device.type != "cuda":
        return ThreadCopier()
    from zbc.runtime.cuda import StreamCopier

    return StreamCopier(device)
