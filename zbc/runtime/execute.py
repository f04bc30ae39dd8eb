"""The runtime loop: run every op of a rank's plan, in the order written."""

from __future__ import annotations

import time

from zbc.errors import ZbcError
from zbc.runtime.progress import Progress, StepResult
from zbc.runtime.state import Worker
from zbc.runtime.validate import Verdict, reset_peak

__all__ = ["Progress", "StepResult", "run_step"]


def run_step(worker: Worker, step: int, *, stop: bool = False) -> StepResult:
    """One training step of one rank. `stop` asks all ranks to end after this step; `StepResult.stop` says whether to.

    An exception from an op keeps its type and gets a note naming rank, op (counted from 0), step and the op itself.
    `step` counts from 0 and decides which data are read; texts for people count steps from 1, as the console does.
    Raises E703 if the plan leaves something unused behind or does not agree on the result.
    """
    progress, script, now = worker.progress, worker.script, time.monotonic
    worker.step, worker.stop, worker.verdict = step, stop, None
    reset_peak(worker.device)
    progress.step, progress.total = step, len(script)
    began = now()
    try:
        for index, (handler, op, text) in enumerate(script):
            progress.index, progress.op, progress.since = index, text, now()
            handler(worker, op)
    except Exception as error:
        place = f"op {progress.index} of {progress.total} of step {step + 1}"
        error.add_note(f"while {worker.plan.manifest.name(worker.rank)} ran {place}: {progress.op}")
        raise
    verdict = _finish(worker)
    return StepResult(
        step=step,
        loss=verdict.loss,
        grad_norm=verdict.grad_norm,
        stop=verdict.stop,
        skipped=verdict.skipped,
        seconds=now() - began,
        busy_seconds=verdict.busy_seconds,
        peak_bytes=verdict.peak_bytes,
    )


def _finish(worker: Worker) -> Verdict:
    """Check that the step used up everything, and wait until what was sent has arrived."""
    where = f"{worker.plan.manifest.name(worker.rank)} after step {worker.step + 1}"
    if worker.verdict is None:
        text = "run: the plan has no VALIDATE, so the ranks agree on nothing"
        raise ZbcError("E703", text, where=where)
    left = worker.leftovers()
    if left:
        shown = [*left[1:8], *([f"and {len(left) - 8} more"] if len(left) > 8 else [])]
        raise ZbcError("E703", f"run: the plan leaves work behind: {left[0]}", where=where, details=shown)
    worker.finish_gathers()
    worker.progress.waiting = True
    worker.transport.finish_step()
    worker.progress.waiting = False
    return worker.verdict
