"""One-sided windows (as in MPI): memory of a replica of a stage that others read and write, without collectives.

Each replica has one, with

    weights   the shard of the stage's weights that it steps
    slots     one per replica: that replica's gradients for the shard
    counters  the step that the weights are for, and the step for which its gradients are in all slots

and its ops do the following:

    GATHER    waits until the weights of all are those of this step, and copies them
    SCATTER   adds gradients to this rank's slots in all windows
    REDUCE    the same, then increments the counter
    VALIDATE  waits for the counters of all, then adds the slots in rank order: results do not depend on timing
    STEP      writes the new weights, then increments the counter

A replica has copied the weights of a step before it increments the counter of its gradients, and every STEP waits for
all counters: so no weights change while they are copied. New weights imply that their owner has added its slots, which
may then be written again. Replicas synchronise once per step, so each may gather in its own order, and as often as its
plan says (arXiv 2601.19362).

Processes of a host share memory by a file that exists only until all of them have mapped it.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.runtime.features.shards.pieces import ALIGNED
from zbc.runtime.transports.background import Background, Threaded
from zbc.runtime.transports.transport import Ranks, Transport

_SHORTEST, _LONGEST = 2e-5, 1e-3  # seconds between two polls of counters
_COUNTER = 8  # bytes: an int64
_WEIGHTS, _GRADIENTS = 0, 1  # indices of the counters
_CPU = torch.device("cpu")


class Window:
    """This rank's window, and its view of the windows of all `ranks`, which open theirs together. `weights`: bytes of
    its shard of the weights; `slot`: elements of type `kind` of the gradients of one shard."""

    def __init__(
        self, transport: Transport, ranks: Ranks, weights: int, slot: int, kind: torch.dtype, copier: WindowCopier
    ) -> None:
        self._mine, self._copier = ranks.index(transport.rank), copier
        start, width = _aligned(weights), _aligned(slot * kind.itemsize)
        counters = transport.share(2 * _COUNTER, ranks, _CPU)
        memory = transport.share(start + len(ranks) * width, ranks, copier.device)
        self._counters = [part.view(torch.int64) for part in counters.tensors]
        self._alive = counters.alive
        self._weights = [part[:weights] for part in memory.tensors]
        self._slots = [part[start:].view(len(ranks), width).view(kind)[:, :slot] for part in memory.tensors]
        self._step = 1  # counters are 0 at first

    @property
    def weights(self) -> Tensor:
        """The weights that others copy from this rank; `publish` once they are written."""
        return self._weights[self._mine]

    @property
    def slots(self) -> list[Tensor]:
        """The slots of this rank's gradients, by owner; `post` once they are written."""
        return [slots[self._mine] for slots in self._slots]

    def publish(self) -> None:
        """Marks the weights as written for the next step."""
        self._count(_WEIGHTS, self._step)

    def fetch(self, copy: Callable[[list[Tensor]], None]) -> Threaded:
        """Calls `copy` with the weights of all, by owner, once they are written, overlapped with the following ops."""
        step = self._step

        def run() -> None:
            self._wait(_WEIGHTS, step)
            copy(self._weights)

        return self._copier.start(run)

    def post(self) -> SlotSum:
        """Marks this rank's gradients of the step as written."""
        self._step += 1
        self._count(_GRADIENTS, self._step)
        return SlotSum(self, self._step)

    def posted(self, step: int) -> bool:
        """Whether all ranks have written their gradients of a step."""
        return self._all_count(_GRADIENTS, step)

    def added(self, step: int) -> Tensor:
        """The sum of this rank's slots, added into the first of them; blocks."""
        self._wait(_GRADIENTS, step)
        slots = self._slots[self._mine]
        for other in slots[1:]:
            slots[0].add_(other)
        return slots[0]

    def _count(self, which: int, step: int) -> None:
        def count() -> None:
            fence()
            self._counters[self._mine][which] = step

        self._copier.after(count)

    def _all_count(self, which: int, step: int) -> bool:
        return all(int(counters[which]) >= step for counters in self._counters)

    def _wait(self, which: int, step: int) -> None:
        pause = _SHORTEST
        while not self._all_count(which, step):
            self._alive()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        fence()


class SlotSum:
    """A sum of gradients in a window, as a `Pending`."""

    def __init__(self, window: Window, step: int) -> None:
        self._window, self._step = window, step
        self.total: Tensor  # after `wait`

    def wait(self) -> None:
        self.total = self._window.added(self._step)

    def ready(self) -> bool:
        return self._window.posted(self._step)


class WindowCopier:
    """A thread that waits for weights and copies them; on CUDA in a side stream, after the work enqueued on the current
    stream. Has not run on GPUs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._background = Background("zbc-windows")

    def start(self, run: Callable[[], None]) -> Threaded:
        stream = self._stream
        before = None if stream is None else torch.cuda.current_stream().record_event()

        def work() -> torch.cuda.Event | None:
            if stream is None or before is None:
                run()
                return None
            before.synchronize()
            with torch.cuda.stream(stream):
                run()
                over: torch.cuda.Event = stream.record_event()
                return over

        return Threaded(self._background.start(work))

    def after(self, count: Callable[[], None]) -> None:
        """Calls `count` once the work enqueued on the current stream has completed: on a CPU, at once."""
        if self._stream is None:
            count()
        else:
            self.start(count)


_turn = threading.Lock()


def fence() -> None:
    """A memory barrier: earlier writes of this thread are visible before later ones, likewise for reads. Releasing and
    taking a lock is a barrier, also if memory is not ordered as on x86."""
    for _ in range(2):
        _turn.acquire()
        _turn.release()


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


NAME = 256  # bytes of the message with which ranks exchange paths
_FOLDER = Path("/dev/shm")
COLLECTIVE = 'set parallel.exchange = "collective"'

Exchange = Callable[[bytes], list[bytes]]  # an all-gather over the ranks


def share(size: int, rank: int, ranks: tuple[int, ...], exchange: Exchange) -> list[Tensor]:
    """`size` zero bytes of each of `ranks`, which all call this. Raises E603 if one cannot make or map them."""
    made, problem = _make(size)
    names = exchange(b"" if made is None else os.fsencode(made))
    maps = list[Tensor]()
    for peer, name in zip(ranks, names, strict=True):
        if problem is not None:
            break
        if not name:
            problem = ZbcError("E603", f"run: rank {peer} cannot share memory with rank {rank}", hint=COLLECTIVE)
            break
        path = os.fsdecode(name)
        try:
            if not Path(path).exists():  # torch would create it
                raise FileNotFoundError(f"{path} is not there")
            maps.append(torch.from_file(path, shared=True, size=size, dtype=torch.uint8))
        except (OSError, RuntimeError) as error:
            text = f"run: rank {rank} cannot see the memory of rank {peer}: they are on two hosts, or in two containers"
            problem = ZbcError("E603", text, details=[str(error).splitlines()[0][:200]], hint=COLLECTIVE)
    said = exchange(b"" if problem is None else b"!")  # all ranks have mapped all files
    if made is not None:
        Path(made).unlink(missing_ok=True)
    if problem is not None:
        raise problem
    if any(said):
        failed = ", ".join(str(peer) for peer, word in zip(ranks, said, strict=True) if word)
        raise ZbcError("E603", f"run: rank {failed} cannot share memory with rank {rank}", hint=COLLECTIVE)
    return maps


def _make(size: int) -> tuple[str | None, ZbcError | None]:
    folder = _FOLDER if os.access(_FOLDER, os.W_OK) else Path(tempfile.gettempdir())
    path = None
    try:
        handle, path = tempfile.mkstemp(prefix="zbc-", dir=folder)
        try:
            extend = getattr(os, "posix_fallocate", lambda file, start, size: os.ftruncate(file, start + size))
            extend(handle, 0, size)  # too little memory is an error here, not later
        finally:
            os.close(handle)
        if len(os.fsencode(path)) >= NAME:
            raise OSError(f"the path {path} is too long")
    except OSError as error:
        if path is not None:
            Path(path).unlink(missing_ok=True)
        text = f"run: no {size:,} bytes of shared memory in {folder}: {error.strerror or error}"
        return None, ZbcError("E603", text, hint=f"make {folder} larger (docker: --shm-size), or {COLLECTIVE}")
    return path, None
