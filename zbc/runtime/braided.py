"""How the groups of a plan run where ranks share layers: both ops in turn, see turns.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zbc.ir import Kind, Op
from zbc.runtime.clock import Busy, Clock
from zbc.runtime.state import Script, Worker
from zbc.runtime.turns import Pair, Side

Handler = Callable[[Worker, Op], None]


def braided(script: Script) -> Script:
    """The script with both ops of each group in turn. The entry of the first lasts until that op is over, with what
    the other one did meanwhile; the entry of the second runs the rest."""
    found = list(script)
    for at, (_, mark, _) in enumerate(script):
        if mark.kind is Kind.OVERLAP:
            (one, first, name), (other, second, other_name) = script[at + 1], script[at + 2]
            found[at + 1] = partial(_first, one, other, second), first, f"{name} with {other_name}"
            found[at + 2] = partial(_second, other), second, other_name
    return found


def _first(run: Handler, rest: Handler, second: Op, worker: Worker, op: Op) -> None:
    if not _in_turn(worker, op, second):
        run(worker, op)
        return
    if worker.side is None:
        worker.side = Side(worker.device)
    clock = worker.clock
    worker.pair = pair = Pair(partial(rest, worker, second))
    worker.clock = together = _Together(clock, pair, gives=op.kind is Kind.W)
    worker.side.take(pair)
    try:
        pair.run_first(partial(run, worker, op))
    except BaseException:
        worker.pair = None
        raise
    finally:
        worker.clock = clock
        if together.began is not None:
            clock.stop(together.began)


def _second(run: Handler, worker: Worker, op: Op) -> None:
    pair, worker.pair = worker.pair, None
    if pair is None:
        run(worker, op)
        return
    began = worker.clock.start()
    try:
        pair.finish()
    finally:
        worker.clock.stop(began)


def _in_turn(worker: Worker, *ops: Op) -> bool:
    """Whether two ops can take turns: not where layers draw random numbers, which one at a time has to, nor while
    their memory is weighed."""
    return worker.braids and not any(worker.routes[op].stage.draws for op in ops)


class _Together:
    """The clock of two ops in turn: it runs for both, from when the input of the first is there, too."""

    def __init__(self, inner: Clock, pair: Pair, *, gives: bool) -> None:
        self._inner, self._pair, self._gives = inner, pair, gives
        self.began: float | None = None

    def start(self) -> float:
        """The first op begins; or the second one is ready to, and waits for its turn."""
        if self._pair.here_is_first():
            self.began = self._inner.start()
            if not self._gives:
                return 0.0
        self._pair.give()  # a W, which starts no sums, lets the other op go first
        return 0.0

    def stop(self, began: float) -> None:
        """The entries of the ops stop it."""

    def read(self) -> Busy:
        return self._inner.read()
