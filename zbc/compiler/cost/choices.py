"""The number of nodes whose experts a token chooses, for prices of exchanges between nodes."""

from __future__ import annotations

import functools
from math import comb
from typing import NamedTuple


class Choices(NamedTuple):
    """A token's `top_k` even choices among `experts`, of `limit` of their `groups`; without replacement."""

    experts: int
    top_k: int
    groups: int = 1
    limit: int = 1

    def away(self, nodes: int) -> float:
        """The expected number of nodes, besides the token's own, that have one of its choices; each of `nodes` has an
        equal share of the experts, and of the tokens."""
        return _away(self, nodes)


@functools.lru_cache(maxsize=256)
def _away(of: Choices, nodes: int) -> float:
    share, size = of.experts // nodes, of.experts // of.groups
    met = sum(1 - _none(of, range(node * share, (node + 1) * share), size) for node in range(nodes))
    return met * (nodes - 1) / nodes


def _none(of: Choices, those: range, size: int) -> float:
    """The probability that a token chooses none of `those` experts; groups are of `size` experts."""
    ways = {(0, 0): 1}  # (groups chosen, those experts among theirs) -> number of such choices of groups
    for first in range(0, of.experts, size):
        inside = len(range(max(first, those.start), min(first + size, those.stop)))
        for (chosen, found), count in [*ways.items()]:
            more = chosen + 1, found + inside
            ways[more] = ways.get(more, 0) + count
    open_to = of.limit * size
    without = sum(n * comb(open_to - found, of.top_k) for (chosen, found), n in ways.items() if chosen == of.limit)
    return without / (comb(of.groups, of.limit) * comb(open_to, of.top_k))
