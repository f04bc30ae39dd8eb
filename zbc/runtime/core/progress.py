"""Reports of a rank: its current op, the result of a finished step, the result of an evaluation; and its compute time,
without its waits, on a GPU also how far its host may run ahead."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch


@dataclass(slots=True)
class Progress:
    """The current op of a rank. Its own thread writes, the watchdog thread reads; a torn read is only slightly stale.

    `index` counts from 0 like the lines of a plan file; `since` is `time.monotonic()` when the op began; `waiting`
    says that the rank is blocked in a receive or a collective.

    On an asynchronous device this is the op that the host is in; `behind(now)` is the one that the device is in.
    """

    step: int = 0
    index: int = 0
    total: int = 0
    op: str = ""
    waiting: bool = False
    since: float = 0.0
    behind: Callable[[float], Progress] | None = None
    thread: int | None = None  # the thread that runs the op, if not the rank's own

    def seen(self, now: float) -> Progress:
        """The progress at `now` (`time.monotonic`), the device's if it is asynchronous."""
        return self if self.behind is None else self.behind(now)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one training step; all but `seconds` and `sums_hidden` is the same on every rank.

    `loss` is the mean over microbatches, `grad_norm` the norm of all gradients before clipping, `stop` whether a rank
    asked to end here, `skipped` that the norm was not finite and no weight changed, `redone` that forwards of the next
    step ran twice, because this step's update was not the one they assumed. `seconds` is this rank's wall time.
    `busy_seconds` (per rank) is time inside compute ops without waiting; `peak_bytes` (per rank) is the peak of device
    memory allocated during the step on cuda, and the peak resident size of the process so far on cpu.
    `sums_hidden` is the share of the time of all-reduces inside ops (from their start until the op resumed) in which
    this rank computed; None if there are none, if a rank cannot measure them (on cuda), and in steps without a barrier.
    `added` is the sum of the auxiliary losses of layers (added.py), a mean over microbatches as well; `routed` is the
    number of rows routed to each expert of each block.
    `scale` is the loss scale of the step.
    `bad_gradients` names the parameters whose gradients, `bad_losses` the microbatches whose losses were not finite.
    """

    loss: float
    grad_norm: float
    stop: bool
    busy_seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    step: int = -1
    seconds: float = 0.0
    skipped: bool = False
    redone: bool = False
    bad_gradients: tuple[str, ...] = ()
    bad_losses: tuple[int, ...] = ()
    sums_hidden: float | None = None
    added: float = 0.0
    routed: tuple[float, ...] = ()
    scale: float = 1.0

    def unscaled(self, scale: float) -> StepResult:
        """This result, of gradients that came times `scale`."""
        return self if scale == 1.0 else replace(self, grad_norm=self.grad_norm / scale, scale=scale)

    def of(self, step: int, seconds: float, *, redone: bool = False) -> StepResult:
        """This result with the number of its step and its wall time on this rank."""
        return replace(self, step=step, seconds=seconds, redone=redone)

    def clip(self, largest: float | None) -> float | None:
        """The factor for gradients that undoes the loss scale and limits their norm to `largest`; None to leave them
        unchanged. As torch.nn.utils.clip_grad_norm_: min(1, largest / (norm + 1e-6))."""
        if self.skipped:
            return None
        scale = (1.0 if largest is None else min(1.0, largest / (self.grad_norm + 1e-6))) / self.scale
        return None if scale == 1.0 else scale


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The mean loss over samples that are never trained on, after step `step`; the same on every rank but `seconds`."""

    step: int
    loss: float
    samples: int
    seconds: float
    kept: int = 0  # samples to choose from
    metric: float | None = None  # the mean of the function that checkpoint.keep_best names
    name: str = ""  # of the validation set, if they have names
    others: tuple[EvaluationResult, ...] = ()  # of the sets after the first


Busy = Callable[[], float]  # seconds; waits until the compute has ended


class Clock:
    """Measures the compute time of a rank: here for devices whose ops complete before the call returns."""

    # Compute begins; its inputs have arrived. Returns a time to be passed to `stop`.
    start: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self._busy = 0.0

    def stop(self, began: float) -> None:
        self._busy += time.perf_counter() - began

    def read(self) -> Busy:
        """Seconds between starts and stops since the last read, as a function to call when they are needed."""
        busy, self._busy = self._busy, 0.0
        return lambda: busy


class Begins(Clock):
    """A `Clock` that calls `begun` when an op begins to compute."""

    def __init__(self, inner: Clock, begun: Callable[[], object]) -> None:
        self._start, self._begun = inner.start, begun
        self.stop, self.read = inner.stop, inner.read  # type: ignore[method-assign]

    def start(self) -> float:
        self._begun()
        return self._start()


def clock_for(device: torch.device, progress: Progress) -> Clock:
    """The clock of a device: events on CUDA, whose ops run asynchronously, otherwise the host's clock."""
    if device.type != "cuda":
        return Clock()
    from zbc.runtime.cuda import CudaClock

    return CudaClock(device, progress)
