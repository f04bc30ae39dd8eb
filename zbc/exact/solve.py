"""`zbc plan --exact`: orders proven optimal for their placement by CP-SAT (`pip install 'zbc[solve]'`), or shorter.

The model knows times of ops and of messages, and the memory of activations. Busy links, buffers and sums of gradients,
which it leaves out, make a step longer or larger only, so its bound holds for every order; an order that it finds is
weighed as a whole plan, and taken if it is shorter and fits.

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
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from typing import Any

from zbc import excludes
from zbc.compiler.partition.limits import limit_of
from zbc.compiler.partition.setup import Ordered, over_of
from zbc.compiler.report.report import Facts, told
from zbc.compiler.schedules.searched import fused, own_limit
from zbc.compiler.search.candidates import Bench
from zbc.compiler.search.engine import Engine
from zbc.compiler.search.feasible import one_by_one
from zbc.compiler.search.problem import Problem
from zbc.compiler.sim.bounds import relaxed
from zbc.errors import ZbcError, raise_all
from zbc.exact.cpsat import CpModel
from zbc.host.cores import cores
from zbc.job.spec import Job

MOST = 500_000  # pairs of ops of a rank, over all ranks: with more, the model alone takes minutes and gigabytes
BETTER = 1 - 1e-9
FINEST = 10_000_000
DIGITS = 8  # of the largest number, if there is no exact scale
ROOM = 1e-6  # slack of memory comparisons, as in the kernels
SAME = 1e-6  # costs this close, relatively, are one: rounded times cannot tell them apart


def proven(job: Job, found: Ordered, seconds: float) -> tuple[Ordered, Facts]:
    """The shortest order known after `seconds`, with the lower bound that is proven, and a report: ms of the model.
    Backwards stay as they are: split if any is. Raises E110 for features beyond the model, E602 without ortools."""
    program, costs, objective = found.program, found.costs, job.objective
    has = {"exact": True, "copies": len(program.placement.pipes) > 1, "groups": program.grouped}
    has |= {"slices": program.slices > 1, "graph": bool(program.placement.branches)}
    there = {name for name, value in has.items() if value}
    clashes = excludes.clashes(vars(job), there)
    raise_all(pair.error(job.document.where, of="plan") for pair in clashes if "exact" in pair[:2])
    split = bool(program.split)
    own = own_limit(found.name, program.placement.ranks, costs)
    limit = limit_of(job, program.placement, costs, split=split, own=own)
    fastest = limit.costs.fastest()
    counted = relaxed(fastest) if split else fastest.joined()
    problem = Problem.make(program.placement, counted, program.microbatches, limit.units)
    pairs = sum((3 * len(stages) * problem.m) ** 2 for stages in problem.stages)
    if pairs > MOST:
        text = f"plan: --exact has {pairs:,} pairs of ops to order on a rank, and is for at most {MOST:,}"
        raise ZbcError("E110", text, hint="plan fewer microbatches or stages, or leave out --exact")
    began, before, lower = problem.numbers(program), found.step_ms(job), found.bounds.of(objective)
    proof = solve(problem, objective, start=began, lower=lower, seconds=seconds, workers=cores())
    other = problem.program(proof.order, "exact")
    other = other if split else fused(other)
    least = max(lower, proof.lower)
    bounds = replace(found.bounds, makespan=least) if objective == "makespan" else replace(found.bounds, span=least)
    better = replace(found, program=replace(program, ranks=other.ranks), bounds=bounds)
    shorter = better.step_ms(job) < before * BETTER
    taken = shorter and over_of(job, better) <= over_of(job, found)
    chosen = better if taken else found.told(bounds=bounds)
    return chosen, told(
        lower_ms=bounds.of(objective),
        gap=chosen.judged.step_ms(objective) / (bounds.of(objective) or 1.0) - 1,
        before_ms=before,
        ms=chosen.step_ms(job),
        too_large=shorter and not taken,
    )


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
    model = CpModel(cp_model, whole, objective, first.order, math.floor(lower * scale * (1 - 1e-12)))
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


def integers(problem: Problem) -> tuple[Problem, int]:
    """The problem in integers, and the number of time units per ms."""
    units = {"keep_b": problem.keep_b, "keep_w": problem.keep_w}
    times = {"f": problem.f, "b": problem.b, "w": problem.w, "lag": problem.lag}
    (time, exact), (unit, whole) = (common_scale([*chain(*of.values())]) for of in (times, units))
    found: dict[str, Any] = {name: _scaled(of, time, exact) for name, of in times.items()}
    found |= {name: _scaled(of, unit, whole) for name, of in units.items()}
    return replace(problem, limit=[math.floor((x + ROOM) * unit) for x in problem.limit], **found), time


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
