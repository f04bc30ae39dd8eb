"""Windows (as in MPI): memory of one replica of a stage that the others read and write, in place of collectives.

Each replica has one, with

    weights   the part of the stage's weights that it steps
    slots     one for each replica: the gradients that this one has for that part
    counters  the step that the weights are for, and the step for which its gradients are in the slots of all

and what its ops do there is

    GATHER    wait until the weights of all are those of this step, and copy them
    SCATTER   add gradients to this rank's slots in all windows
    REDUCE    the same, then the counter
    VALIDATE  wait for the counters of all, then add the slots in the order of the ranks: bits do not depend on timing
    STEP      write the new weights, then the counter

A replica copies the last weights of a step before it counts its gradients, and every STEP follows the counters of all:
so nobody copies weights that change. Weights of the next step say that their owner has added its slots, which may then
be written again. Replicas wait for each other once per step, so each may gather in an order of its own, and as often as
its plan says (arXiv 2601.19362).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from zbc.runtime.features.flat import ALIGNED
from zbc.runtime.transports.background import Background
from zbc.runtime.transports.transport import Transport

_SHORTEST, _LONGEST = 2e-5, 1e-3  # seconds between two looks at counters
_COUNTER = 8  # bytes: an int64
_WEIGHTS, _GRADIENTS = 0, 1  # places of the counters
_CPU = torch.device("cpu")


class Window:
    """This rank's, and its view of those of all `ranks`, which open theirs together.

    `weights`: bytes of its part of the weights; `slot`: elements of type `kind` that the gradients of one part take.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: tuple[int, ...],
        weights: int,
        slot: int,
        kind: torch.dtype,
        device: torch.device,
        copier: WindowCopier,
    ) -> None:
        self._mine, self._copier = ranks.index(transport.rank), copier
        start, width = _aligned(weights), _aligned(slot * kind.itemsize)
        counters = transport.share(2 * _COUNTER, ranks, _CPU)
        memory = transport.share(start + len(ranks) * width, ranks, device)
        self._counters = [one.view(torch.int64) for one in counters.tensors]
        self._alive = counters.alive
        self._weights = [one[:weights] for one in memory.tensors]
        self._slots = [one[start:].view(len(ranks), width).view(kind)[:, :slot] for one in memory.tensors]
        self._step = 1  # counters are 0 at first
        self.bytes = start + len(ranks) * width

    @property
    def weights(self) -> Tensor:
        """What others copy from this rank; `publish` once it is written."""
        return self._weights[self._mine]

    @property
    def slots(self) -> list[Tensor]:
        """Where this rank's gradients go, by owner; `post` once they are written."""
        return [slots[self._mine] for slots in self._slots]

    def publish(self) -> None:
        """The weights are there for the step to come."""
        self._count(_WEIGHTS, self._step)

    def fetch(self, copy: Callable[[list[Tensor]], None]) -> Fetch:
        """Call `copy` with the weights of all, by owner, once they are there, beside the ops that follow."""
        step = self._step

        def run() -> None:
            self._wait(_WEIGHTS, step)
            copy(self._weights)

        return self._copier.start(run)

    def post(self) -> SlotSum:
        """All of this rank's gradients of the step are in the slots."""
        self._step += 1
        self._count(_GRADIENTS, self._step)
        return SlotSum(self, self._step)

    def posted(self, step: int) -> bool:
        """Whether those of all are there."""
        return self._all_count(_GRADIENTS, step)

    def added(self, step: int) -> Tensor:
        """The sum of this rank's slots, in the first of them; blocks."""
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
        return all(int(one[which]) >= step for one in self._counters)

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
        self.total: Tensor  # once it was waited for

    def wait(self) -> None:
        self.total = self._window.added(self._step)

    def ready(self) -> bool:
        return self._window.posted(self._step)


class WindowCopier:
    """A thread that waits for weights and copies them; on CUDA in a stream of its own, behind what the current one has
    been given. Has not run on GPUs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._background = Background("zbc-windows")

    def start(self, run: Callable[[], None]) -> Fetch:
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

        return Fetch(self._background.start(work))

    def after(self, count: Callable[[], None]) -> None:
        """Call `count` once what the current stream has been given is done: on a CPU that is now."""
        if self._stream is None:
            count()
        else:
            self.start(count)


class Fetch:
    """What a `WindowCopier` has begun, as a `Pending`."""

    def __init__(self, found: Future[torch.cuda.Event | None]) -> None:
        self._found = found

    def wait(self) -> None:
        event = self._found.result()
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def ready(self) -> bool:
        return self._found.done()


_turn = threading.Lock()


def fence() -> None:
    """What this thread wrote before is seen by others before what it writes next, and likewise for what it reads:
    a lock that is given back and taken again is a barrier, also where memory is not ordered as on x86."""
    for _ in range(2):
        _turn.acquire()
        _turn.release()


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
