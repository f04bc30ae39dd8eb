"""parallel.replicas = "auto": how many ranks each stage gets.

The plans that are best by a closed form (partition/replicas.py), and those with equally many ranks for each stage, are
planned; the shortest simulated step of those that fit counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zbc.compiler.check.memory import excess
from zbc.compiler.cost import estimate
from zbc.compiler.cost.footprint import GRAD_BYTES
from zbc.compiler.cost.machine import Machine
from zbc.compiler.order import order
from zbc.compiler.partition.replicas import Problem, joined, plans
from zbc.compiler.schedules.replicated import NAME
from zbc.errors import ZbcError
from zbc.job.rules import fewest_microbatches
from zbc.job.spec import Job

_LAYERS, _SLACK, _PLANNED = 10, 0.05, 6  # layers of the closed form, how much longer plans may be, and how many count


def replicated(job: Job, table: Sequence[estimate.Layer]) -> Job:
    """The job with its replicas written down. Raises what the last of them was refused for, if all were."""
    if job.parallel.replicas != "auto" or (job.schedule.kind or "").lower() != NAME:
        return job
    found, refused = list[tuple[bool, float, Job]](), ZbcError("E126", "config: no replicas can be planned")
    for counts in candidates(job, table):
        other = replace(job, parallel=job.parallel.model_copy(update={"replicas": list(counts)}))
        try:
            made = order(other, table, 0.0)
        except ZbcError as error:
            refused = error
            continue
        found.append((excess(other, made.memory, made.costs) > 0, made.step_ms(other), other))
    if not found:
        raise refused
    return min(found, key=lambda entry: entry[:2])[2]


def candidates(job: Job, table: Sequence[estimate.Layer]) -> list[tuple[int, ...]]:
    """Ranks of each stage: the best by the closed form first."""
    machine, pp, m = Machine.of(job), job.parallel.pp, job.schedule.microbatches
    known = estimate.boundary_bytes(job.model, job.schedule.microbatch_size, job.parallel.shared)
    before = [0.0, *((known or layer.size.result) for layer in table[:-1])]
    grads = [float(GRAD_BYTES * layer.params) for layer in table]
    times = [layer.f for layer in table], [layer.backward for layer in table]
    near, far = machine.near.speed, machine.far.speed
    problem = Problem(*times, grads, before, pp, job.hardware.ranks_per_node, near, far, m)
    best = plans(joined(problem, _LAYERS), _SLACK)
    found = list(dict.fromkeys(tuple(stage[2] for stage in plan.stages) for plan in best))[:_PLANNED]
    equal = [(pp // count,) * count for count in range(1, pp + 1) if pp % count == 0]
    allowed = [one for one in equal if len(one) <= len(table)]
    fewest, _ = fewest_microbatches(vars(job))
    return [counts for counts in dict.fromkeys([*found, *allowed]) if max(counts) <= fewest]
