"""Two pieces of work as coroutines: each has a thread of its own, and one of them runs at any moment.

A piece runs until it yields its turn (`Pair.turn`) or ends. The order of turns depends on the two pieces only, never on
time: ranks that run the same pieces switch at the same points, so that their collectives (all-reduces of tensor
parallelism) start in the same order.

They need threads since a piece may yield within autograd's backward, whose state is on the stack of its thread. The
second thread gets torch's thread-local settings: grad mode, the device with its stream, the number of threads of
kernels, and that a backward runs on the thread that calls it. Slots, packed rows and autocast are entered inside of
an op, so each thread has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import torch

from zbc.runtime.core.current import Current
from zbc.runtime.core.slot import BETWEEN

Work = Callable[[], None]


class Left(BaseException):
    """Raised in a piece of work that yields its turn, if the other one has failed."""


class Pair:
    """The thread that calls `run`, which runs the first piece, and another one, which runs the second. `switched` is
    called with the side (0 or 1) that runs from now on. A failure of either ends both: `run` raises it, and the other
    piece ends with `Left` at the point where it last yielded its turn."""

    def __init__(self, device: torch.device, switched: Callable[[int], None] = lambda side: None) -> None:
        self._device, self._switched = device, switched
        self._wake = threading.Semaphore(0), threading.Semaphore(0)
        self._over = [True, True]
        self._turn = 0
        self._second: Work | None = None
        self._error: BaseException | None = None
        self._failed = False
        self._settings: tuple[bool, torch.cuda.Stream | None] = (True, None)
        self._known: dict[Hashable, int] = {}  # name of a piece -> number of its waits
        self._names: tuple[Hashable, Hashable] = (None, None)
        self.begun = [0, 0]  # waits of each side
        self._rest = 0  # parts that a side without waits runs until it yields its turn
        self._thread: threading.Thread | None = None  # from the first run on
        self._threads = 1

    def run(self, first: Work, second: Work, names: tuple[Hashable, Hashable] = (None, None)) -> None:
        """Runs both to their ends, `first` first. `names`: keys under which their numbers of waits are stored."""
        if self._thread is None:
            self._threads = torch.get_num_threads()
            self._thread = threading.Thread(target=self._serve, name="zbc-strand", daemon=True)
            self._thread.start()
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        self._settings = torch.is_grad_enabled(), stream
        self._second, self._over, self._error, self._failed = second, [False, False], None, False
        self._turn, self._names, self.begun, self._rest = 0, names, [0, 0], 0
        PAIR.value = self
        BETWEEN.value = self.part_done
        self._switched(0)
        try:
            first()
            self._over[0] = True
            if not self._over[1]:
                self._give(1)
        except Left:
            pass  # caused by the error of the other one
        except BaseException:
            self._over[0] = True
            self._abandon()
            raise
        finally:
            PAIR.value = None
            BETWEEN.value = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._known |= zip(names, self.begun, strict=True)

    def thread_of(self, side: int) -> int | None:
        """The thread of a side; None for the thread that calls `run`."""
        return self._thread.ident if side and self._thread is not None else None

    def turn(self) -> None:
        """Runs the other piece until it yields; returns at once if that one has ended."""
        if self._failed:
            raise Left
        side = self._turn
        if self._over[1 - side]:
            return
        self._give(1 - side)
        if self._failed:
            raise Left
        if not self._over[1 - side]:
            self._switched(side)

    def pause(self) -> None:
        """Counts a wait of this side for an operation just started, and yields the turn."""
        self.begun[self._turn] += 1
        self.turn()

    def part_done(self, left: int) -> None:
        """Called after each part of a piece without waits, with the number of parts `left`: yields the turn from time
        to time, so that parts remain for each wait of the other side."""
        other = 1 - self._turn
        if self._over[other] or not left:
            return
        if not self._rest:  # the other side waits now, and as often as it did the last time
            to_come = self._known.get(self._names[other], left + self.begun[other]) - self.begun[other]
            self._rest = -(-(left + 1) // max(1, to_come + 1))
        self._rest -= 1
        if not self._rest:
            self.turn()

    def close(self) -> None:
        """Ends the thread, unless an interrupt left the second piece unfinished: it then ends with the process."""
        if self._thread is not None and self._second is None:
            self._thread = None
            self._wake[1].release()

    def _give(self, side: int) -> None:
        self._turn = side
        self._switched(side)
        self._wake[side].release()
        self._wake[1 - side].acquire()

    def _abandon(self) -> None:
        self._failed = True
        if self._turn:  # interrupted while the other side runs: that one ends when it yields its turn
            return
        if not self._over[1]:
            self._wake[1].release()
            self._wake[0].acquire()
        self._error = None

    def _serve(self) -> None:
        torch.set_num_threads(self._threads)  # a new thread starts with OpenMP's default
        while True:
            self._wake[1].acquire()
            second = self._second
            if second is None:
                return
            PAIR.value = self
            BETWEEN.value = self.part_done
            try:
                if not self._failed:
                    recording, stream = self._settings
                    if stream is not None:
                        torch.cuda.set_device(self._device)
                        torch.cuda.set_stream(stream)
                    with torch.set_grad_enabled(recording), torch.autograd.set_multithreading_enabled(False):
                        second()
            except BaseException as error:  # raised again by `run`, in the thread of the other side
                if not self._failed:
                    self._error, self._failed = error, True
            finally:
                second = self._second = None
                self._over[1] = True
                self._turn = 0
                if not self._failed:
                    self._switched(0)
                self._wake[0].release()


PAIR = Current[Pair]()  # that this thread belongs to; None if work runs alone
