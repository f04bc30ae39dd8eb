"""Peak activations of the ranks of an order, as numbers of values: quick to weigh again under other costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zbc.compiler.cost.cost import Costs
from zbc.ir import Kind, Program
from zbc.ops import VALUES

HELD = tuple(what for what, value in VALUES.items() if value.memory == "activations")
Held = tuple[tuple[int, tuple[int, ...]], ...]  # (stage, the number of each value of HELD)


def fullest(program: Program) -> list[list[Held]]:
    """Per rank, the holdings that can be its peak, for any sizes of its stages' values."""
    return [_rank(program, rank) for rank in range(program.placement.ranks)]


def _rank(program: Program, rank: int) -> list[Held]:
    stages = program.placement.stages_of(rank)
    counts = {stage: [0] * len(HELD) for stage in stages}  # of slices of microbatches, if there are several
    seen: set[Held] = set()
    found: list[Held] = []
    for kind, stage, *_ in program.ranks[rank]:
        made, freed = _MADE[kind], _FREED[kind]
        for k in made:
            counts[stage][k] += 1
        for k in freed:
            counts[stage][k] -= 1
        if made:
            now = tuple((stage, tuple(each)) for stage, each in counts.items())
            if now not in seen and not any(_covers(other, now) for other in found):
                found = [other for other in found if not _covers(now, other)] + [now]
            seen.add(now)
    return found


_MADE = {kind: [HELD.index(ref.what) for ref in kind.row.writes if ref.what in HELD] for kind in Kind}
_FREED = {kind: [HELD.index(ref.what) for ref in kind.row.frees if ref.what in HELD] for kind in Kind}


def _covers(one: Held, other: Held) -> bool:
    """Whether the first has at least as many of every value; B may leave more than F did, so each value counts."""
    return all(
        a >= b for (_, mine), (_, theirs) in zip(one, other, strict=True) for a, b in zip(mine, theirs, strict=True)
    )


def peaks(held: Sequence[Sequence[Held]], sizes: Mapping[str, Sequence[float]]) -> list[float]:
    """The peak of each rank, in the unit of `sizes`, which has a size per stage for each value."""
    table = [sizes[what] for what in HELD]
    return [
        max(
            (sum(n * size[s] for s, counts in one for n, size in zip(counts, table, strict=True)) for one in rank),
            default=0.0,
        )
        for rank in held
    ]


def bytes_of(held: Sequence[Sequence[Held]], costs: Costs) -> list[float]:
    """Peak activation bytes of each rank; [] if sizes are not known."""
    return peaks(held, {what: costs.bytes_of(what) for what in HELD}) if costs.bytes else []
