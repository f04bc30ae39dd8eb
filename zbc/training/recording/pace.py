"""Target times of ops while their memory is measured, so that each keeps its share of the step.

Measuring costs time for every kernel: ops of many small ones become several times slower, ops of a few large ones
hardly do. Ranks would then synchronise at other moments than usual, with other tensors in flight. So all ops are slowed
by the same factor.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping

from zbc.ir import Kind, Op
from zbc.plan.directory import Manifest
from zbc.runtime.core.progress import StepResult
from zbc.runtime.core.state import Worker
from zbc.trace.recording import Timing

LOOKING_S = 0.005  # of measuring the kernels of a layer, on a CPU
MOST = 8.0  # maximum factor

Pace = Mapping[tuple[Kind, int], float]  # kind and stage -> seconds from when an op has its inputs


def pace_of(worker: Worker, timing: Timing, result: StepResult | None) -> Pace | None:
    """The pace for a step with the times of `timing`; None without a `result`. All ranks compute the same factor."""
    if result is None:
        return None
    factor = slower(worker.phase_run.plan.manifest, result)
    return {what: factor * seconds for what, seconds in usual(worker, timing).items()}


def usual(worker: Worker, timing: Timing) -> Pace:
    """Seconds of the compute ops of a step, without their waits: the median over microbatches."""
    found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    computing = ((index, op) for index, (_, op, _) in enumerate(worker.script) if op.kind.computes)
    for (index, op), lead in zip(computing, timing.lead_ns, strict=True):
        found[op.kind, op.stage].append((timing.took_ns[index] - lead) / 1e9)
    return {what: statistics.median(seconds) for what, seconds in found.items()}


def slower(manifest: Manifest, result: StepResult) -> float:
    """The factor that gives an op of mean length enough time for its measurement. The same on every rank."""
    ops = 3 * manifest.microbatches * manifest.stages / manifest.ranks
    mean = max(result.busy_seconds) / ops
    layers = max(map(len, manifest.layers))
    return MOST if mean <= 0 else min(MOST, 1 + LOOKING_S * layers / mean)


def left(pace: Pace | None, op: Op, took: float) -> float:
    """Seconds by which an op that took `took` is to be delayed."""
    return 0.0 if pace is None else max(0.0, pace.get((op.kind, op.stage), 0.0) - took)
