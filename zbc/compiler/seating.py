"""Assigns ranks of the run to places in the pipeline, given a table of link speeds.

The order begins with the chain of best_chain(): for a linear pipeline of up to 14 ranks it is the answer. For rings of
looped placements, all-reduces of replicas and longer chains, parts are then reversed, and ranks exchanged, while the
simulated step gets shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zbc.compiler.cost import estimate, pricing
from zbc.compiler.cost.chain import EXACT, best_chain, turned
from zbc.compiler.cost.machine import Machine
from zbc.compiler.order import order
from zbc.compiler.partition.setup import Ordered, as_ordered, finished
from zbc.job.spec import Job

_NOMINAL = 1 << 20  # bytes of a tensor of unknown size
_OPS, _LEAST, _MOST = 600_000, 12, 400  # ops simulated for moves, and the least and most moves
_BETTER = 1 - 1e-9


def seated(job: Job, table: Sequence[estimate.Layer], budget: float | None) -> tuple[Job, Ordered]:
    """The job with the order of its ranks, and its order of ops. Raises as `order`."""
    if job.links is None or job.parallel.order is not None or job.parallel.pp * job.parallel.dp == 1:
        return job, order(job, table, budget)
    chosen = _with(job, best_chain(transfers(job)))
    found = order(chosen, table, budget)
    placement = found.program.placement
    chain = job.parallel.dp == 1 and placement.chunks == 1 and len(placement.pipes) == 1
    if chain and placement.ranks <= EXACT:
        return chosen, found
    moved = _moved(chosen, found, table)
    if moved is chosen:
        return chosen, found
    again = order(moved, table, budget)
    return (moved, again) if again.step_ms(moved) < found.step_ms(chosen) else (chosen, found)


def transfers(job: Job) -> list[list[float]]:
    """ms of the tensor between two stages, from any rank of a pipeline to any other; with tensor parallelism each rank
    sends its own to its counterpart."""
    size = max((layer.size.result for layer in estimate.layers(job)), default=0.0) or _NOMINAL
    machine, world = Machine.of(job), range(job.parallel.pp * job.parallel.dp)
    count = job.parallel.width
    return [
        [
            0.0 if a == b else max(machine.between(a * count + at, b * count + at).ms(size) for at in range(count))
            for b in world
        ]
        for a in world
    ]


def _with(job: Job, ranks: tuple[int, ...]) -> Job:
    return replace(job, parallel=job.parallel.model_copy(update={"order": list(ranks)}))


def _moved(job: Job, found: Ordered, table: Sequence[estimate.Layer]) -> Job:
    """The job in the rank order with the shortest step for the found order of ops, as far as moves tell."""
    best, least = tuple(job.parallel.order or ()), found.step_ms(job)
    left = max(_LEAST, min(_MOST, _OPS // max(1, found.program.size)))
    numbered = tuple(range(len(best)))
    first = _step(job, found, table, numbered)
    if first < least * _BETTER:
        best, least = numbered, first
    better = True
    while better and left > 0:
        better = False
        for other in turned(best):
            left -= 1
            ms = _step(job, found, table, other)
            if ms < least * _BETTER:
                best, least, better = other, ms, True
                break
            if left <= 0:
                break
    return job if list(best) == job.parallel.order else _with(job, best)


def _step(job: Job, found: Ordered, table: Sequence[estimate.Layer], ranks: tuple[int, ...]) -> float:
    """ms of the found order's step, with its ranks in another order."""
    other, placement = _with(job, ranks), found.program.placement
    costs = pricing.build(as_ordered(other, found), placement, found.stages, table)
    program = finished(other, found.program, costs, found.stages)
    return replace(found, program=program, costs=costs).step_ms(other)
