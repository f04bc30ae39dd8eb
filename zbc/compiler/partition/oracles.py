"""What a step costs and holds under other cuts, quicker than by planning each of them from the start.

Orders made by hand are the same whatever the costs: they are timed anew. Searched orders are not: the recipes that did
best for one cut are decoded at the op times of the other. Both may run with fewer microbatches than the job, where that
tells as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from zbc.compiler.check.memory import check_memory, excess
from zbc.compiler.lowering import Lowering
from zbc.compiler.memory import holding
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.partition.cuts import counts
from zbc.compiler.partition.limits import state_of
from zbc.compiler.partition.single import Ordered, Prepared
from zbc.compiler.search.candidates import LIST_VISITS, Bench, Recipe
from zbc.compiler.search.engine import Engine
from zbc.compiler.search.portfolio import liked
from zbc.compiler.search.problem import Problem
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.ir import Program
from zbc.job.spec import Job, parse_limit
from zbc.text import GIB

INF = float("inf")
TINY = 1e-300
OVERHEAD = 1000  # what the costs of a cut take, in op visits
PACKED = 20  # op visits per op of an order that is packed
SUMS = 8  # op visits per op where sums of gradients take time as well
RECIPES = 3


class Oracle(Protocol):
    """Judges cuts of one schedule."""

    visits: int  # what a question costs
    counts: list[list[float]]  # [rank][stage] how often the stage runs there in what is timed

    def step(self, prepared: Prepared) -> float:
        """ms of a step; infinite where no order was found."""

    def over(self, prepared: Prepared) -> float:
        """By what share the fullest rank is above its limits; 0 or less if it fits."""


class FixedOrder:
    """One order, whatever the cut. `few` is the same with fewer microbatches, for its time."""

    def __init__(self, job: Job, program: Program, few: Program) -> None:
        self.job, self.program, self.few = job, program, few
        self._lowering, self._timed = Lowering.of(job), Context.of(few)
        self.visits = few.size * (1 if program.alone else SUMS) * (4 if job.objective == "period" else 1) + OVERHEAD
        self.counts = counts(few)

    @cached_property
    def _timed_begun(self) -> Context:
        return self._lowering.begin(self._timed)

    @cached_property
    def _begun(self) -> Context:
        return self._lowering.begin(Context.of(self.program))

    @cached_property
    def held(self) -> list[list[holding.Held]]:
        """What each rank holds at its fullest."""
        return holding.fullest(self.program)

    def step(self, prepared: Prepared) -> float:
        if self.program.alone:
            return self._timed.priced(prepared.costs).step_ms(self.job.objective)
        return self._lowering.finish(self._timed_begun.priced(prepared.costs)).step_ms(self.job.objective)

    def over(self, prepared: Prepared) -> float:
        """Exact; what is on its way only counts where all else fits the device."""
        job, costs = self.job, prepared.costs
        if job.schedule.memory_limit is None and job.hardware.memory_gib is None:
            return -1.0
        over = _over(job, self.held, prepared)
        if over > 0 or job.hardware.memory_gib is None or costs.bytes is None:
            return over
        whole = self._lowering.finish(self._begun.priced(costs))
        return excess(job, peaks(whole.program, costs, whole.timeline), costs)


def _over(job: Job, held: Sequence[Sequence[holding.Held]], prepared: Prepared) -> float:
    """As `check.memory.excess`, but for buffers."""
    costs, found = prepared.costs, [-1.0]
    asked = parse_limit(job.schedule.memory_limit) if job.schedule.memory_limit else None
    if asked is not None and asked[1] == "x":
        found.append(max(holding.units_of(held, costs)) / (asked[0] * job.parallel.pp) - 1)
    if costs.bytes is not None:
        activations = holding.bytes_of(held, costs)
        if asked is not None and asked[1] == "bytes":
            found.append(max(activations) / asked[0] - 1)
        if job.hardware.memory_gib is not None:
            whole = max(state_of(costs, prepared.placement, rank) + size for rank, size in enumerate(activations))
            found.append(whole / (job.hardware.memory_gib * GIB) - 1)
    return max(found) if max(found) > 1e-9 else -1.0


class Remade:
    """The order made anew for each cut, of schedules by hand that look at the costs where their slots collide."""

    def __init__(self, first: Prepared) -> None:
        placement, m = first.placement, first.job.schedule.microbatches
        least = m // len(placement.pipes)  # as many microbatches, or one more, run in each pipe
        self.counts = [[0.0] * placement.stages for _ in range(placement.ranks)]
        for pipe in placement.pipes:
            for stage, rank in enumerate(pipe):
                self.counts[rank][stage] += least
        self.visits = PACKED * 3 * placement.stages * m + OVERHEAD
        self._made: tuple[Prepared, Ordered] | None = None

    def step(self, prepared: Prepared) -> float:
        ordered = prepared.make(0.0)
        self._made = prepared, ordered
        return ordered.step_ms(prepared.job)

    def over(self, prepared: Prepared) -> float:
        kept = self._made
        ordered = kept[1] if kept is not None and kept[0] is prepared else prepared.make(0.0)
        return over_of(prepared.job, ordered)


class Recipes:
    """The best of a few recipes, for placements of one pipe."""

    def __init__(self, first: Prepared, few: int, engine: Engine) -> None:
        self.first, self.few, self.engine = first, few, engine
        problem = self._problem(first)
        self.recipes: Sequence[Recipe] = liked(problem, first.job.objective, engine)[:RECIPES]
        self.visits = RECIPES * LIST_VISITS * problem.size + OVERHEAD
        held = [first.placement.stages_of(rank) for rank in range(first.placement.ranks)]
        self.counts = [[float(few) * (s in mine) for s in range(first.placement.stages)] for mine in held]

    def step(self, prepared: Prepared) -> float:
        objective = prepared.job.objective
        bench = Bench(self._problem(prepared), self.engine, objective)
        for recipe in self.recipes:
            bench.decode(recipe, "")
        return INF if bench.best is None else bench.best.cost(objective)

    def over(self, prepared: Prepared) -> float:
        return -1.0  # a search keeps to its limit; cuts that no order can keep to it with are not asked for

    def _problem(self, prepared: Prepared) -> Problem:
        costs = prepared.limit.costs
        costs = costs if prepared.schedule.splits_backward else costs.joined()
        limits = prepared.limits
        return Problem.make(prepared.placement, costs, self.few, None if limits is None else list(limits))


def over_of(job: Job, ordered: Ordered) -> float:
    """By what share an order is above the limits of its job; 0 if it fits."""
    if job.schedule.memory_limit is None and job.hardware.memory_gib is None:
        return 0.0
    device = job.hardware.memory_gib is not None  # then receive buffers count
    memory = ordered.memory if device else peaks(ordered.program, ordered.costs, ordered.compute.timeline)
    try:
        check_memory(job, memory, ordered.costs)
    except ZbcError:
        return max(excess(job, memory, ordered.costs), TINY)
    return 0.0


def reduced(job: Job) -> Job:
    """The job with 4p microbatches, where that is clearly fewer: a step of more has more of the same in its middle."""
    few = 4 * job.parallel.pp
    if job.schedule.microbatches <= 1.5 * few:
        return job
    return replace(job, schedule=job.schedule.model_copy(update={"microbatches": few}))
