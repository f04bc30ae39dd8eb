"""The least memory any order needs, and an order that needs no more.

Before a rank's first B, one microbatch has been through all stages of the rank; so every order holds at least the peak
of one microbatch run alone. Running microbatches one after another holds just that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from zbc.compiler.cost.cost import Costs
from zbc.compiler.search.problem import KINDS, Problem
from zbc.errors import ZbcError
from zbc.ir import Kind, Placement, nth
from zbc.text import at_least


def least_of(placement: Placement, costs: Costs) -> list[float]:
    """Activation units of each rank without which no order exists; with several pipes, of one microbatch in the pipe
    that needs more."""
    kept, left = costs.units("kept"), costs.units("left")
    found = [0.0] * placement.ranks
    if costs.slices > 1:
        return _of_slices(placement, costs)
    for homes in placement.pipes:
        for rank in set(homes):
            mine = [stage for stage, home in enumerate(homes) if home == rank]
            found[rank] = max(found[rank], _alone(mine, kept, left))
    return found


def check_feasible(name: str, placement: Placement, costs: Costs, limits: Sequence[float] | None) -> None:
    """Raise E303 with the smallest working limit if some rank's limit is below the need of any order."""
    needs = least_of(placement, costs)
    short = [r for r, limit in enumerate(limits or ()) if needs[r] > limit + 1e-6]
    if limits and short:
        rank = max(short, key=lambda r: needs[r] - limits[r])
        text = f"does not fit: rank {rank} holds {needs[rank]:.6g} activation units for one microbatch alone"
        text += f", its limit is {limits[rank]:.6g}"
        share = max(needs) / placement.ranks
        raise ZbcError("E303", text, hint=f'the smallest memory_limit for {name} here is "{at_least(share, 6)}x"')


def _of_slices(placement: Placement, costs: Costs) -> list[float]:
    k, stages = costs.slices, range(placement.stages)
    changes = {kind: [tuple(costs.held(nth(kind, s, n, k)) for n in range(k)) for s in stages] for kind in KINDS}
    alone = (_in_turn(placement.stages_of(rank), changes) for rank in range(placement.ranks))
    return [max(accumulate(turns), default=0.0) for turns in alone]


def _in_turn(stages: Sequence[int], changes: Mapping[Kind, Sequence[Sequence[float]]]) -> Iterator[float]:
    """Yields memory changes of one microbatch alone, slice by slice: all F, then B and W from the last stage up."""
    f, b, w = (changes[kind] for kind in KINDS)
    for s in stages:
        yield from f[s]
    for s in reversed(stages):
        for both in zip(b[s], w[s], strict=True):
            yield from both


def _alone(stages: Sequence[int], kept: Sequence[float], left: Sequence[float]) -> float:
    """The peak of one microbatch on a rank with these stages."""
    held = peak = float(sum(kept[s] for s in stages))
    for s in reversed(stages):  # B, then its W, from the last stage up
        held += left[s] - kept[s]
        peak = max(peak, held)
        held -= left[s]
    return peak


def one_by_one(problem: Problem) -> list[int]:
    """The rank-major order that finishes each microbatch before the next: the least memory, the longest time."""
    rows = problem.rows()
    f, b, w = (problem.bases(rows, kind) for kind in KINDS)
    order = list[int]()
    k, pipes = problem.slices, problem.pipes
    for stages in problem.stages:
        ones = list[list[int]]()  # the first microbatch of each pipe
        for pipe in range(pipes):
            mine = [at for at in stages if at // problem.placement.stages == pipe]
            ones.append([f[at] + j for at in mine for j in range(k)])
            ones[-1] += [base + j for at in reversed(mine) for j in range(k) for base in (b[at], w[at])]
        order += [op + i // pipes for i in range(0, problem.m, k) for op in ones[i % pipes]]
    return order
