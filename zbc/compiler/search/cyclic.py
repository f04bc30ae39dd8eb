"""Makes an order of many microbatches from one of few: a beginning, a body that repeats, and an end.

An order found for few microbatches is cut at a time. Ops that began before are the beginning; the next K ops of each
row (a kind of a stage) are the body, in each rank's order; the rest is the end. Repeating the body, each time for the
next K microbatches, extends the order by K, 2K, .. microbatches. It never blocks if the given order does not, as the
inputs of each repetition were made in it or before. A repetition leaves memory as it found it.

The whole step decides which body is good: the times of a period count for every microbatch, those of beginning and end
once. So a few cuts and sizes are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from zbc.compiler.search.listing import ROOM
from zbc.compiler.search.problem import Problem

SIZES = (1, 2, 3, 4, 6, 12)  # of a body, in microbatches
CYCLE = 12  # a multiple of all of them
CUTS = (0.4, 0.5)  # start of a body, as shares of the step
FEW_OPS = 50_000


def reduced(problem: Problem) -> Problem | None:
    """The problem with some 4p microbatches, or 2p if there are many ops, if that is clearly fewer; else None. If 4p is
    not fewer, 2p is used with one stage per rank and less memory than 1F1B's: bodies are short there. The count is
    chosen so that a body of any size covers the rest. Unequal microbatches are reduced to equal ones of the mean
    cost."""
    p = problem.p
    if problem.pipes > 1:
        return None
    counts = [min(4 * p, max(2 * p, FEW_OPS // (3 * problem.n_stages)))]
    if problem.v == 1 and max(problem.limit) < p * max(problem.keep_b) - ROOM:
        counts.append(2 * p)
    for few in counts:
        few += (problem.m - few) % (CYCLE * problem.slices)
        if problem.m > 1.5 * few:
            return replace(problem, m=few, exact=() if problem.unequal else problem.exact, unequal=False, lags=())
    return None


def stretched(few: Problem, many: Problem, order: Sequence[int], starts: Sequence[float]) -> Iterator[list[int]]:
    """Yields orders for `many` made from a rank-major order for `few`; `starts` has its op starts by place."""
    step = max(starts)
    for cut in CUTS:
        done = _begun(few, order, starts, cut * step)
        for size in (microbatches * few.slices for microbatches in SIZES):
            if max(done) + size <= few.m:
                yield _repeated(few, many, order, done, size)


def _begun(few: Problem, order: Sequence[int], starts: Sequence[float], at: float) -> list[int]:
    """By row the number of ops begun before a time. Ops of a row have consecutive numbers, as many as microbatches."""
    done = [0] * (few.size // few.m)
    for place, op in enumerate(order):
        if starts[place] < at:
            done[op // few.m] += 1
    return done


def _repeated(few: Problem, many: Problem, order: Sequence[int], done: Sequence[int], size: int) -> list[int]:
    runs = (many.m - few.m) // size
    whole: list[int] = []
    for low, high in pairwise(few.rows().first):
        body, end = list[int](), list[int]()
        for op in order[low:high]:
            row, unit = divmod(op, few.m)
            number = row * many.m + unit
            if unit < done[row]:
                whole.append(number)
            elif unit < done[row] + size:
                body.append(number)
            else:
                end.append(number + runs * size)
        for shift in range(0, (runs + 1) * size, size):
            whole += [number + shift for number in body]
        whole += end
    return whole
