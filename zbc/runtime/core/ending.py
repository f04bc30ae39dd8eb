"""How a step ends: what its ranks agree on, when its result is known, and what may still be under way behind it.

`Barrier` is the ordinary end: all ranks learn the verdict before any weight changes. Others are `Ahead` (ahead.py: the
verdict comes in the next step) and `Cycle` (cycle.py: steps follow one another without a flush).
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
    """Of all steps of one plan."""

    every: int = 0  # microbatches from one step of a stage to its next; 0: all

    def keyed(self, ops: Iterable[Op]) -> Iterable[Op]:
        """All ops of a plan as they may be keyed."""
        return ops

    def opens(self, worker: Worker, step: int) -> None:
        """A step begins."""

    def closes(self, worker: Worker, began: float) -> StepResult | None:
        """All ops have run, since `began`. The result of the latest step that is final, None if it was given before."""

    def finish(self, worker: Worker) -> StepResult | None:
        """Make the last step final where that is still to be done; its result, None if `closes` has given it."""
        return None

    def due(self, worker: Worker, mb: int) -> bool:
        """Whether what a microbatch leaves has to be used up when a step is over."""
        return True

    def follows(self, worker: Worker) -> bool:
        """Whether some of the next step has run, so that it has to come."""
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
    """Check that the step used up everything; with `drain`, wait until what was sent has arrived."""
    refuse_left(worker)
    for feature in worker.features:
        feature.closes(worker)
    worker.progress.waiting = True
    worker.transport.finish_step(drain=drain)
    worker.progress.waiting = False


def refuse_left(worker: Worker) -> None:
    """Raise E703 for what a finished step should have used up and did not."""
    left = leftovers(worker)
    if left:
        shown = [*left[1:8], *([f"and {len(left) - 8} more"] if len(left) > 8 else [])]
        raise ZbcError("E703", f"run: the plan leaves work behind: {left[0]}", where=_where(worker), details=shown)


def _where(worker: Worker) -> str:
    return f"{worker.plan.manifest.topology.name(worker.rank)} after step {worker.step + 1}"
