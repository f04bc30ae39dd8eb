"""Proves that an order is optimal for its placement, or finds a shorter one: `zbc plan --exact`.

The model knows times of ops and of messages, and the memory of activations. Busy links, buffers and sums of gradients,
which it leaves out, make a step longer or larger only, so its bound holds for every order; an order that it
finds is weighed as a whole plan, and taken if it is shorter and fits.
"""

from __future__ import annotations

from dataclasses import replace

from zbc import excludes
from zbc.compiler.partition.limits import limit_of
from zbc.compiler.partition.setup import Ordered, over_of
from zbc.compiler.report.report import Facts, told
from zbc.compiler.schedules.searched import fused, numbers, own_limit
from zbc.compiler.search.problem import Problem
from zbc.compiler.sim.bounds import relaxed
from zbc.errors import ZbcError, raise_all
from zbc.exact.solve import solve
from zbc.host.cores import cores
from zbc.job.spec import Job

MOST = 500_000  # pairs of ops of a rank, over all ranks: with more, the model alone takes minutes and gigabytes
BETTER = 1 - 1e-9


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
    began, before, lower = numbers(problem, program), found.step_ms(job), found.bounds.of(objective)
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
