"""How long ops are to take while their tensors are looked at, so that each keeps its share of the step.

Looking costs time for every kernel: ops of many small ones become several times slower, ops of a few large ones hardly.
Left alone, ranks would meet at other moments than they do, and other tensors would wait for them. So all are made
slower by the same factor.
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

LOOKING_S = 0.005  # for the kernels of a layer, on a CPU
MOST = 8.0  # times slower

Pace = Mapping[tuple[Kind, int], float]  # kind and stage -> seconds from when an op has its inputs


def pace_of(worker: Worker, timing: Timing, result: StepResult | None) -> Pace | None:
    """The pace for a step like that of `timing`; None if `result` does not tell. All ranks find the same factor."""
    if result is None:
        return None
    factor = slower(worker.phase_run.plan.manifest, result)
    return {what: factor * seconds for what, seconds in usual(worker, timing).items()}


def usual(worker: Worker, timing: Timing) -> Pace:
    """Seconds of the compute ops of a step, without what they waited for: the median over microbatches."""
    found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    computing = ((index, op) for index, (_, op, _) in enumerate(worker.script) if op.kind.computes)
    for (index, op), lead in zip(computing, timing.lead_ns, strict=True):
        found[op.kind, op.stage].append((timing.took_ns[index] - lead) / 1e9)
    return {what: statistics.median(seconds) for what, seconds in found.items()}


def slower(manifest: Manifest, result: StepResult) -> float:
    """The factor: so that an op of usual length has time for what looking at it takes. The same on every rank."""
    ops = 3 * manifest.microbatches * manifest.stages / manifest.ranks
    each = max(result.busy_seconds) / ops
    layers = max(map(len, manifest.layers))
    return MOST if each <= 0 else min(MOST, 1 + LOOKING_S * layers / each)


def left(pace: Pace | None, op: Op, took: float) -> float:
    """Seconds that an op which took `took` is to take longer."""
    return 0.0 if pace is None else max(0.0, pace.get((op.kind, op.stage), 0.0) - took)
