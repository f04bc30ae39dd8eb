"""What the ranks of an order hold at their fullest, as numbers of microbatches: quick to weigh under other costs."""

from __future__ import annotations

from collections.abc import Sequence

from zbc.compiler.cost import Costs
from zbc.ir import COMPUTE, Kind, Program

Held = tuple[tuple[int, int, int], ...]  # (stage, microbatches between F and B, microbatches between B and W)


def fullest(program: Program) -> list[list[Held]]:
    """Per rank, what it holds at moments of which one is its fullest, whatever its stages hold for a microbatch."""
    return [_rank(program, rank) for rank in range(program.placement.ranks)]


def _rank(program: Program, rank: int) -> list[Held]:
    stages = program.placement.stages_of(rank)
    place = {stage: k for k, stage in enumerate(stages)}
    kept, left = [0] * len(stages), [0] * len(stages)
    seen: set[Held] = set()
    found: list[Held] = []
    for kind, stage, *_ in program.ranks[rank]:
        if kind not in COMPUTE:
            continue
        k = place[stage]
        if kind is Kind.F:
            kept[k] += 1
        elif kind is Kind.W:
            left[k] -= 1
            continue
        else:
            kept[k] -= 1
            if kind is Kind.BW:
                continue
            left[k] += 1
        now = tuple(zip(stages, kept, left, strict=True))
        if now not in seen and not any(_covers(other, now) for other in found):
            found = [other for other in found if not _covers(now, other)] + [now]
        seen.add(now)
    return found


def _covers(one: Held, other: Held) -> bool:
    """Whether the first has all of the second; B may leave more than F did, so both numbers count for themselves."""
    return all(a[1] >= b[1] and a[2] >= b[2] for a, b in zip(one, other, strict=True))


def peaks(held: Sequence[Sequence[Held]], kept: Sequence[float], left: Sequence[float]) -> list[float]:
    """The most each rank holds, in the unit of `kept` and `left` per stage."""
    return [max((sum(a * kept[s] + b * left[s] for s, a, b in one) for one in rank), default=0.0) for rank in held]


def bytes_of(held: Sequence[Sequence[Held]], costs: Costs) -> list[float]:
    """The same in bytes; none where sizes are not known."""
    return peaks(held, costs.bytes_of("kept"), costs.bytes_of("left")) if costs.bytes else []
