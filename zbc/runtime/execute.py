"""The runtime loop: run every op of a rank's plan, in the order written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from zbc.errors import ZbcError
from zbc.job.userobject import IN_A_RANK
from zbc.runtime import cycle, exhausted
from zbc.runtime.ahead import close_step, flush, open_step
from zbc.runtime.progress import Progress, StepResult
from zbc.runtime.seeding import moved, unseeded
from zbc.runtime.state import Worker
from zbc.runtime.validate import Verdict, reset_peak

__all__ = ["Progress", "Step", "StepResult", "finish", "run_step"]


class Step(Protocol):
    """One way to run a step; see `run_step`."""

    def __call__(self, worker: Worker, step: int, *, stop: bool = False) -> StepResult | None: ...


def run_ops(worker: Worker) -> None:
    """Every op of a step, in order."""
    progress, now = worker.progress, time.monotonic
    for index, (handler, op, text) in enumerate(worker.script):
        progress.index, progress.op, progress.since = index, text, now()
        handler(worker, op)


def run_step(
    worker: Worker, step: int, *, stop: bool = False, loop: Callable[[Worker], None] = run_ops
) -> StepResult | None:
    """One training step of one rank. `stop` asks all ranks to end after this step; `StepResult.stop` says whether to.

    `loop` runs the ops; one that looks at them, too, stands in tracing.py. Backward runs on this thread on every
    device: torch's own thread for a GPU knows neither the slot that is current here nor its locks, and ranks as
    threads would share it.

    Without a barrier the result is that of the step before, None in the first: `finish` has that of the last one. Of a
    plan without a flush `worker.ends` says whether one comes all the same, since something stands behind the step.
    An exception from an op keeps its type and gets a note naming rank, op (counted from 0), step and the op itself.
    `step` counts from 0 and decides which data are read; texts for people count steps from 1, as the console does.
    Raises E703 if the plan leaves something unused behind or does not agree on the result.
    """
    worker.stop, before = stop, _enter(worker, step)
    progress, now = worker.progress, time.monotonic
    worker.step, worker.verdict = step, None
    reset_peak(worker.device)
    cyclic = worker.cycle
    if cyclic is not None:
        cycle.open_step(worker, cyclic, step)
    progress.step, progress.total = step, len(worker.script)
    began = now()
    for feature in worker.features:
        feature.opens(worker)
    if worker.group is not None:
        worker.group.hidden()  # what stood between steps does not count
    ahead = worker.ahead
    if ahead is not None:
        open_step(worker, ahead)
    others = unseeded() if worker.watched else None
    try:
        with torch.autograd.set_multithreading_enabled(False):
            loop(worker)
    except IN_A_RANK as error:
        manifest = worker.plan.manifest
        if exhausted.ran_out(error):
            error.add_note(exhausted.predicted(manifest, worker.rank))
        place = f"op {progress.index} of {progress.total} of step {step + 1}"
        error.add_note(f"while {manifest.topology.name(worker.rank)} ran {place}: {progress.op}")
        raise
    if others is not None:  # moved perhaps not by a layer: loggers and fillers may draw, too
        worker.suspect(moved(others) is not None)
    if cyclic is not None:
        before = cycle.close_step(worker, cyclic, began)
        if worker.ends:
            _close(worker, drain=True)
        else:
            _refuse_left(worker)
        return before
    if ahead is None:
        verdict = _verdict(worker)
        _close(worker, drain=True)
        result = verdict.result(step, now() - began)
        return result if worker.group is None else replace(result, sums_hidden=worker.group.hidden())
    found, pending = close_step(worker, ahead)
    _close(worker, drain=False)
    pending.seconds = now() - began
    return found if before is None else before


def _enter(worker: Worker, step: int) -> StepResult | None:
    """Turn to what runs this step. Where that changes the step before becomes final; its result if that was to do."""
    run = worker.run_of(step)
    if run is worker.phase_run:
        return None
    before = finish(worker)
    worker.phase_run = run
    return before


def finish(worker: Worker) -> StepResult | None:
    """Make the last step final where that is still to be done; returns its result, None if `run_step` has."""
    if worker.cycle is not None:
        return cycle.read_told(worker, worker.cycle)
    if worker.ahead is None:
        return None
    worker.progress.index, worker.progress.op = 0, "the end of the last step"
    result = flush(worker, worker.ahead)
    _close(worker, drain=True)
    return result


def _verdict(worker: Worker) -> Verdict:
    if worker.verdict is None:
        text = "run: the plan has no VALIDATE, so the ranks agree on nothing"
        raise ZbcError("E703", text, where=_where(worker))
    return worker.verdict


def _close(worker: Worker, *, drain: bool) -> None:
    """Check that the step used up everything; with `drain`, wait until what was sent has arrived."""
    _refuse_left(worker)
    for feature in worker.features:
        feature.closes(worker)
    worker.progress.waiting = True
    worker.transport.finish_step(drain=drain)
    worker.progress.waiting = False


def _refuse_left(worker: Worker) -> None:
    left = worker.leftovers()
    if left:
        shown = [*left[1:8], *([f"and {len(left) - 8} more"] if len(left) > 8 else [])]
        raise ZbcError("E703", f"run: the plan leaves work behind: {left[0]}", where=_where(worker), details=shown)


def _where(worker: Worker) -> str:
    return f"{worker.plan.manifest.topology.name(worker.rank)} after step {worker.step + 1}"
