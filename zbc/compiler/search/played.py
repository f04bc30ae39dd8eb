"""F and B in the order of a building block of slices; each W fills a wait of its rank or frees full memory.

A block of slices has whole periods of rest between the last F of a slice and its first B, in which other slices run. At
the beginning and at the end of a step there are none, so W in its slot would delay the following ops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from zbc.compiler.blocks import AnyBlock
from zbc.compiler.search.listing import EPS, ROOM
from zbc.compiler.search.problem import Problem
from zbc.compiler.search.table import Table


class Played(NamedTuple):
    """The recipe that makes such an order again for other microbatches."""

    block: AnyBlock


def played(problem: Problem, table: Table, order: Sequence[int]) -> list[int] | None:
    """A rank-major order like `order` but for its W; None if it stops, for lack of memory or of an input."""
    step = problem.n_stages * problem.m  # F, B and W have `step` numbers each, in this order
    todo = [deque(op for op in order[low:high] if op < 2 * step) for low, high in pairwise(table.first)]
    missing, ready = list(table.count), [0.0] * problem.size
    head, reader, lag, after = table.feeds
    due: list[deque[int]] = [deque() for _ in todo]
    made: list[list[int]] = [[] for _ in todo]
    held, free = [0.0] * problem.p, [0.0] * problem.p
    heap = [(0.0, r) for r in range(problem.p)]
    while heap:
        now, r = heappop(heap)
        if now < free[r] - EPS:
            continue
        op = todo[r][0] if todo[r] else -1
        runs = op >= 0 and not missing[op] and ready[op] <= now + EPS
        if runs and held[r] + table.change[op] > problem.limit[r] + ROOM:
            runs = False
        if runs:
            todo[r].popleft()
            if op >= step:
                due[r].append(op + step)
        elif due[r]:
            op = due[r].popleft()
        else:
            if op >= 0 and not missing[op] and ready[op] > now + EPS:
                heappush(heap, (ready[op], r))
            continue
        made[r].append(op)
        held[r] += table.change[op]
        end = free[r] = now + table.length[op]
        heappush(heap, (end, r))
        edge = head[op]
        while edge >= 0:
            other = reader[edge]
            missing[other] -= 1
            ready[other] = max(ready[other], end + lag[edge])
            if not missing[other]:
                heappush(heap, (ready[other], table.rank[other]))
            edge = after[edge]
    return [op for mine in made for op in mine] if sum(map(len, made)) == problem.size else None
