"""A user's task that fills a rank's waits (bubbles): a wrapper of the transport.

The length of a wait is predicted by the same wait in the previous training step. While the awaited operation has not
completed, and a step of the task would end within that time, the task takes a step. So the first training step only
measures, and a wait that gets shorter is overrun once, by one step of the task at most.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.job import spec, userobject
from zbc.job.userobject import IN_A_RANK
from zbc.runtime.core.state import Worker
from zbc.runtime.transports.transport import Around, Letter, Pending, Through, Transport
from zbc.text import GIB, size

_RECENT = 8  # steps of a task, the longest of which predicts the time of the next
_LOOK_S = 5e-5  # between two polls of a GPU

Result = TypeVar("Result")


class Task(Protocol):
    """The object that a filler's factory returns. `seconds` and `bytes` are optional."""

    seconds: float  # upper bound of the time of a step
    bytes: int  # device memory that it needs

    def step(self) -> None:
        """Does a piece of work, short compared with the waits. Raises StopIteration when there is no more."""


class Filled(NamedTuple):
    steps: int  # of the task
    seconds: float  # of these steps
    waited: float  # seconds that the rank waited in all, the task's steps included

    def __str__(self) -> str:
        share = self.seconds / self.waited if self.waited else 0.0
        return f"{self.steps} steps in {self.seconds:.2f} s, {100 * share:.0f}% of {self.waited:.2f} s of waits"


class Filling(Around):
    """Runs steps of a task while a rank waits; `tell` is called with the reason when the task ends."""

    def __init__(
        self,
        inner: Transport,
        task: Task | None,
        device: torch.device,
        tell: Callable[[str], None],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(inner)
        self.task, self.device, self.tell, self.now = task, device, tell, now
        self._known: dict[Hashable, float] = {}  # last seconds of each wait
        self._took: deque[float] = deque(maxlen=_RECENT)
        self._sums = self._steps = 0  # collectives of this step; steps of the task
        self._filled = self._waited = 0.0

    @property
    def found(self) -> Filled:
        return Filled(self._steps, self._filled, self._waited)

    def wait(self, message: Letter) -> Tensor:
        return self.awaited(message, lambda: self.inner.ready(message), lambda: self.inner.wait(message))

    def started(self, pending: Pending, *, gather: bool) -> Pending:
        return Through(pending, self.summed)

    def finish_step(self, *, drain: bool = True) -> None:
        self._sums = 0
        self.inner.finish_step(drain=drain)

    def summed(self, pending: Pending) -> None:
        """Waits for a collective, identified by its number in the step: each step has them in the same order."""
        self._sums += 1
        self.awaited(self._sums, pending.ready, pending.wait)

    def awaited(self, place: Hashable, ready: Callable[[], bool], wait: Callable[[], Result]) -> Result:
        """Runs steps of the task until `ready` returns True, or the next one could end too late; then calls `wait`."""
        if self.task is None:
            return wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the rank waits once its own work is done
        now, known = self.now, self._known.get(place, 0.0)
        began = at = now()
        late = False
        while self.task is not None and at - began + self._longest() <= known and not ready():
            last = at
            self._step(self.task)
            at = now()
            self._filled += at - last
            late = ready()
            if late:  # completed during the task's step, at an unknown time
                self._known[place] = last - began
        while self.device.type == "cuda" and not ready():
            time.sleep(_LOOK_S)
        result = wait()
        self._waited += now() - began
        if not late:
            self._known[place] = now() - began
        return result

    def _longest(self) -> float:
        """The maximum predicted time of the task's next step, in seconds."""
        return max(getattr(self.task, "seconds", None) or 0.0, max(self._took, default=0.0))

    def _step(self, task: Task) -> None:
        """Runs one step; an error ends the task and not the run."""
        began = self.now()
        try:
            with torch.enable_grad():
                task.step()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        except StopIteration:
            self.task = None
            self.tell("has done all of its filler's work")
        except IN_A_RANK as error:
            self.task = None
            self.tell(f"goes on without its filler, which failed: {type(error).__name__}: {error}")
        self._steps += 1
        self._took.append(self.now() - began)


def install(worker: Worker, tell: Callable[[str], None]) -> Filling | None:
    """Makes the task of [filler], and fills the worker's waits with it; None if there is no task, or too little memory.
    The factory gets `rank` and `ranks` (of the run). Raises E502 (it cannot be imported, or fails)."""
    manifest = worker.plan.manifest
    asked = spec.Filler.model_validate(manifest.training.get("filler", {}), strict=False)
    if asked.task is None:
        return None
    name = manifest.topology.name(worker.rank)
    given = {"rank": worker.rank, "ranks": manifest.topology.world}
    factory = userobject.load(asked.task, "filler.task")
    task = userobject.call(factory, given, asked.task, "filler.task")
    if not callable(getattr(task, "step", None)):
        text = f"run: filler.task = {asked.task} made {type(task).__name__}, which has no step()"
        raise ZbcError("E502", text, hint="return an object with step() -> None")
    free, needs = _room(worker), int(getattr(task, "bytes", 0) or 0)
    if free is not None and needs > free:
        tell(f"{name} has no filler: it needs {size(needs)}, and {size(free)} are free")
        return None
    filling = Filling(worker.transport, task, worker.device, lambda said: tell(f"{name} {said}"))
    worker.transport = filling
    return filling


def _room(worker: Worker) -> int | None:
    """Bytes that the plan leaves free on this rank's device; None if unknown."""
    manifest = worker.plan.manifest
    memory = manifest.planning.get("hardware", {}).get("memory_gib")
    rows = manifest.predicted.get("per_rank", [])
    if memory is None or not rows:
        return None
    memory = memory[worker.plan.rank] if isinstance(memory, list) else memory
    return max(0, int(memory * GIB - rows[worker.plan.rank]["peak_bytes"]))
