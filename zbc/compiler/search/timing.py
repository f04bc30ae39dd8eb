"""When the ops of an order run, and what that costs; kernels like listing.py, whose numbering of ops they share.

A *place* is an index into a rank-major order: rank r has the places r * per_rank up to (r + 1) * per_rank. Times are
kept by place, so that the times of a part of a rank are a slice. `wires` says of each op what it waits for:

    length   ms it runs
    source   the op whose result it needs, or -1
    lag      ms from that op's end until the result is there
    where    the rank it runs on
"""

from __future__ import annotations

from typing import Any

from zbc.compiler.search.problem import Problem

Numbers = Any  # a flat list, or an array of the same length when compiled
SAME = 1e-12  # steps this much alike have settled
Wires = tuple[list[float], list[int], list[float], list[int]]


def wires(problem: Problem) -> Wires:
    """`length`, `source`, `lag` and `where` of every op of the problem."""
    n, m = problem.n_stages, problem.m
    length = [x for times in (problem.f, problem.b, problem.w) for s in range(n) for x in [times[s]] * m]
    per_kind = n * m
    forward = [-1] * m + list(range(per_kind - m))
    backward = [*range(per_kind + m, 2 * per_kind), *range(per_kind - m, per_kind)]
    lag = [0.0] * m + [problem.lag[s] for s in range(1, n) for _ in range(m)]
    lag += [*lag[m:], *[0.0] * (m + per_kind)]
    return length, forward + backward + [-1] * per_kind, lag, [r for r in problem.rank for _ in range(m)] * 3


def locate(order: Numbers, position: Numbers) -> None:
    """Fill `position`, the place of each op."""
    for place in range(len(order)):
        position[order[place]] = place


def run(
    p: int,
    order: Numbers,
    position: Numbers,
    length: Numbers,
    source: Numbers,
    lag: Numbers,
    where: Numbers,
    first: Numbers,
    end: Numbers,
) -> int:
    """Time `order` from place `first[r]` of each rank on: fills `end` by place, returns the ops timed, -1 if it blocks.

    What lies before is taken as timed. Run each rank until its next op waits for one that has not run, then go where a
    result is awaited.
    """
    size = len(order)
    per_rank = size // p
    at = [0] * p
    wanted = [-1] * p  # the place each rank waits for; who waits for rank r: head[r], link[head[r]], ...
    head = [-1] * p
    link = [-1] * p
    stack = [0] * p
    top = p
    left = size
    for r in range(p):
        at[r] = first[r]
        left -= first[r] - r * per_rank
        stack[r] = p - 1 - r
    timed = left
    while top > 0:
        top -= 1
        r = stack[top]
        k = at[r]
        stop = (r + 1) * per_rank
        time = end[k - 1] if k > r * per_rank else 0.0
        while k < stop:
            op = order[k]
            q = source[op]
            if q >= 0:
                place = position[q]
                there = where[q]
                if place >= at[there] and (there != r or place >= k):
                    wanted[r] = place
                    link[r] = head[there]
                    head[there] = r
                    break
                start = end[place] + lag[op]
                if start > time:
                    time = start
            time += length[op]
            end[k] = time
            k += 1
        left -= k - at[r]
        at[r] = k
        other = head[r]
        head[r] = -1
        while other >= 0:
            after = link[other]
            if wanted[other] < k:
                stack[top] = other
                top += 1
            else:
                link[other] = head[r]
                head[r] = other
            other = after
    return timed if left == 0 else -1


def steps(p: int, order: Numbers, length: Numbers, end: Numbers) -> tuple[float, float, float]:
    """Of a timed order: (longest span, makespan, mean span)."""
    per_rank = len(order) // p
    span = 0.0
    makespan = 0.0
    total = 0.0
    for r in range(p):
        own = end[(r + 1) * per_rank - 1] - (end[r * per_rank] - length[order[r * per_rank]])
        total += own
        if own > span:
            span = own
        if end[(r + 1) * per_rank - 1] > makespan:
            makespan = end[(r + 1) * per_rank - 1]
    return span, makespan, total / p


def period(
    p: int,
    order: Numbers,
    position: Numbers,
    length: Numbers,
    source: Numbers,
    lag: Numbers,
    where: Numbers,
    end: Numbers,
    most: int,
) -> float:
    """What a step costs when steps follow one another without a barrier, as `simulate.steady_state` has it.

    For an order that does not block; overwrites `end`. At most `most` steps, fewer once all ranks take equally long.
    """
    per_rank = len(order) // p
    free = [0.0] * p
    longest = 0.0
    for _ in range(most):
        at = [r * per_rank for r in range(p)]
        time = free[:]
        left = len(order)
        while left > 0:
            for r in range(p):
                k = at[r]
                while k < (r + 1) * per_rank:
                    op = order[k]
                    q = source[op]
                    if q >= 0:
                        if position[q] >= at[where[q]] and (where[q] != r or position[q] >= k):
                            break
                        if end[position[q]] + lag[op] > time[r]:
                            time[r] = end[position[q]] + lag[op]
                    time[r] += length[op]
                    end[k] = time[r]
                    k += 1
                left -= k - at[r]
                at[r] = k
        longest = 0.0
        shortest = time[0] - free[0]
        for r in range(p):
            longest = max(longest, time[r] - free[r])
            shortest = min(shortest, time[r] - free[r])
        free = time
        if longest - shortest <= SAME * longest:
            break
    return longest
