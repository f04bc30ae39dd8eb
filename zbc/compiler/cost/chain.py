"""Orders devices in a chain: the largest transfer between neighbours is least, then the sum of all transfers.

Exact up to 14 devices, by dynamic programming over the sets of visited devices (Held and Karp, 1962): first for the
largest transfer, then for the sum over links no slower than that. Above, paths over links below a threshold are grown
and reversed at their ends (Pósa, 1976), the threshold is bisected, and local moves reduce the sum.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

EXACT = 14  # devices
_TRIES, _TURNS = 40, 6  # starts of a path for each threshold, and rotations per device before giving up

Times = Sequence[Sequence[float]]  # ms between two devices, either way


def best_chain(ms: Times) -> tuple[int, ...]:
    """Returns the devices in chain order; of the two directions, the one that starts with the smaller number."""
    if len(ms) < 3:
        return tuple(range(len(ms)))
    found = _exact(ms) if len(ms) <= EXACT else grown(ms)
    return found if found[0] < found[-1] else found[::-1]


def weight(ms: Times, order: Sequence[int]) -> tuple[float, float]:
    """The largest ms between neighbours, and their sum."""
    steps = [ms[a][b] for a, b in pairwise(order)]
    return max(steps, default=0.0), sum(steps)


def _exact(ms: Times) -> tuple[int, ...]:
    largest, _ = _solved(ms, math.inf, max)
    return _solved(ms, largest, lambda a, b: a + b)[1]


def _solved(ms: Times, limit: float, join: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
    """The least joined ms, and its path through all devices over links of at most `limit` ms."""
    n = len(ms)
    near = [[(u, 1 << u, ms[v][u]) for u in range(n) if u != v and ms[v][u] <= limit] for v in range(n)]
    least = [[math.inf] * n for _ in range(1 << n)]
    came = [[-1] * n for _ in range(1 << n)]
    for v in range(n):
        least[1 << v][v] = 0.0
    for behind in range(1, 1 << n):
        row = least[behind]
        for v in range(n):
            here = row[v]
            if here == math.inf:
                continue
            for u, bit, step in near[v]:
                if not behind & bit:
                    cost = join(here, step)
                    if cost < least[behind | bit][u]:
                        least[behind | bit][u] = cost
                        came[behind | bit][u] = v
    behind = (1 << n) - 1
    end = min(range(n), key=lambda v: least[behind][v])
    total, path = least[behind][end], [end]
    while came[behind][path[-1]] >= 0:
        before = came[behind][path[-1]]
        behind ^= 1 << path[-1]
        path.append(before)
    return total, tuple(path)


def grown(ms: Times) -> tuple[int, ...]:
    """A good path through all devices; deterministic, by a fixed seed."""
    rng, n = random.Random(1234), len(ms)
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
        for other in turned(found):
            here = weight(ms, other)
            if here < (best[0], best[1] - 1e-12):
                best, found = here, other
                break
        else:
            return found


def turned(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
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
