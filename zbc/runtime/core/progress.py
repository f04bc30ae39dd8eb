"""What a rank says about itself: where it is now, and what a finished step was like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(slots=True)
class Progress:
    """The op a rank is in. Its own thread writes, the watchdog thread reads; a torn read is a moment old, no more.

    `index` counts from 0 like the lines of a plan file; `since` is `time.monotonic()` when the op began; `waiting`
    says that the rank is blocked in a receive or a collective.

    On a device that works later than it is told to, this is where the host is, and `behind(now)` where the device is.
    """

    step: int = 0
    index: int = 0
    total: int = 0
    op: str = ""
    waiting: bool = False
    since: float = 0.0
    behind: Callable[[float], Progress] | None = None
    thread: int | None = None  # the one the op runs on, if not the rank's own

    def seen(self, now: float) -> Progress:
        """Where the rank is at `now` (`time.monotonic`), its device included."""
        return self if self.behind is None else self.behind(now)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One training step, as its ranks have agreed on it; all but `seconds` and `sums_hidden` is the same on every rank.

    `loss` is the mean over microbatches, `grad_norm` the norm of all gradients before clipping, `stop` whether a rank
    asked to end here, `skipped` that the norm was not finite and no weight changed, `redone` that forwards of the step
    after it ran twice, because it did not stand as they assumed. `seconds` is this rank's wall time.
    `busy_seconds` (per rank) is time inside compute ops without waiting; `peak_bytes` (per rank) is device memory
    allocated at most during the step on cuda, and the largest resident size of the process so far on cpu.
    `sums_hidden` is the share of the time of sums inside of ops (from their start until the op went on) in which this
    rank computed; None where there are none, where a rank does not see them (on cuda), and in steps without a barrier.
    `added` is what layers added to the loss (added.py), a mean over microbatches as well; `routed` the rows that each
    expert of each block got.
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

    def of(self, step: int, seconds: float, *, redone: bool = False) -> StepResult:
        """The result of a step, which took so long on this rank."""
        return replace(self, step=step, seconds=seconds, redone=redone)

    def clip(self, largest: float | None) -> float | None:
        """What to multiply gradients with so that their norm is at most `largest`; None to leave them.

        As torch.nn.utils.clip_grad_norm_: min(1, largest / (norm + 1e-6)).
        """
        if largest is None or self.skipped:
            return None
        scale = largest / (self.grad_norm + 1e-6)
        return scale if scale < 1.0 else None


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The mean loss over samples that are never trained on, after step `step`; the same on every rank but `seconds`."""

    step: int
    loss: float
    samples: int
    seconds: float
