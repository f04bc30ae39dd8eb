"""Problems solved to optimality by CP-SAT (`pip install 'zbc[solve]'`).

As in the search, each stage runs its F, its B and its W in the order of microbatches: of microbatches that are alike no
other order is better, since the k-th to reach a stage may as well be microbatch k. A rank begins as early as it can, so
that the span is that of `timing.run`, which starts every op at once. The optimum is the least over all such orders that
fit; memory counts as in `Bench.fits`, after every op of a rank.

The solver works on integers. Times and memory become integers exactly if all are fractions with a common denominator
of at most `FINEST` (any short decimal, and its share of a few chunks). Otherwise they are rounded down: ops get shorter
and smaller, so the optimum of the integers is never above the true one, and the bound stays a bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zbc.compiler.search.candidates import Bench
from zbc.compiler.search.engine import Engine
from zbc.compiler.search.feasible import one_by_one
from zbc.compiler.search.problem import Problem
from zbc.errors import ZbcError
from zbc.exact.cpsat import CpModel, IntegerProblem

FINEST = 10_000_000
DIGITS = 8  # of the largest number, if there is no exact scale
ROOM = 1e-6  # slack of memory comparisons, as in the kernels
SAME = 1e-6  # costs this close, relatively, are one: rounded times cannot tell them apart


@dataclass(frozen=True, slots=True)
class Proof:
    """The best known order, its cost, and a lower bound; ms."""

    cost: float
    lower: float
    order: tuple[int, ...]

    @property
    def optimal(self) -> bool:
        return self.cost <= self.lower * (1 + SAME) + 1e-12


def solve(
    problem: Problem,
    objective: str,
    *,
    start: Sequence[int] | None = None,
    lower: float = 0.0,
    seconds: float = 60.0,
    workers: int = 2,
) -> Proof:
    """Improves `start` (a rank-major order of the search) to the optimum, or within `seconds`. `objective`: "makespan"
    or "span", `lower`: a proven bound. Without `start`, or if it does not fit, it begins with the microbatches one by
    one. Raises E602 without ortools, and E303 if nothing fits."""
    cp_model, end = solver(), time.monotonic() + seconds
    bench = Bench(problem, Engine(compiled=False), objective)
    first = (start and bench.order(start, "start")) or bench.order(one_by_one(problem), "one by one")
    if first is None:
        raise ZbcError("E303", "schedule: no order fits the memory limit", hint="raise the limit")
    whole, scale = integers(problem)
    model = CpModel(cp_model, problem, whole, objective, first.order, math.floor(lower * scale * (1 - 1e-12)))
    found = cp_model.CpSolver()
    found.parameters.max_time_in_seconds = max(0.0, end - time.monotonic())
    found.parameters.num_workers = workers
    found.parameters.linearization_level = 0  # the orders are hard; linear relaxations only cost time
    if found.solve(model.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        lower = max(lower, found.best_objective_bound / scale)
        bench.order(model.order(found), "exact")
    best = bench.found[0]
    return Proof(best.cost(objective), min(lower, best.cost(objective)), best.order)


def solver() -> Any:
    """The module of CP-SAT. Raises E602 without ortools."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        text = "schedule: a proof of optimality needs ortools, which is not installed"
        raise ZbcError("E602", text, hint="pip install 'zbc[solve]'") from None
    return cp_model


def integers(problem: Problem) -> tuple[IntegerProblem, int]:
    """The problem's numbers as integers, and the number of time units per ms."""
    time, exact = common_scale([*problem.f, *problem.b, *problem.w, *problem.lag])
    f, b, w, lag = (_scaled(x, time, exact) for x in (problem.f, problem.b, problem.w, problem.lag))
    unit, exact = common_scale([*problem.keep_b, *problem.keep_w])
    keep_b, keep_w = (_scaled(x, unit, exact) for x in (problem.keep_b, problem.keep_w))
    limit = [math.floor((x + ROOM) * unit) for x in problem.limit]
    return IntegerProblem((f, b, w), lag, keep_b, keep_w, limit), time


def common_scale(values: Sequence[float]) -> tuple[int, bool]:
    """A factor that turns `values` into integers, and whether it is exact; round down if not."""
    scale = 1
    for value in values:
        fraction = Fraction(value).limit_denominator(100_000)
        scale = math.lcm(scale, fraction.denominator)
        if abs(float(fraction) - value) > 1e-12 * max(1.0, abs(value)) or scale > FINEST:
            return 10 ** max(0, DIGITS - math.ceil(math.log10(max(values)))), False
    return scale, True


def _scaled(values: Sequence[float], scale: int, exact: bool) -> list[int]:
    return [round(value * scale) if exact else math.floor(value * scale) for value in values]
