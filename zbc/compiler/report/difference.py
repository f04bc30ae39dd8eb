"""Differences of two programs, rank by rank: ops in the same order, moved ops, ops that only one of them has."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zbc.ir import Op, Program


class DiffLine(NamedTuple):
    """One line of an aligned listing: the steps of an op on both sides, None if it is missing, or on another line."""

    op: Op
    left: int | None
    right: int | None


@dataclass(frozen=True, slots=True)
class RankDifference:
    """One rank. `moved` ops are on both sides, in another order; a move shows up on two lines, one for each side."""

    rank: int
    lines: tuple[DiffLine, ...]
    moved: int
    only_left: int
    only_right: int

    @property
    def same(self) -> bool:
        return not self.moved and not self.only_left and not self.only_right


def difference(left: Program, right: Program, *, compute_only: bool = True) -> list[RankDifference]:
    """Rank by rank; a missing rank of one program counts as empty. O(ops log ops)."""
    rows = []
    for rank in range(max(len(left.ranks), len(right.ranks))):
        sides = [program.ranks[rank] if rank < len(program.ranks) else () for program in (left, right)]
        if compute_only:
            sides = [tuple(op for op in ops if op.kind.computes) for ops in sides]
        rows.append(_rank(rank, sides[0], sides[1]))
    return rows


def _rank(rank: int, left: Sequence[Op], right: Sequence[Op]) -> RankDifference:
    stay = kept(left, right)
    both = len(set(left) & set(right))
    lines = tuple(_aligned(left, right, stay))
    return RankDifference(rank, lines, both - len(stay), len(left) - both, len(right) - both)


def _aligned(left: Sequence[Op], right: Sequence[Op], stay: Sequence[Op]) -> Iterator[DiffLine]:
    """Yields both sides in their own order, aligned at the ops that stay."""
    a = b = 0
    for op in (*stay, None):
        while a < len(left) and left[a] != op:
            yield DiffLine(left[a], a, None)
            a += 1
        while b < len(right) and right[b] != op:
            yield DiffLine(right[b], None, b)
            b += 1
        if op is not None:
            yield DiffLine(op, a, b)
            a, b = a + 1, b + 1


def kept(left: Sequence[Op], right: Sequence[Op]) -> list[Op]:
    """A longest run of ops, not necessarily adjacent, in the same order on both sides. The longest increasing run of
    places (patience sorting); an op that comes twice counts at its last place on the left, once."""
    at = {op: k for k, op in enumerate(left)}
    seen: set[Op] = set()
    tails: list[int] = []  # the smallest place that ends a run of each length
    ends: list[int] = []  # its index in `places`
    places: list[tuple[int, int]] = []  # (place, index of the one before), by arrival
    for op in right:
        if op not in at or op in seen:
            continue
        seen.add(op)
        k = bisect_left(tails, at[op])
        places.append((at[op], ends[k - 1] if k else -1))
        tails[k : k + 1] = [at[op]]
        ends[k : k + 1] = [len(places) - 1]
    run: list[Op] = []
    index = ends[-1] if ends else -1
    while index >= 0:
        place, index = places[index]
        run.append(left[place])
    return run[::-1]
