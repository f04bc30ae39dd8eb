"""Assigns ranks to nodes so that the heavier traffic, pipeline messages or gradient all-reduces, stays inside a node.

A node of n ranks holds n neighbours of one pipeline, or fewer neighbours of several replicas. Of all such blocks that
tile the run, the one with the fewest bytes between nodes per step is taken: two tensors per microbatch over every
pipeline edge that leaves a node, 2(n-1)/n of a stage's gradients over every edge that leaves a node in the ring of its
n ranks, and the rows that ranks with other experts exchange across nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from zbc.compiler.cost.choices import Choices
from zbc.ir import Placement
from zbc.topology import Topology, by_node, even


def choose(
    placement: Placement,
    run: Topology,
    size: int,
    microbatches: int,
    boundaries: Sequence[float],
    grads: Sequence[float],
    *,
    together: bool = False,
    swapped: Sequence[float] = (),
    choices: Choices | None = None,
) -> tuple[int, int]:
    """Returns the pipeline neighbours, and the replicas of each, of a run in a node of `size` ranks of pipelines.

    `boundaries` are the bytes of the tensor after each stage but the last, `grads` the bytes of each stage's gradients,
    `swapped` the bytes of rows per microbatch that each rank of a run has for experts, by stage, for all `choices` of
    its tokens. `together`: all replicas of a rank on one node, if possible. On a tie replicas are one after another.
    """
    p, dp = placement.ranks, run.dp
    if size >= p * dp:
        return p, 1
    tiles = [(size // k, k) for k in range(1, size + 1) if size % k == dp % k == 0 == p % (size // k)]
    alike = [tile for tile in tiles if tile[1] == dp] if together else []
    return min(
        alike or ((p, 1), *tiles),
        key=lambda tile: (
            between(Topology(p, dp, node=tile), placement, size, microbatches, boundaries, grads)
            + _swaps(replace(run, node=tile), placement, size, [microbatches * each for each in swapped], choices)
        ),
    )


def _swaps(run: Topology, placement: Placement, size: int, swapped: Sequence[float], choices: Choices | None) -> float:
    """Bytes of expert rows that a step sends between nodes: each rank sends equal shares to those with other experts,
    or a token's row to each node once, if that is less; per rank of a pipeline, as the other bytes, of the ranks that
    it is subdivided into."""
    return sum(
        _away(run, pp, size * run.width, choices) * rows / run.width
        for stage, rows in enumerate(swapped)
        for pp in (placement.holders(stage) if rows else ())
    )


@functools.lru_cache(maxsize=4096)
def _away(run: Topology, pp: int, size: int, choices: Choices | None) -> float:
    """The ranks of `pp` times the share of a rank's rows that leaves its node of `size` ranks."""
    total = 0.0
    for group in {run.sharing(rank) for rank in run.held(pp)}:
        seats = by_node(group, size)
        away = len(group) - sum(len(ranks) ** 2 for ranks in seats) / len(group)
        if choices is not None and even(seats):
            away = min(away, len(group) * choices.away(len(seats)) / choices.top_k)
        total += away
    return total


def between(
    topology: Topology,
    placement: Placement,
    size: int,
    microbatches: int,
    boundaries: Sequence[float],
    grads: Sequence[float],
) -> float:
    """Bytes that a step sends between nodes."""
    total = 0.0
    for dp in range(topology.dp):
        for pipe in placement.pipes:
            node = [topology.rank(dp, rank) // size for rank in pipe]
            each = 2 * microbatches / len(placement.pipes)
            total += sum(each * boundaries[a] for a, b in placement.edges if node[a] != node[b])
    for stage, grad in enumerate(grads):
        ring = topology.ranks(placement.holders(stage))
        leaving = sum(a // size != b // size for a, b in pairwise([*ring, ring[0]]))
        total += leaving * 2 * (len(ring) - 1) / len(ring) * grad
    return total
