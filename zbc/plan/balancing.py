"""Deals samples of unequal length to replicas, and packs them into microbatches.

A microbatch is `rows` rows of `room` tokens; a row holds several samples, then padding. Ranks compute whole rows,
padding included, while samples of one row do not attend to each other: a microbatch takes
`1 + quadratic * sum(length**2) / (rows * room)` times as long as its rows alone.

`balanced` divides costs among ranks: by longest processing time first (Graham 1969), improved by moves and swaps.
`deal` gives each replica its microbatches: the fastest of samples divided so, whole rows divided so, and samples in
their order.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

Row = tuple[int, ...]  # numbers of samples
Microbatch = tuple[Row, ...]
ROUNDS = 1000  # moves and swaps, at most
SAME = 1e-12
MARGIN = 0.015  # a division must be faster than samples in their order by this share, the error of `Shape.time`


@dataclass(frozen=True, slots=True)
class Shape:
    """The replicas and microbatches that samples are dealt to."""

    replicas: int
    room: int  # tokens of a row
    rows: int = 1  # of a microbatch
    most: int = 1  # microbatches of a replica
    ranks: int = 1  # of the pipeline
    quadratic: float = 0.0  # cost of a token per token of its sequence, over its own cost

    @property
    def tokens(self) -> int:
        """The tokens of a microbatch, padding included."""
        return self.rows * self.room

    def cost(self, length: int) -> float:
        """The cost of a sample, in tokens."""
        return length + self.quadratic * length * length

    def of_row(self, lengths: Sequence[int]) -> float:
        """The cost of a whole row with samples of these lengths, in tokens."""
        return self.room + self.quadratic * sum(length * length for length in lengths)

    def factor(self, microbatch: Microbatch, lengths: Sequence[int]) -> float:
        """The time of a microbatch divided by its time without attention."""
        return 1 + self.quadratic * sum(lengths[i] ** 2 for row in microbatch for i in row) / self.tokens

    def time(self, microbatches: Sequence[Microbatch], lengths: Sequence[int]) -> float:
        """The approximate time of a replica: its microbatches one after the other, the first one's forward through the
        other ranks of the pipeline, and the last one's backward, which takes twice as long."""
        factors = [self.factor(mb, lengths) for mb in microbatches]
        return self.tokens * (sum(factors) + (self.ranks - 1) * (factors[0] + 2 * factors[-1]) / 3)


# ---- costs to ranks ------------------------------------------------------------------------------------------


def balanced(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """The indices of the costs that each rank gets, so that the largest load is near the mean."""
    return refined(costs, longest_first(costs, ranks))


def longest_first(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Gives the largest remaining cost to the rank with the least load."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0.0, rank) for rank in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        have, rank = load[0]
        parts[rank].append(i)
        heapq.heapreplace(load, (have + costs[i], rank))
    return parts


def refined(costs: Sequence[float], parts: Sequence[Sequence[int]]) -> list[list[int]]:
    """While it helps, moves a cost from the fullest rank to another, or swaps it for a smaller one."""
    divided = [sorted(part, key=lambda i: costs[i]) for part in parts]
    load = [sum(costs[i] for i in part) for part in divided]
    for _ in range(ROUNDS):
        full = max(range(len(load)), key=load.__getitem__)
        best: tuple[float, int, int, int | None] | None = None
        for other in range(len(load)):
            if other == full:
                continue
            change = _best(costs, divided[full], divided[other], load[full] - load[other])
            if change is not None:
                after = max(load[full] - change[0], load[other] + change[0])
                if best is None or after < best[0]:
                    best = after, other, change[1], change[2]
        if best is None or best[0] >= load[full] * (1 - SAME):
            break
        _, other, gone, back = best
        divided[full].remove(gone)
        divided[other].append(gone)
        if back is not None:
            divided[other].remove(back)
            divided[full].append(back)
        for rank in (full, other):
            divided[rank].sort(key=lambda i: costs[i])
            load[rank] = sum(costs[i] for i in divided[rank])
    return divided


def _best(
    costs: Sequence[float], full: Sequence[int], other: Sequence[int], gap: float
) -> tuple[float, int, int | None] | None:
    """The move or swap that shifts nearest to half of the gap between two ranks: (shift, cost moved, cost back)."""
    best: tuple[float, float, int, int | None] | None = None
    theirs = [costs[i] for i in other]
    for gone in full:
        choices: list[int | None] = [None]
        at = bisect_left(theirs, costs[gone] - gap / 2)
        choices += [other[k] for k in (at - 1, at) if 0 <= k < len(theirs)]
        for back in choices:
            shift = costs[gone] - (0.0 if back is None else costs[back])
            off = abs(shift - gap / 2)
            if 0 < shift < gap and (best is None or off < best[0]):
                best = off, shift, gone, back
    return None if best is None else best[1:]


# ---- samples to microbatches ---------------------------------------------------------------------------------


def first_fit(lengths: Sequence[int], samples: Sequence[int], room: int) -> list[list[int]]:
    """Packs samples into rows of `room` tokens: the longest first, each into the first row with room."""
    rows: list[list[int]] = []
    left: list[int] = []
    for i in sorted(samples, key=lambda i: -lengths[i]):
        at = next((k for k, free in enumerate(left) if free >= lengths[i]), None)
        if at is None:
            at = len(rows)
            rows.append([])
            left.append(room)
        rows[at].append(i)
        left[at] -= lengths[i]
    return rows


def deal(lengths: Sequence[int], shape: Shape) -> list[list[Microbatch]] | None:
    """The microbatches of each replica; None if a replica would need more than `shape.most`."""
    as_they_come = _as_they_come(lengths, shape)
    rows = first_fit(lengths, range(len(lengths)), shape.room)
    costs = [shape.of_row([lengths[i] for i in row]) for row in rows]
    ways = [
        [_packed(part, lengths, shape) for part in balanced([shape.cost(n) for n in lengths], shape.replicas)],
        [_microbatches([rows[k] for k in part], lengths, shape) for part in balanced(costs, shape.replicas)],
        as_they_come,
    ]

    def time(way: Sequence[Sequence[Microbatch]]) -> float:
        slowest = max(shape.time(mbs, lengths) for mbs in way)
        return slowest * (1 - MARGIN) if way is as_they_come else slowest

    return min((way for way in ways if max(map(len, way)) <= shape.most), key=time, default=None)


def deal_by_tokens(lengths: Sequence[int], shape: Shape, tokens: Sequence[int]) -> list[list[Microbatch]]:
    """One sample for each row: the longest ones in the microbatches that have the most `tokens`. Replicas take turns in
    which of them gets the longer half."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    dealt: list[list[Microbatch]] = [[()] * len(tokens) for _ in range(shape.replicas)]
    for place, mb in enumerate(sorted(range(len(tokens)), key=lambda mb: -tokens[mb])):
        for k, replica in enumerate(range(shape.replicas)[:: -1 if place % 2 else 1]):
            start = (place * shape.replicas + k) * shape.rows
            dealt[replica][mb] = tuple((i,) for i in order[start : start + shape.rows])
    return dealt


def dealt_evenly(lengths: Sequence[int], shape: Shape) -> list[list[Microbatch]]:
    """Equal numbers of samples for each replica, in their order, in the same number of microbatches."""
    dealt = _as_they_come(lengths, shape)
    most = max(map(len, dealt))
    return [[*mbs, *([()] * (most - len(mbs)))] for mbs in dealt]


def _as_they_come(lengths: Sequence[int], shape: Shape) -> list[list[Microbatch]]:
    share = -(-len(lengths) // shape.replicas)
    parts = [range(len(lengths))[share * k : share * (k + 1)] for k in range(shape.replicas)]
    return [_packed(part, lengths, shape) for part in parts]


def _packed(samples: Sequence[int], lengths: Sequence[int], shape: Shape) -> list[Microbatch]:
    """Packs the samples of one replica into microbatches."""
    return _microbatches(first_fit(lengths, samples, shape.room), lengths, shape)


def _microbatches(rows: Sequence[Sequence[int]], lengths: Sequence[int], shape: Shape) -> list[Microbatch]:
    """Packs rows into the fewest microbatches, of nearly equal costs; one at least."""
    number = max(1, math.ceil(len(rows) / shape.rows))
    packed: list[list[Row]] = [[] for _ in range(number)]
    load = [0.0] * number
    for row in sorted(rows, key=lambda row: -shape.of_row([lengths[i] for i in row])):
        at = min((k for k in range(number) if len(packed[k]) < shape.rows), key=load.__getitem__)
        packed[at].append(tuple(row))
        load[at] += shape.of_row([lengths[i] for i in row])
    return [tuple(mb) for _, mb in sorted(zip(load, packed, strict=True), key=lambda pair: -pair[0])]


def samples_of_step(lengths: Sequence[int], shape: Shape, microbatches: int) -> int:
    """The number of samples that fill `microbatches` per replica on average; `lengths` is a selection of samples."""
    rows = len(first_fit(lengths, range(len(lengths)), shape.room))
    wanted = shape.replicas * microbatches * shape.rows
    return max(shape.replicas, math.floor(len(lengths) / max(1, rows) * wanted))
