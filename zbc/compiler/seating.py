"""Assigns ranks of the run to places in the pipeline, given a table of link speeds.

It is the chain of best_chain(), which fits a linear pipeline; for rings of looped placements and all-reduces of
replicas, the order of their numbers where the simulated step is shorter with it.
"""

from __future__ import annotations

from dataclasses import replace

from zbc.compiler.cost import estimate
from zbc.compiler.cost.chain import best_chain
from zbc.compiler.cost.machine import Machine
from zbc.compiler.order import order
from zbc.compiler.partition.setup import Ordered
from zbc.job.spec import Job

_NOMINAL = 1 << 20  # bytes of a tensor of unknown size


def seated(job: Job, budget: float | None) -> tuple[Job, Ordered]:
    """The job with the order of its ranks, and its order of ops. Raises as `order`."""
    if job.links is None or job.parallel.order is not None or job.parallel.pp * job.parallel.dp == 1:
        return job, order(job, budget)
    chosen = _with(job, best_chain(transfers(job)))
    found = order(chosen, budget)
    numbered = _with(job, tuple(range(job.parallel.pp * job.parallel.dp)))
    if found.repriced(numbered).step_ms(numbered) >= found.step_ms(chosen):
        return chosen, found
    again = order(numbered, budget)
    return (numbered, again) if again.step_ms(numbered) < found.step_ms(chosen) else (chosen, found)


def transfers(job: Job) -> list[list[float]]:
    """ms of the tensor between two stages, from any rank of a pipeline to any other; with tensor parallelism each rank
    sends its own to its counterpart."""
    size = max((layer.size.result for layer in estimate.layers(job)), default=0.0) or _NOMINAL
    machine, world = Machine.of(job), range(job.parallel.pp * job.parallel.dp)
    count = job.parallel.width

    def ms(a: int, b: int) -> float:
        return 0.0 if a == b else max(machine.between(a * count + at, b * count + at).ms(size) for at in range(count))

    return [[ms(a, b) for b in world] for a in world]


def _with(job: Job, ranks: tuple[int, ...]) -> Job:
    return replace(job, parallel=job.parallel.model_copy(update={"order": list(ranks)}))
