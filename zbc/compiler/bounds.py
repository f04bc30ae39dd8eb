"""What no schedule of a placement can beat, whatever its order and memory.

Rank r must do all its work, cannot begin before a microbatch has come down to its first stage, and after its last
input gradient a microbatch still has to travel back to stage 0, where one W follows. Before its first backward a rank
can at most run all its forwards; what is left of the way to the last stage and back is idle time.
Search tightens these with the memory limit; see the lower bounds in arXiv 2401.10241, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbc.compiler.cost import Costs
from zbc.ir import Placement


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds in ms."""

    makespan: float
    span: float


def bounds(placement: Placement, costs: Costs, m: int) -> Bounds:
    """Bounds for m microbatches. With several pipes only the total work is counted: the split between them is free."""
    if len(placement.pipes) > 1:
        ranks = placement.ranks
        total = m * sum(costs.f[s] + costs.b[s] + costs.w[s] for s in range(costs.stages)) / ranks
        return Bounds(total, total)
    single = [_rank(placement, costs, m, r) for r in range(placement.ranks)]
    return Bounds(max(b.makespan for b in single), max(b.span for b in single))


def _rank(placement: Placement, costs: Costs, m: int, rank: int) -> Bounds:
    stages = placement.stages_of(rank)
    first, last, end = stages[0], stages[-1], placement.stages - 1
    comm = costs.comm[0]
    forward = m * sum(costs.f[s] for s in stages)
    back = m * sum(costs.b[s] for s in stages)
    weight = m * sum(costs.w[s] for s in stages)
    head = sum(costs.f[:first]) + sum(comm[:first])
    # From the start of the first F here to the earliest start of a backward here: down to the end and up again.
    way = sum(costs.f[first : end + 1]) + sum(comm[first:end]) + sum(costs.b[last + 1 : end + 1]) + sum(comm[last:end])
    idle = max(0.0, way - forward)
    span = forward + back + weight + idle
    tail = sum(costs.b[:first]) + sum(comm[:first]) + costs.w[0] if first > 0 else costs.w[0]
    return Bounds(max(head + span, head + forward + idle + back + tail), span)
