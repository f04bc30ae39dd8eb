"""Two ops of a group in turn: while a sum of one is on its way, the other runs (braids, arXiv 2510.27257).

Each op has a thread of its own, of which one runs at a time; where layers that ranks share start a sum, the turn goes
to the other op, and the sum is waited for when it comes back. So an op runs unchanged, forward or backward, and what
lies between two of its sums is a unit. Who has the turn depends on the two ops alone: all ranks that share the layers
start their sums in one order. On a GPU the same holds of what the host enqueues; NCCL sums on a stream of its own.

The op that comes second in the group begins on the other thread, up to where its input is there: a group starts when
both have theirs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zbc.runtime.transport import Pending


class _Abandoned(BaseException):
    """The other op has failed, and nobody waits for this one."""


class _Local(threading.local):
    pair: Pair | None = None
    first: bool = True  # whether this thread runs the first op of its pair


_local = _Local()


@dataclass(slots=True)
class Meter:
    """How long a rank waits for sums: for those behind which nothing else ran, and for all; in s."""

    alone: int = 0
    alone_s: float = 0.0
    all: int = 0
    all_s: float = 0.0

    @property
    def hidden(self) -> float | None:
        """The share of the time of sums that nobody waited, if sums that something hides take as long as the others;
        None where none was alone."""
        if not self.alone_s:
            return None
        return min(1.0, max(0.0, 1 - self.all_s / (self.all * self.alone_s / self.alone)))


def settle(pending: Pending, meter: Meter, beside: Callable[[], None] | None = None) -> None:
    """Wait for a sum; before that let the other op of a group run to its next one, and then what stands `beside`."""
    pair = _local.pair
    gave = pair is not None and pair.give(pending)
    if beside is not None:
        beside()
    began = time.perf_counter()
    pending.wait()
    took = time.perf_counter() - began
    meter.all += 1
    meter.all_s += took
    if not gave and beside is None:
        meter.alone += 1
        meter.alone_s += took


def offer() -> None:
    """Where an op without sums could be interrupted: give the turn to the other one if what that waits for is there."""
    pair = _local.pair
    if pair is not None and (pair.pending is None or pair.pending.ready()):
        pair.give()


# ---- a group ---------------------------------------------------------------------------------------------------------


class Pair:
    """Who of two threads has the turn: the rank's own, which runs the first op, or the other one."""

    def __init__(self, second: Callable[[], None]) -> None:
        self._second = second
        self._turn = {first: threading.Semaphore(0) for first in (True, False)}
        self._over = {True: False, False: False}
        self._abandoned = False
        self.pending: Pending | None = None  # what the op waits for that gave the turn
        self._failure: BaseException | None = None

    def run_first(self, run: Callable[[], None]) -> None:
        """All of the first op, on the rank's own thread, once the second one has its input."""
        _local.pair, _local.first = self, True
        try:
            self.give()
            run()
        except BaseException:
            self._abandoned = self._over[True] = True
            self._turn[False].release()
            raise
        finally:
            _local.pair = None
        self._over[True] = True

    def give(self, pending: Pending | None = None) -> bool:
        """Let the other op run until it gives the turn back, or is over; False where it is over already. `pending` is
        what this one waits for."""
        first = _local.first
        if self._abandoned and not first:
            raise _Abandoned
        if self._over[not first]:
            return False
        self.pending = pending
        self._turn[not first].release()
        self._turn[first].acquire()
        if self._abandoned and not first:
            raise _Abandoned
        return True

    def here_is_first(self) -> bool:
        """Whether this thread runs the first op."""
        return _local.first

    def run_second(self) -> None:
        """All of the second op, on the other thread."""
        _local.pair, _local.first = self, False
        self._turn[False].acquire()
        try:
            if not self._abandoned:
                self._second()
        except _Abandoned:
            pass
        except BaseException as error:  # for the rank's own thread, when it comes to this op
            self._failure = error
        finally:
            _local.pair = None
            self._over[False] = True
            self._turn[True].release()

    def finish(self) -> None:
        """The first op is over: run what is left of the second one. Raises what that raised."""
        if not self._over[False]:
            self._turn[False].release()
            self._turn[True].acquire()
        if self._failure is not None:
            raise self._failure


class Side:
    """The other thread of a rank, which runs the second ops of groups."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: queue.SimpleQueue[tuple[Pair, torch.cuda.Stream | None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="zbc-groups", daemon=True).start()

    def take(self, pair: Pair) -> None:
        """Run the second op of a pair, on the stream that is current here."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        self._pairs.put((pair, stream))

    def close(self) -> None:
        self._pairs.put(None)

    def _run(self) -> None:
        with torch.autograd.set_multithreading_enabled(False):  # as on the rank's own thread
            while (found := self._pairs.get()) is not None:
                pair, stream = found
                if stream is None:
                    pair.run_second()
                else:
                    with torch.cuda.device(self._device), torch.cuda.stream(stream):
                        pair.run_second()
