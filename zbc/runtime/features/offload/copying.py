"""Copies that offload and reload activations, overlapped with the compute of a rank.

    ThreadCopier   ranks on a CPU: a thread copies into slabs of ordinary memory
    StreamCopier   ranks on a GPU: a stream, and slabs of pinned memory (runtime/cuda.py)

A rank runs one copy at a time, or with a plan that is `duplex` one in each direction: on a thread or a stream for each.
Whole storages are copied, each to its `Piece` of a slab. The ticket of a copy waits for its end.
"""

from __future__ import annotations

import ctypes
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, UntypedStorage


class Ticket(Protocol):
    def result(self) -> object:
        """Makes the compute of the rank wait for its end. Raises the copy's error."""

    def done(self) -> bool: ...


@dataclass(eq=False)
class Slab:
    """Host memory of one parcel at a time; `read` is the last copy that reads it."""

    memory: Tensor
    read: Ticket | None = field(default=None)


class Piece(NamedTuple):
    """A storage on the device, and the offset of its bytes in the slab."""

    storage: UntypedStorage
    at: int


_Copy = Callable[[Slab, Sequence[Piece]], None]


class Copier:
    """Copies for one rank. If `spans` is a list, it appends the start and end of each copy, in the order in which they
    are started: ns, or on a GPU events, which are completed once compute has waited for the copy. On a CPU device and
    host are the same memory."""

    spans: list[list[Any]] | None = None

    def slab(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def take(self, size: int) -> UntypedStorage:
        """Memory on the device to reload into."""
        return torch.empty(size, dtype=torch.uint8).untyped_storage()

    @abstractmethod
    def out(self, slab: Slab, pieces: Sequence[Piece]) -> Ticket: ...
    def release(self, storage: UntypedStorage) -> None:
        """Frees the device memory of an offloaded storage; called after the wait for its offload."""

    @abstractmethod
    def back(self, slab: Slab, pieces: Sequence[Piece], gone: Ticket) -> Ticket:
        """Reloads the pieces, after `gone`, the offload of the same parcel."""

    def close(self) -> None:
        """Ends its threads, frees its slabs."""


class ThreadCopier(Copier):
    """Copies in the order they are started, in a thread of its own, or in one for each direction: RELEASE and the
    backward wait for what the other direction would have to wait for."""

    def __init__(self, *, duplex: bool) -> None:
        threads = [ThreadPoolExecutor(1, thread_name_prefix="zbc-copies") for _ in range(1 + duplex)]
        self._out, self._back = threads[0], threads[-1]

    def out(self, slab: Slab, pieces: Sequence[Piece]) -> Future[None]:
        return self._start(self._out, copy_out, slab, pieces)

    def back(self, slab: Slab, pieces: Sequence[Piece], gone: Ticket) -> Future[None]:
        return self._start(self._back, copy_back, slab, pieces)

    def _start(self, thread: ThreadPoolExecutor, copy: _Copy, slab: Slab, pieces: Sequence[Piece]) -> Future[None]:
        if self.spans is None:
            return thread.submit(copy, slab, pieces)
        self.spans.append([])
        return thread.submit(_timed, copy, slab, pieces, self.spans[-1])

    def close(self) -> None:
        for thread in (self._out, self._back):
            thread.shutdown(wait=False, cancel_futures=True)


def copy_out(slab: Slab, pieces: Sequence[Piece]) -> None:
    """Copies by memmove, which releases the GIL; torch's own copy would wake as many threads as there are cores."""
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
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def copier_for(device: torch.device, *, duplex: bool) -> Copier:
    if device.type != "cuda":
        return ThreadCopier(duplex=duplex)
    from zbc.runtime.cuda import StreamCopier

    return StreamCopier(device, duplex=duplex)
