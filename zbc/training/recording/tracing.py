"""Records some steps of a rank: start and end of every op, its waits, its memory.

A recorded step runs in a loop of its own, with a transport and a clock that take timestamps: other steps run without
overhead. After the step a background thread writes the timestamps as lines. A timestamp is a number on the host, on a
GPU an event in the compute stream.

The offset of a rank's clock from that of rank 0 is measured by asking rank 0 for its time. A rank reads its clock,
asks, and reads it again when the answer has arrived: rank 0 read its own clock in between. The fastest of several tries
counts, and half of its time is the uncertainty. Ranks on one machine read the same clock, so their offset is 0 unless
the answer contradicts it.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from operator import sub
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from zbc.host.cores import cores
from zbc.runtime.core.execute import StepResult, run_step
from zbc.runtime.core.progress import Begins
from zbc.runtime.core.state import Entry, Worker
from zbc.runtime.features.groups.units import Braids
from zbc.runtime.features.offload.copying import Ticket
from zbc.runtime.features.offload.offload import Offloads
from zbc.runtime.features.offload.parcels import Pool
from zbc.runtime.transports.transport import Around, Letter, Pending, Through, Transport
from zbc.trace import recording as trace
from zbc.trace.recording import Cause, ClockOffset, Head, MemorySamples, Timing
from zbc.training.launch.board import Board
from zbc.training.launch.launch import RunOptions
from zbc.training.recording.measure import CATEGORIES, Scale

T = TypeVar("T")


@dataclass
class Tracer:
    """Runs the steps of a rank in one phase, and records those in `steps` (from 0).

    `compare` compares this rank's clock with that of rank 0; all ranks call it together, before the first recorded step
    and after the last. Memory is measured in the step after the last recorded one, or in the one before the first,
    since that slows the step; never in the very first step, in which the optimizer makes its state, nor in the first
    step of a phase, which switches to its plan.
    """

    worker: Worker
    writer: trace.Writer
    steps: frozenset[int]
    total: int  # steps of the run, up to the end of this phase
    compare: Callable[[], ClockOffset]
    number: int = -1
    _opened: bool = False
    _closed: bool = False

    def __post_init__(self) -> None:
        self._recorder, self._scribe = Recorder(self.worker), Scribe()
        first, self._last = min(self.steps, default=0), max(self.steps, default=-1)
        begin = self.worker.phases.starts[self.number].first
        before = first - 1 if first - 1 > begin else None
        self._weighed = self._last + 1 if self._last + 1 < self.total else before

    def step(self, worker: Worker, step: int, *, stop: bool = False) -> StepResult | None:
        if self.steps and step == self._weighed:
            return self._weigh(worker, step, stop)
        if step not in self.steps:
            return run_step(worker, step, stop=stop)
        if not self._opened:
            self._opened = True
            self._clock()
        result, stamped = self._recorder.record(step, stop)
        lengths = [worker.length(mb) for mb in range(worker.phase_run.count)]
        tokens = [length.tokens for length in lengths if length is not None]
        self._scribe.add(lambda: self.writer.step(replace(stamped.timing(), tokens=tokens)))
        if step == self._last:
            self.close()
        return result

    def close(self) -> None:
        """To be called by all ranks together, when no further step is recorded."""
        if self._opened and not self._closed:
            self._closed = True
            self._clock()

    def settle(self) -> None:
        """Writes the steps recorded so far, when the run has failed."""
        self._scribe.close()

    def end(self) -> None:
        """Ends the recording after the last step."""
        self.close()
        self._scribe.flush()
        self._scribe.close()
        self.writer.close()

    def _clock(self) -> None:
        compared = self.compare()
        self._scribe.add(lambda: self.writer.clock(compared))

    def _weigh(self, worker: Worker, step: int, stop: bool) -> StepResult | None:
        with closing(Scale(worker)) as scale:
            result = run_step(worker, step, stop=stop)
        names = (*CATEGORIES, *(["host"] if worker.features.of(Offloads).of(worker.phase_run) else []), "peak")
        rows = [[getattr(reading.held, name) for name in names] for reading in scale.readings]
        memory = MemorySamples(step + 1, names, rows)
        self._scribe.add(lambda: self.writer.memory(memory))
        return result


class Tracers(dict[int, Tracer]):
    """A tracer for each phase with recorded steps, of this run or of the one it resumes."""

    def step(self, worker: Worker, step: int, *, stop: bool = False) -> StepResult | None:
        tracer = self.get(worker.phases.index(step))
        return run_step(worker, step, stop=stop) if tracer is None else tracer.step(worker, step, stop=stop)

    def settle(self) -> None:
        for tracer in self.values():
            tracer.settle()

    def end(self) -> None:
        for tracer in self.values():
            tracer.end()


def open_tracers(
    worker: Worker, board: Board, options: RunOptions, run_steps: range, limit: timedelta, run: Path | None
) -> Tracers:
    """Starts a trace in the run directory, which rank 0 (`run` is None elsewhere) sends to all others. `run_steps` are
    the steps still to be trained; records of earlier ones are kept."""
    if run is not None:
        trace.start(run, options.plan)
    folder = Path(board.meet("trace", limit, "" if run is None else str(run.absolute())))
    process = f"{socket.gethostname()}:{os.getpid()}"
    manifest, phases = worker.phase_runs[-1].plan.manifest, worker.phases
    turns = itertools.count()

    def compare() -> ClockOffset:
        return compare_clocks(board, str(next(turns)), limit)

    found = {}
    ends = [*(start.first for start in phases.starts[1:]), run_steps.stop]
    for number, (phase_run, end) in enumerate(zip(worker.phase_runs, ends, strict=True)):
        phase = "" if phase_run is worker.phase_runs[-1] else manifest.ramp[number].folder
        mine = frozenset(step for step in options.trace if phases.index(step) == number)
        if not mine and not (folder / trace.FOLDER / phase / trace.rank_file(worker.rank)).is_file():
            continue
        own = cores() if worker.on_host else None
        head = Head(phase_run.plan.manifest.id, worker.rank, worker.device.type, process, len(phase_run.script), own)
        writer = trace.Writer(folder, head, run_steps.start, phase)
        found[number] = Tracer(worker, writer, mine, min(end, run_steps.stop), compare, number)
    return Tracers(found)


@dataclass(frozen=True)
class Stamped:
    """The timestamps of a step: ns on the clock of the rank."""

    step: int  # from 0
    script: Sequence[Entry]  # its ops
    marks: list[int]  # before the first op and after each
    leads: tuple[list[int], list[int]]  # ops, times when they began to compute
    waits: tuple[list[int], list[int]]  # op and cause of each wait; its start and end
    close: int
    copies: list[int] = field(default_factory=list)  # start and end of each
    turns: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))  # interleaved ops, starts of turns

    def timing(self) -> Timing:
        """The timing of the step. Timestamps of computations inside a REDO are dropped: it is not a compute op."""
        began, waited = dict(zip(*self.leads, strict=True)), self.waits
        marks = self.marks
        if self.turns[0]:
            marks, began, waited = self._in_a_row(began)
        took = list(map(sub, marks[1:], marks))
        computing = (index for index, (_, op, _) in enumerate(self.script) if op.kind.computes)
        leads = [began[index] - marks[index] for index in computing]
        (of, at), waits = waited, list[int]()
        for op, cause, a, b in zip(of[::2], of[1::2], at[::2], at[1::2], strict=True):
            waits += (op, cause, max(0, b - a))
        if min(took, default=0) < 0 or min(leads, default=0) < 0:  # moments of a GPU are rounded
            took, leads = [max(0, ns) for ns in took], [max(0, ns) for ns in leads]
        copies = [ns for a, b in zip(self.copies[::2], self.copies[1::2], strict=True) for ns in (a - marks[0], b - a)]
        return Timing(self.step + 1, marks[0], took, leads, waits, max(0, self.close - marks[-1]), copies)

    def _in_a_row(self, began: dict[int, int]) -> tuple[list[int], dict[int, int], tuple[list[int], list[int]]]:
        """Marks, begins and waits as if two interleaved ops of a group had run one after the other.

        Both begin to compute together; from there on each gets the share of the group's time in which it had its turn,
        the first one first. Waits of either before that count as waits of the first.
        """
        marks, began, (of, at) = list(self.marks), dict(began), self.waits
        of, own = list(of), dict[int, list[tuple[int, int]]]()  # by op, start and end of its turns
        for place, (index, moment) in enumerate(zip(*self.turns, strict=True)):
            # A turn ends when the next one of its group begins, or with the group.
            ends = [*self.turns[1][place + 1 : place + 2], max(moment, marks[index + 1])]
            own.setdefault(index, []).append((moment, min(ends)))
        for first in sorted(index for index in own if index in began and index + 1 in own):
            begin, end = began[first], marks[first + 2]
            shares = [sum(max(0, b - max(a, begin)) for a, b in own[index]) for index in (first, first + 1)]
            marks[first + 1] = began[first + 1] = begin + round((end - begin) * shares[0] / (sum(shares) or 1))
            for place, (op, moment) in enumerate(zip(of[::2], at[::2], strict=True)):
                if op == first + 1 and moment < begin:
                    of[2 * place] = first
        return marks, began, (of, at)


@dataclass
class Recorder:
    """Records the timestamps of steps, one at a time."""

    worker: Worker
    stamps: Stamps | None = None  # those of the worker's device
    _marks: list[Any] = field(default_factory=list)  # before the first op and after each
    _leads: tuple[list[int], list[Any]] = field(default_factory=lambda: ([], []))  # ops, when they begin to compute
    _waits: tuple[list[int], list[Any]] = field(default_factory=lambda: ([], []))  # op and cause; start and end

    def __post_init__(self) -> None:
        device = self.worker.device
        self._stamps: Stamps = self.stamps or (CudaStamps(device) if device.type == "cuda" else Stamps())

    def record(self, step: int, stop: bool) -> tuple[StepResult | None, Stamped]:
        """Runs a step and takes its timestamps."""
        worker, stamps = self.worker, self._stamps
        for found in (self._marks, *self._leads, *self._waits):
            found.clear()
        transport, clock = worker.transport, worker.clock
        stamps.open()
        worker.transport = _Transport(transport, worker, stamps.stamp, self._waits)
        worker.clock = Begins(clock, self._begun)
        offloads = worker.features.of(Offloads)
        moves = bool(offloads.of(worker.phase_run))
        spans = self._copies() if moves else []
        units, turns = worker.features.of(Braids).units, (list[int](), list[Any]())
        if units is not None:
            units.stamp, units.turns = stamps.stamp, turns
        try:
            result = run_step(worker, step, stop=stop, loop=self._loop)
            close = stamps.stamp()
        finally:
            worker.transport, worker.clock = transport, clock
            if units is not None:
                units.stamp = None
            if moves:
                offloads.pool.copier.spans = None
                del offloads.pool.wait
        read = stamps.read
        leads, waits = (self._leads[0][:], read(self._leads[1])), (self._waits[0][:], read(self._waits[1]))
        copies = read([moment for span in spans for moment in span])
        marks, taken = read(self._marks), (turns[0], read(turns[1]))
        return result, Stamped(step, worker.script, marks, leads, waits, read([close])[0], copies, taken)

    def _begun(self) -> None:
        self._leads[0].append(self.worker.progress.index)
        self._leads[1].append(self._stamps.stamp())

    def _copies(self) -> list[list[Any]]:
        """The list to which offloads and reloads append their times; also records waits for them."""
        pool, progress, stamp = self.worker.features.of(Offloads).pool, self.worker.progress, self._stamps.stamp

        def wait(ticket: Ticket) -> None:
            began = stamp()
            Pool.wait(pool, ticket)
            self._waits[1].extend((began, stamp()))
            self._waits[0].extend((progress.index, Cause.COPY.value))

        pool.wait = wait  # type: ignore[method-assign]
        pool.copier.spans = spans = list[list[Any]]()
        return spans

    def _loop(self, worker: Worker) -> None:
        progress, now, stamp, mark = worker.progress, time.monotonic, self._stamps.stamp, self._marks.append
        for found in self._waits:
            found.clear()  # waits before the first op
        mark(stamp())
        for index, (handler, op, text) in enumerate(worker.script):
            progress.index, progress.op, progress.since = index, text, now()
            handler(worker, op)
            mark(stamp())
        progress.index = len(worker.script)  # waits from here on belong to the close


class _Transport(Around):
    def __init__(
        self, inner: Transport, worker: Worker, stamp: Callable[[], Any], waits: tuple[list[int], list[Any]]
    ) -> None:
        super().__init__(inner)
        self._progress, self._stamp = worker.progress, stamp
        self._of, self._at = waits

    def wait(self, message: Letter) -> Tensor:
        return self.noted(Cause.MESSAGE, lambda: self.inner.wait(message))

    def started(self, pending: Pending, *, gather: bool) -> Pending:
        cause = Cause.GATHER if gather else Cause.SUM
        return Through(pending, lambda one: self.noted(cause, one.wait))

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        self.noted(Cause.ALL, lambda: self.inner.all_reduce(tensor, ranks))

    def finish_step(self, *, drain: bool = True) -> None:
        self.noted(Cause.DELIVERY, lambda: self.inner.finish_step(drain=drain))

    def noted(self, cause: Cause, call: Callable[[], T]) -> T:
        """Runs a call that may wait, and records its time."""
        began = self._stamp()
        found = call()
        self._at += (began, self._stamp())
        self._of += (self._progress.index, cause.value)
        return found


_MOST = 64  # maximum number of pending pieces of work; `add` waits beyond it


class Scribe:
    """Runs work in a thread of its own, in the order in which it was added.

    Work runs soon, while the rank waits or computes outside of Python; a process that is killed loses the few pending
    pieces. A process that ends by itself runs them all: when Python exits, or in `close`, if it ends without that, like
    a rank that fails.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "zbc-scribe")
        self._left = deque[Future[None]]()
        self._failed = False

    def add(self, work: Callable[[], None]) -> None:
        """Adds a piece of work. Raises the error of earlier work, after which no more work is done."""
        self._wait(_MOST - 1)
        self._left.append(self._thread.submit(self._do, work))

    def flush(self) -> None:
        """Blocks until all work is done. Raises as `add`."""
        self._wait(0)

    def close(self) -> None:
        """Runs the pending work and ends; no further calls except this one."""
        self._thread.shutdown()

    def _wait(self, most: int) -> None:
        """Waits until at most `most` pieces are pending."""
        while self._left and (len(self._left) > most or self._left[0].done()):
            self._left[0].result()
            self._left.popleft()

    def _do(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except Exception:
            self._failed = True
            raise


_TRIES = 5


class Stamps:
    """Timestamps of one step; here of devices whose ops complete before the call returns."""

    def open(self) -> None:
        """A step begins; stamps of the previous one become invalid."""

    def stamp(self) -> Any:
        """A timestamp of now; cheap."""
        return time.perf_counter_ns()

    def read(self, stamps: Sequence[Any]) -> list[int]:
        """ns of stamps of this step, on the clock of `time.perf_counter_ns`."""
        return list(stamps)


class CudaStamps(Stamps):
    """For cuda, where a call only enqueues work.

    Events measure differences, not absolute times: at the beginning of a step one is recorded while the stream is
    empty, between two reads of the host's clock. It waits for that stream only, not for the device: sends may be in
    flight.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        self._anchor: torch.cuda.Event | None = None
        self._anchored_ns = 0

    def open(self) -> None:
        self._used = 0
        torch.cuda.current_stream(self._device).synchronize()
        tries = list[tuple[int, int, torch.cuda.Event]]()
        for _ in range(_TRIES):
            before, event = time.perf_counter_ns(), self.stamp()
            event.synchronize()
            after = time.perf_counter_ns()
            tries.append((after - before, (before + after) // 2, event))
        _, self._anchored_ns, self._anchor = min(tries, key=lambda one: one[0])

    def stamp(self) -> Any:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._used]
        event.record(torch.cuda.current_stream(self._device))
        self._used += 1
        return event

    def read(self, stamps: Sequence[Any]) -> list[int]:
        anchor = self._anchor
        if anchor is None or not stamps:
            return []
        stamps[-1].synchronize()  # the last one on the stream
        return [self._anchored_ns + round(1e6 * anchor.elapsed_time(event)) for event in stamps]


# ---- clocks of several machines -------------------------------------------------------------------------------


_ASKED = 12
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # unique per boot of a machine; Linux


def compare_clocks(
    board: Board,
    name: str,
    limit: timedelta,
    *,
    now: Callable[[], int] = time.perf_counter_ns,
    machine: str | None = None,
) -> ClockOffset:
    """Compares the clock `now` (ns) with that of rank 0; all ranks call this together, once for each `name`. `machine`
    identifies the machine, by default with the kernel's boot id. Blocks for at most `limit`."""
    here = _machine() if machine is None else machine
    if board.rank == 0:
        for rank in range(1, board.ranks):
            for attempt in range(_ASKED):
                key = f"clock/{name}/{rank}/{attempt}"
                board.hear(f"{key}/ask", limit)
                board.tell(f"{key}/answer", f"{now()} {here}")
        return ClockOffset(now(), 0, 0)
    there, tries = "", list[tuple[int, int, int]]()
    for attempt in range(_ASKED):
        key = f"clock/{name}/{board.rank}/{attempt}"
        asked = now()
        board.tell(f"{key}/ask", "")
        answer, _, there = board.hear(f"{key}/answer", limit).partition(" ")
        heard = now()
        tries.append((heard - asked, (asked + heard) // 2, int(answer)))
    took, at, theirs = min(tries)
    offset, uncertainty = theirs - at, (took + 1) // 2
    if here and here == there and abs(offset) <= uncertainty:
        return ClockOffset(at, 0, 0)
    return ClockOffset(at, offset, uncertainty)


def _machine() -> str:
    """The boot id of this machine; empty if there is none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
