"""The least memory any order needs, and an order that needs no more.

Before a rank's first B, one microbatch has been through all stages of the rank; so every order holds at least what one
microbatch, run alone, holds at its fullest. Running microbatches one after another holds just that.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbc.compiler.cost.cost import Costs
from zbc.compiler.search.problem import KINDS, Problem
from zbc.errors import ZbcError
from zbc.ir import Placement
from zbc.text import at_least


def least_of(placement: Placement, costs: Costs) -> list[float]:
    """`least` for any placement: with several pipes, that of one microbatch in the pipe that needs more."""
    kept, left = costs.units("kept"), costs.units("left")
    found = [0.0] * placement.ranks
    for homes in placement.pipes:
        for rank in set(homes):
            mine = [stage for stage, home in enumerate(homes) if home == rank]
            found[rank] = max(found[rank], _alone(mine, kept, left))
    return found


def check_feasible(name: str, placement: Placement, costs: Costs, limits: Sequence[float] | None) -> None:
    """Raise E303 with the smallest limit that works if some rank's is below what any order needs."""
    needs = least_of(placement, costs)
    short = [r for r, limit in enumerate(limits or ()) if needs[r] > limit + 1e-6]
    if limits and short:
        rank = max(short, key=lambda r: needs[r] - limits[r])
        text = f"does not fit: rank {rank} holds {needs[rank]:.6g} activation units for one microbatch alone"
        text += f", its limit is {limits[rank]:.6g}"
        share = max(needs) / placement.ranks
        raise ZbcError("E303", text, hint=f'the smallest memory_limit for {name} here is "{at_least(share, 6)}x"')


def least(problem: Problem) -> list[float]:
    """Per rank, the smallest limit with which any order exists, in the problem's units."""
    return [_alone(mine, problem.keep_b, problem.keep_w) for mine in problem.stages]


def _alone(stages: Sequence[int], kept: Sequence[float], left: Sequence[float]) -> float:
    """What one microbatch holds on a rank with these stages at its fullest."""
    held = peak = float(sum(kept[s] for s in stages))
    for s in reversed(stages):  # B, then its W, from the last stage up
        held += left[s] - kept[s]
        peak = max(peak, held)
        held -= left[s]
    return peak


def one_by_one(problem: Problem) -> list[int]:
    """The rank-major order that finishes each microbatch before the next: the least memory, the longest time."""
    rows = problem.rows()
    f, b, w = (rows.bases(kind) for kind in KINDS)
    order = []
    for stages in problem.stages:
        for i in range(problem.m):
            order += [f[s] + i for s in stages]
            for s in reversed(stages):
                order += [b[s] + i, w[s] + i]
    return order
