"""Lower bounds for every order of a graph of stages.

A rank works on all microbatches. It begins when its first microbatch can arrive. Before its first backward that
microbatch takes the longest path to the loss and back, while the rank can run forwards only. After its last backward
the longest path back to the data and one W are left. Memory limits do not count.
"""

from __future__ import annotations

from zbc.compiler.cost.cost import Costs
from zbc.compiler.sim.ways import longest
from zbc.ir import Placement


def branched(placement: Placement, costs: Costs, least: Costs, m: int) -> tuple[float, float]:
    """Makespan and span, in ms; of any microbatch no op or transfer takes less than `least` says."""
    f, b, w = map(least.column, ("f", "b", "w"))
    links = least.lags(0)
    down = longest(placement, f, links, placement.sources)  # to the end of F of each stage, from the data
    ahead = longest(placement, f, links, placement.sinks)  # from its beginning to the end of the last F
    back = longest(placement, b, links, placement.sinks)  # from the loss to the end of its B
    last = [ms + (0.0 if placement.sources(s) else w[s]) for s, ms in enumerate(b)]
    up = longest(placement, last, links, placement.sources)
    makespan = span = 0.0
    for rank in range(placement.ranks):
        mine = placement.stages_of(rank)
        forward, backward, later = (m * sum(each[s] for s in mine) for each in map(costs.column, ("f", "b", "w")))
        work = forward + backward + later
        head = min((down[s] - f[s] for s in mine), default=0.0)
        warm = min((ahead[s] + back[s] - b[s] for s in mine), default=0.0)  # from its first F to its first B
        tail = min((up[s] - b[s] for s in mine), default=0.0)
        idle = max(0.0, warm - forward) if len(mine) == 1 else 0.0
        span = max(span, work + idle)
        makespan = max(makespan, head + work + idle, head + forward + idle + backward + tail)
    return makespan, span
