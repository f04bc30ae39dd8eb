"""The least memory any order needs, and an order that needs no more.

Before a rank's first B, one microbatch has been through all stages of the rank; so every order holds at least what one
microbatch, run alone, holds at its fullest. Running microbatches one after another holds just that.
"""

from __future__ import annotations

from zbc.compiler.search.problem import Problem


def least(problem: Problem) -> list[float]:
    """Per rank, the smallest limit with which any order exists, in the problem's units."""
    result = []
    for r in range(problem.p):
        stages = problem.stages[r * problem.v : (r + 1) * problem.v]
        held = peak = sum(problem.keep_b[s] for s in stages)
        for s in reversed(stages):  # B, then its W, from the last stage up
            held += problem.keep_w[s] - problem.keep_b[s]
            peak = max(peak, held)
            held -= problem.keep_w[s]
        result.append(peak)
    return result


def one_by_one(problem: Problem) -> list[int]:
    """The rank-major order that finishes each microbatch before the next: the least memory, the longest time."""
    per_kind = problem.n_stages * problem.m
    order = []
    for r in range(problem.p):
        stages = problem.stages[r * problem.v : (r + 1) * problem.v]
        for i in range(problem.m):
            order += [s * problem.m + i for s in stages]
            for s in reversed(stages):
                op = s * problem.m + i
                order += [per_kind + op, 2 * per_kind + op]
    return order
