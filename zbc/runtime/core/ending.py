"""The end of a step: the verdict of its ranks, when its result is known, and work that may still be pending after it.

`Barrier` is the ordinary end: all ranks learn the verdict before any weight changes. Others are `Ahead` (ahead.py: the
verdict arrives in the next step) and `Cycle` (cycle.py: steps follow one another without a flush).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from zbc.errors import ZbcError
from zbc.ir import Op
from zbc.runtime.core.progress import StepResult
from zbc.runtime.core.stores import leftovers

if TYPE_CHECKING:
    from zbc.runtime.core.state import Worker


class Ending(Protocol):
    """How all steps of one plan end."""

    every: int = 0  # microbatches from one step of a stage to its next; 0: all

    def keyed(self, ops: Iterable[Op]) -> Iterable[Op]:
        """All ops of a plan under every key that they may have."""
        return ops

    def opens(self, worker: Worker, step: int) -> None:
        """A step begins."""

    def closes(self, worker: Worker, began: float) -> StepResult | None:
        """All ops since `began` have run. Returns the result of the latest final step, None if returned before."""

    def finish(self, worker: Worker) -> StepResult | None:
        """Makes the last step final if it is not yet; returns its result, None if `closes` has returned it."""
        return None

    def due(self, worker: Worker, mb: int) -> bool:
        """Whether values stored for a microbatch must be consumed by the end of a step."""
        return True

    def follows(self, worker: Worker) -> bool:
        """Whether some ops of the next step have run, so that the next step must run, too."""
        return False


class Barrier(Ending):
    """All ranks learn the verdict in VALIDATE, and step by it."""

    def closes(self, worker: Worker, began: float) -> StepResult | None:
        verdict = worker.verdict
        if verdict is None:
            text = "run: the plan has no VALIDATE, so the ranks agree on nothing"
            raise ZbcError("E703", text, where=_where(worker))
        close(worker, drain=True)
        return verdict.of(worker.step, time.monotonic() - began)


def close(worker: Worker, *, drain: bool) -> None:
    """Checks that the step consumed all stored values; with `drain`, waits until its messages have arrived."""
    refuse_left(worker)
    for feature in worker.features:
        feature.closes(worker)
    worker.progress.waiting = True
    worker.transport.finish_step(drain=drain)
    worker.progress.waiting = False


def refuse_left(worker: Worker) -> None:
    """Raises E703 for values that a finished step should have consumed but did not."""
    left = leftovers(worker)
    if left:
        shown = [*left[1:8], *([f"and {len(left) - 8} more"] if len(left) > 8 else [])]
        raise ZbcError("E703", f"run: the plan leaves work behind: {left[0]}", where=_where(worker), details=shown)


def _where(worker: Worker) -> str:
    return f"{worker.plan.manifest.topology.name(worker.rank)} after step {worker.step + 1}"
