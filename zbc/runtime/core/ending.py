"""The end of a step: the verdict of its ranks, when its result is known, and work that may still be pending after it.

`Ending` is the ordinary one: all ranks learn the verdict before any weight changes. Others are `Ahead` (ahead.py: the
verdict arrives in the next step) and `Cycle` (cycle.py: steps follow one another without a flush). No value may be left
over in a store of the worker then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.runtime.core.progress import StepResult
from zbc.text import few

if TYPE_CHECKING:
    from zbc.runtime.core.state import Worker


# The stores of a worker, and the values of `ops.VALUES` that they hold.
STORES = {"edges": ("act", "grad"), "kept": ("kept",), "slots": ("left",), "away": ("host",)}
# The values made by ops that REDO runs again.
REPEATED = frozenset(ref.what for kind in Kind if kind.row.repeats for ref in kind.row.writes)


def leftovers(worker: Worker) -> list[str]:
    """Values that a finished step should have consumed but did not, each as its store and key: `kept[s0 m1]`."""
    due = worker.phase_run.ending.due
    edges = [("edges", edge.send, edge.mb) for edge in worker.edges]
    kept = [(name, key.name, key.mb) for name in STORES if name != "edges" for key in getattr(worker, name)]
    losses = [("losses", f"m{mb}", mb) for mb in worker.losses]
    texts = [f"{name}[{key}]" for name, key, mb in (*kept, *edges, *losses) if due(worker, mb)]
    texts += [text for feature in worker.features for text in feature.leftovers(worker)]
    texts += [f"reading[{kind}, {number}]" for kind, step, number in worker.reading if step <= worker.step]
    return texts + ["summing"] * len(worker.summing)


class Ending:
    """How all steps of one plan end: here all ranks learn the verdict in VALIDATE, and step by it."""

    every: int = 0  # microbatches from one step of a stage to its next; 0: all

    def keyed(self, ops: Iterable[Op]) -> Iterable[Op]:
        """All ops of a plan under every key that they may have."""
        return ops

    def opens(self, worker: Worker, step: int) -> None:
        """A step begins."""

    def closes(self, worker: Worker, began: float) -> StepResult | None:
        """All ops since `began` have run. Returns the result of the latest final step, None if returned before."""
        verdict = worker.verdict
        if verdict is None:
            text = "run: the plan has no VALIDATE, so the ranks agree on nothing"
            raise ZbcError("E703", text, where=_where(worker))
        close(worker, drain=True)
        return verdict.of(worker.step, time.monotonic() - began)

    def finish(self, worker: Worker) -> StepResult | None:
        """Makes the last step final if it is not yet; returns its result, None if `closes` has returned it."""
        return None

    def due(self, worker: Worker, mb: int) -> bool:
        """Whether values stored for a microbatch must be consumed by the end of a step."""
        return True

    def follows(self, worker: Worker) -> bool:
        """Whether some ops of the next step have run, so that the next step must run, too."""
        return False


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
        text = f"run: the plan leaves work behind: {left[0]}"
        raise ZbcError("E703", text, where=_where(worker), details=few(left[1:], 7))


def _where(worker: Worker) -> str:
    return f"{worker.plan.manifest.topology.name(worker.rank)} after step {worker.step + 1}"
