"""Which ranks of a run share a node: so that the heavier traffic, of pipelines or of sums over copies, stays inside.

A node of n ranks can hold n neighbours of one pipeline, or fewer of them in several copies. Of all such blocks that
tile the run the one that sends the fewest bytes between nodes per step is taken: two tensors per microbatch over every
edge of a pipeline that leaves a node, and 2(n-1)/n of a stage's gradients over every edge that leaves one of the ring
of n ranks that sums them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from zbc.ir import Placement
from zbc.seats import Seats


def choose(
    placement: Placement, copies: int, size: int, microbatches: int, boundaries: Sequence[float], grads: Sequence[float]
) -> tuple[int, int]:
    """Neighbouring ranks of a pipeline, and copies of each, in a node of `size` ranks.

    `boundaries` are the bytes of the tensor behind each stage but the last, `grads` of the gradients of each stage.
    Where nothing is better one copy of the pipeline follows the other.
    """
    p = placement.ranks
    if size >= p * copies:
        return p, 1
    blocks = [(size // k, k) for k in range(1, size + 1) if size % k == 0]
    tiles = [(a, b) for a, b in blocks if p % a == 0 and copies % b == 0]
    found = [Seats(p, copies, tile) for tile in ((p, 1), *tiles)]
    return min(found, key=lambda seats: between(seats, placement, size, microbatches, boundaries, grads)).node


def between(
    seats: Seats,
    placement: Placement,
    size: int,
    microbatches: int,
    boundaries: Sequence[float],
    grads: Sequence[float],
) -> float:
    """Bytes that a step sends between nodes."""
    total = 0.0
    for copy in range(seats.copies):
        for pipe in placement.pipes:
            node = [seats.rank(copy, rank) // size for rank in pipe]
            each = 2 * microbatches / len(placement.pipes)
            total += sum(each * boundaries[a] for a, b in placement.edges if node[a] != node[b])
    for stage, grad in enumerate(grads):
        ring = sorted({seats.rank(copy, rank) for copy in range(seats.copies) for rank in placement.holders(stage)})
        leaving = sum(a // size != b // size for a, b in pairwise([*ring, ring[0]]))
        total += leaving * 2 * (len(ring) - 1) / len(ring) * grad
    return total
