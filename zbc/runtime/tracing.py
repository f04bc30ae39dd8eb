"""Record what a rank does in some of its steps: start and end of every op, what it waited for, what it held.

A recorded step runs in a loop of its own, with a transport and a clock that look at the time: what is not recorded runs
as if nothing of this were there. The rank's own thread writes the step down when it is over.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from zbc import trace
from zbc.ir import COMPUTE
from zbc.runtime.aligned import compare_clocks
from zbc.runtime.board import Board
from zbc.runtime.clock import Clock
from zbc.runtime.execute import StepResult, run_step
from zbc.runtime.measure import CATEGORIES, Scale
from zbc.runtime.stamps import Stamps, stamps_for
from zbc.runtime.state import Worker
from zbc.runtime.transport import Letter, Pending, Transport
from zbc.trace import Cause, Head, Memory, Timing, Writer
from zbc.trace import Clock as Compared


@dataclass
class Tracer:
    """Runs the steps of a rank, and records those in `steps` (from 0).

    `compare` compares this rank's clock with that of rank 0; all ranks call it together, before the first recorded step
    and behind the last. What ops hold is looked at in the step behind the last recorded one, or in the one before the
    first, since looking takes long; in the first step of all the optimizer makes its state, so it does not count. Steps
    of a ramp run other plans and are left out.
    """

    worker: Worker
    writer: Writer
    steps: frozenset[int]
    total: int  # steps of the run
    compare: Callable[[], Compared]
    _opened: bool = False
    _closed: bool = False

    def __post_init__(self) -> None:
        self._recorder = Recorder(self.worker)
        first, last = min(self.steps), max(self.steps)
        self._last = last
        self._weighed = last + 1 if last + 1 < self.total else first - 1 if first > 1 else None

    def step(self, worker: Worker, step: int, *, stop: bool = False) -> StepResult | None:
        """`run_step`, recorded or not."""
        if step == self._weighed and worker.act is worker.acts[-1]:
            return self._weigh(worker, step, stop)
        if step not in self.steps or worker.act_of(step) is not worker.acts[-1]:
            return run_step(worker, step, stop=stop)
        if not self._opened:
            self._opened = True
            self.writer.clock(self.compare())
        result, timing = self._recorder.step(step, stop)
        self.writer.step(timing)
        if step == self._last:
            self.close()
        return result

    def close(self) -> None:
        """To be called by all ranks together, when no further step is recorded."""
        if self._opened and not self._closed:
            self._closed = True
            self.writer.clock(self.compare())

    def end(self) -> None:
        """The run is over."""
        self.close()
        self.writer.close()

    def _weigh(self, worker: Worker, step: int, stop: bool) -> StepResult | None:
        with Scale(worker) as scale:
            result = run_step(worker, step, stop=stop)
        rows = [[getattr(reading.held, name) for name in (*CATEGORIES, "peak")] for reading in scale.readings]
        self.writer.memory(Memory(step + 1, (*CATEGORIES, "peak"), rows))
        return result


def open_tracer(
    worker: Worker,
    board: Board,
    steps: frozenset[int],
    run_steps: range,
    limit: timedelta,
    run: Path | None,
    plan: Path,
) -> Tracer:
    """Begin a trace in the run directory, which rank 0 (`run` is None elsewhere) tells all others of.

    `run_steps` are those that are still to be trained; what was recorded before them stays.
    """
    if run is not None:
        trace.start(run, plan)
    folder = Path(board.meet("trace", limit, "" if run is None else str(run.absolute()))[0])
    process = f"{socket.gethostname()}:{os.getpid()}"
    act = worker.acts[-1]
    head = Head(act.plan.manifest.id, worker.rank, worker.device.type, process, len(act.script))
    turns = itertools.count()

    def compare() -> Compared:
        return compare_clocks(board, str(next(turns)), limit)

    return Tracer(worker, Writer(folder, head, run_steps.start), steps, run_steps.stop, compare)


@dataclass
class Recorder:
    """Times one step after the other."""

    worker: Worker
    stamps: Stamps | None = None  # those of the worker's device
    _marks: list[Any] = field(default_factory=list)  # before the first op and behind each
    _leads: list[tuple[int, Any]] = field(default_factory=list)  # op, when it begins to compute
    _waits: list[tuple[int, Cause, Any, Any]] = field(default_factory=list)  # op, from when to when

    def __post_init__(self) -> None:
        self._stamps: Stamps = self.stamps or stamps_for(self.worker.device)

    def step(self, step: int, stop: bool) -> tuple[StepResult | None, Timing]:
        """Run a step and time it."""
        worker, stamps = self.worker, self._stamps
        for found in (self._marks, self._leads, self._waits):
            found.clear()
        transport, clock = worker.transport, worker.clock
        stamps.open()
        worker.transport = _Transport(transport, worker, stamps.stamp, self._waits)
        worker.clock = _Clock(clock, worker, stamps.stamp, self._leads)
        try:
            result = run_step(worker, step, stop=stop, loop=self._loop)
            close = stamps.stamp()
        finally:
            worker.transport, worker.clock = transport, clock
        return result, self._timing(step, close)

    def _loop(self, worker: Worker) -> None:
        progress, now, stamp, mark = worker.progress, time.monotonic, self._stamps.stamp, self._marks.append
        self._waits.clear()  # those before the first op
        mark(stamp())
        for index, (handler, op, text) in enumerate(worker.script):
            progress.index, progress.op, progress.since = index, text, now()
            handler(worker, op)
            mark(stamp())
        progress.index = len(worker.script)  # what is waited for from here on belongs to the close

    def _timing(self, step: int, close: Any) -> Timing:
        """Put together what was stamped. A REDO stamps computation of its own, which its op does not count as."""
        read, script = self._stamps.read, self.worker.script
        begun, *ends = read(self._marks)
        closed = read([close])[0]
        starts = [begun, *ends[:-1]]
        computing = dict(zip((op for op, _ in self._leads), read([at for _, at in self._leads]), strict=True))
        waits = list[int]()
        spans = read([at for wait in self._waits for at in wait[2:]])
        for (op, cause, _, _), a, b in zip(self._waits, spans[::2], spans[1::2], strict=True):
            waits += (op, cause.value, max(0, b - a))
        return Timing(
            step=step + 1,
            begin_ns=begun,
            took_ns=[max(0, end - start) for start, end in zip(starts, ends, strict=True)],
            lead_ns=[
                max(0, computing[index] - starts[index])
                for index, (_, op, _) in enumerate(script)
                if op.kind in COMPUTE
            ],
            waits=waits,
            close_ns=max(0, closed - (ends[-1] if ends else begun)),
        )


class _Clock:
    """A `Clock` that also notes when an op begins to compute."""

    def __init__(self, inner: Clock, worker: Worker, stamp: Callable[[], Any], leads: list[tuple[int, Any]]) -> None:
        self._inner, self._progress, self._stamp, self._leads = inner, worker.progress, stamp, leads

    def start(self) -> None:
        self._leads.append((self._progress.index, self._stamp()))
        self._inner.start()

    def stop(self) -> None:
        self._inner.stop()

    def read(self) -> float:
        return self._inner.read()


class _Waited:
    """A `Pending` that notes how long it was waited for."""

    def __init__(self, inner: Pending, cause: Cause, transport: _Transport) -> None:
        self._inner, self._cause, self._transport = inner, cause, transport

    def wait(self) -> None:
        self._transport.noted(self._cause, self._inner.wait)


class _Transport:
    """A `Transport` that notes how long it was waited for."""

    def __init__(
        self,
        inner: Transport,
        worker: Worker,
        stamp: Callable[[], Any],
        waits: list[tuple[int, Cause, Any, Any]],
    ) -> None:
        self.rank = inner.rank
        self._inner, self._progress, self._stamp, self._waits = inner, worker.progress, stamp, waits
        self.send, self.post, self.close = inner.send, inner.post, inner.close

    def wait(self, message: Letter) -> Tensor:
        began = self._stamp()
        tensor = self._inner.wait(message)
        self._waits.append((self._progress.index, Cause.MESSAGE, began, self._stamp()))
        return tensor

    def start_sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        return _Waited(self._inner.start_sum(tensor, ranks), Cause.SUM, self)

    def start_scatter(self, parts: Tensor, mine: Tensor, ranks: tuple[int, ...]) -> Pending:
        return _Waited(self._inner.start_scatter(parts, mine, ranks), Cause.SUM, self)

    def start_gather(self, mine: Tensor, parts: Tensor, ranks: tuple[int, ...]) -> Pending:
        return _Waited(self._inner.start_gather(mine, parts, ranks), Cause.GATHER, self)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        self.noted(Cause.ALL, lambda: self._inner.all_reduce(tensor, ranks))

    def finish_step(self, *, drain: bool = True) -> None:
        self.noted(Cause.DELIVERY, lambda: self._inner.finish_step(drain=drain))

    def noted(self, cause: Cause, call: Callable[[], None]) -> None:
        """Do what may wait, and note how long it took."""
        began = self._stamp()
        call()
        self._waits.append((self._progress.index, cause, began, self._stamp()))
