"""Work of a user's own in the time in which a rank waits: a transport around the one that moves the tensors.

A wait is as long as it was the last time the rank came to it, a step of training before. While what is awaited is not
there, and a step of the task still ends within that, the task takes one. So the first training step measures, and a
wait that gets shorter is overrun once, by one step of the task at most.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from zbc.job.userobject import IN_A_RANK
from zbc.runtime.transports.transport import Letter, Pending, Then, Transport

_RECENT = 8  # steps of a task, of which the longest says how long the next may take
_LOOK_S = 5e-5  # between two looks at a GPU

Result = TypeVar("Result")


class Task(Protocol):
    """What a filler's factory makes. `seconds` and `bytes` may be left out."""

    seconds: float  # that a step takes, at most
    bytes: int  # of the device's memory that it needs

    def step(self) -> None:
        """A piece of work, short beside the waits. StopIteration says that there is no more."""


class Filled(NamedTuple):
    """What became of the waits of a rank."""

    steps: int  # of the task
    seconds: float  # in them
    waited: float  # seconds that the rank waited in all, those included

    def __str__(self) -> str:
        share = self.seconds / self.waited if self.waited else 0.0
        return f"{self.steps} steps in {self.seconds:.2f} s, {100 * share:.0f}% of {self.waited:.2f} s of waits"


@dataclass
class Filling:
    """A `Transport`."""

    inner: Transport
    task: Task | None
    device: torch.device
    tell: Callable[[str], None]  # is told why a task ended
    now: Callable[[], float] = time.perf_counter
    _known: dict[Hashable, float] = field(default_factory=dict)  # seconds of each wait, when it came last
    _took: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _sums: int = 0  # collectives of this step
    _steps: int = 0
    _filled: float = 0.0
    _waited: float = 0.0

    def __post_init__(self) -> None:
        inner = self.inner
        self.rank = inner.rank
        self.send, self.post, self.ready, self.close = inner.send, inner.post, inner.ready, inner.close
        self.share = inner.share

    @property
    def found(self) -> Filled:
        return Filled(self._steps, self._filled, self._waited)

    def wait(self, message: Letter) -> Tensor:
        return self.awaited(message, lambda: self.inner.ready(message), lambda: self.inner.wait(message))

    def start_sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        return _Filled(self.inner.start_sum(tensor, ranks), self)

    def start_scatter(self, parts: Tensor, mine: Tensor, ranks: tuple[int, ...]) -> Pending:
        return _Filled(self.inner.start_scatter(parts, mine, ranks), self)

    def start_gather(self, mine: Tensor, parts: Tensor, ranks: tuple[int, ...], then: Then | None = None) -> Pending:
        return _Filled(self.inner.start_gather(mine, parts, ranks, then), self)

    def start_broadcast(self, tensor: Tensor, root: int, ranks: tuple[int, ...]) -> Pending:
        return _Filled(self.inner.start_broadcast(tensor, root, ranks), self)

    def start_reduce(self, tensor: Tensor, root: int, ranks: tuple[int, ...]) -> Pending:
        return _Filled(self.inner.start_reduce(tensor, root, ranks), self)

    def watch(self, pending: Pending, *, gather: bool) -> Pending:
        return _Filled(self.inner.watch(pending, gather=gather), self)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        self.start_sum(tensor, ranks).wait()

    def finish_step(self, *, drain: bool = True) -> None:
        self._sums = 0
        self.inner.finish_step(drain=drain)

    def summed(self, pending: Pending) -> None:
        """Wait for a collective; those of a step come in the same order in each."""
        self._sums += 1
        self.awaited(self._sums, pending.ready, pending.wait)

    def awaited(self, place: Hashable, ready: Callable[[], bool], wait: Callable[[], Result]) -> Result:
        """Do steps of the task until what is awaited is there, or the next one could end too late; then wait."""
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
            if late:  # it came in between: how long before the end, nobody knows
                self._known[place] = last - began
        while self.device.type == "cuda" and not ready():
            time.sleep(_LOOK_S)
        found = wait()
        self._waited += now() - began
        if not late:
            self._known[place] = now() - began
        return found

    def _longest(self) -> float:
        """What the next step of the task may take."""
        return max(getattr(self.task, "seconds", None) or 0.0, max(self._took, default=0.0))

    def _step(self, task: Task) -> None:
        """One step; what it raises ends the task and not the run."""
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


class _Filled(NamedTuple):
    """A `Pending` whose wait is filled."""

    inner: Pending
    filling: Filling

    def ready(self) -> bool:
        return self.inner.ready()

    def wait(self) -> None:
        self.filling.summed(self.inner)
