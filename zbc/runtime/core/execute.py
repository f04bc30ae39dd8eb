"""The runtime loop: runs every op of a rank's plan, in the order of the plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from zbc.job.userobject import IN_A_RANK
from zbc.runtime.core import exhausted
from zbc.runtime.core.progress import Progress, StepResult
from zbc.runtime.core.state import Worker
from zbc.runtime.core.validate import reset_peak
from zbc.runtime.seeding import moved, unseeded

__all__ = ["Progress", "Step", "StepResult", "finish", "run_step"]


class Step(Protocol):
    """One way to run a step; see `run_step`."""

    def __call__(self, worker: Worker, step: int, *, stop: bool = False) -> StepResult | None: ...


def run_ops(worker: Worker) -> None:
    progress, now = worker.progress, time.monotonic
    for index, (handler, op, text) in enumerate(worker.script):
        progress.index, progress.op, progress.since = index, text, now()
        handler(worker, op)


def run_step(
    worker: Worker, step: int, *, stop: bool = False, loop: Callable[[Worker], None] = run_ops
) -> StepResult | None:
    """Runs one training step of one rank. `stop` asks all ranks to end after this step; `StepResult.stop` is their
    decision.

    `loop` runs the ops; tracing.py has one that also records them. Backward runs on this thread on every device:
    torch's own thread for a GPU knows neither the current slot of this thread nor its locks, and ranks that are threads
    would share it.

    Without a barrier the result is the previous step's, None in the first; `finish` returns the last one's. In a plan
    without a flush `worker.ends` says whether to flush anyway, since something runs between this step and the next.
    An exception from an op keeps its type and gets a note naming rank, op (counted from 0), step and the op itself.
    `step` counts from 0 and decides which data are read; messages to users count steps from 1, as the console does.
    Raises E703 if the plan leaves values unused or has no op that agrees on the result.
    """
    before, run = None, worker.run_of(step)
    if run is not worker.phase_run:  # the last step of another phase becomes final
        before, worker.phase_run = finish(worker), run
    worker.stop = stop
    progress, now = worker.progress, time.monotonic
    worker.step, worker.verdict = step, None
    reset_peak(worker.device)
    ending = worker.phase_run.ending
    ending.opens(worker, step)
    progress.step, progress.total = step, len(worker.script)
    began = now()
    worker.hidden()  # drops the time between steps
    for feature in worker.features:
        feature.opens(worker)
    others = None if worker.watch is None else unseeded()
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
    if others is not None and worker.watch is not None:  # loggers and fillers may draw: in the next step layers tell
        worker.watch.outside = moved(others) is not None
    result = ending.closes(worker, began)
    if result is not None and result.step == step:
        result = replace(result, sums_hidden=worker.hidden())
    return result if before is None else before


def finish(worker: Worker) -> StepResult | None:
    """Makes the last step final if it is not yet; returns its result, None if `run_step` has returned it."""
    return worker.phase_run.ending.finish(worker)
