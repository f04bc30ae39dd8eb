"""The numbers of the microbatches of each step (`schedule.renumber = "steps"`): found by a process beside rank 0.

They follow from the plan and the lengths of the samples, which are known long before, so that process works steps ahead
and ranks seldom wait for it. If it ends, the steps that it has not numbered keep the plan's numbers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue

from zbc.runtime.core.state import Worker
from zbc.training.data.unequal import ByTokens
from zbc.training.launch.board import Board

_AHEAD, _KEPT = 8, 64  # steps that are numbered before they begin, and texts that stay for slower ranks


@contextmanager
def numbering(
    worker: Worker, board: Callable[[], Board], limit: timedelta, plan: Path, steps: range, tell: Callable[[str], None]
) -> Iterator[None]:
    """Within its block the numbers of steps are heard, if the plan at `plan` wants them; rank 0 finds them."""
    dealer = worker.work
    if not isinstance(dealer, ByTokens) or not worker.plan.manifest.renumbers:
        yield
        return
    heard = board()
    asking = _Asking(board(), dealer, plan, steps, tell) if heard.rank == 0 else None

    def hear(step: int) -> Sequence[int] | None:
        if asking is not None:
            asking.until(step + _AHEAD)
        with worker.waits("the numbers of its step"):
            found: list[int] | None = json.loads(heard.hear(f"numbers/{step}", limit))
        return found

    dealer.numbers = hear
    try:
        yield
    finally:
        if asking is not None:
            asking.end()


class _Asking:
    """Asks the process for the numbers of steps, in a thread, and publishes them."""

    def __init__(self, board: Board, dealer: ByTokens, plan: Path, steps: range, tell: Callable[[str], None]) -> None:
        self._board, self._dealer, self._steps, self._tell = board, dealer, steps, tell
        self._ended, self._next, self._asked = False, steps.start, SimpleQueue[tuple[int, list[int]] | None]()
        command = [sys.executable, "-P", "-m", "zbc.compiler.restepping", str(plan)]
        # Apart from the run's signals: it ends with its input, which the end of this process closes.
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, process_group=0)
        self._thread = threading.Thread(target=self._work, name="numbers", daemon=True)
        self._thread.start()

    def until(self, step: int) -> None:
        """Asks for all steps up to `step` that were not asked for."""
        while self._next <= min(step, self._steps.stop - 1):
            self._asked.put((self._next, self._dealer.asks(self._next)))
            self._next += 1

    def end(self) -> None:
        """Ends the process and the thread."""
        self._ended = True
        self._asked.put(None)
        self._child.kill()
        self._thread.join()
        self._child.wait()

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            step, tokens = asked
            self._board.tell(f"numbers/{step}", self._answer(step, tokens))
            if step - _KEPT >= self._steps.start:
                self._board.drop(f"numbers/{step - _KEPT}")

    def _answer(self, step: int, tokens: list[int]) -> str:
        """The numbers of a step as JSON; "null" once the process has ended."""
        with suppress(OSError):  # it ended while it was asked
            assert self._child.stdin is not None and self._child.stdout is not None
            self._child.stdin.write(f"{json.dumps(tokens)}\n")
            self._child.stdin.flush()
            if answer := self._child.stdout.readline():
                return answer
        if not self._ended:
            self._tell(f"steps from {step + 1} on have the plan's numbers: the process that finds others has ended")
        self._ended = True
        return "null"
