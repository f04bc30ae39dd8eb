"""What a step of one schedule costs on any partition, quicker than by planning each of them from the start.

Where an order does not depend on costs, it is timed again. Orders that are packed at the costs are made again. Of
searched orders of one pipe, the recipes that did best on the first partition are decoded. With many microbatches, 4p of
them run; each of the others adds what it takes of the busiest rank.

A timing has `step`, ms of a step of its `microbatches`, infinite where no order was found; `over`, by what share the
fullest rank is above its limits; `visits`, what a question costs; and `counts[rank][stage]`, how many microbatches run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from zbc.compiler.check.memory import check_memory, excess
from zbc.compiler.lowering import Lowering
from zbc.compiler.memory import holding
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.partition.limits import above
from zbc.compiler.partition.setup import Ordered, Setup
from zbc.compiler.search.candidates import LIST_VISITS, Bench, Recipe
from zbc.compiler.search.engine import Engine
from zbc.compiler.search.portfolio import liked
from zbc.compiler.search.problem import Problem
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.ir import Kind, Placement, Program
from zbc.job.spec import Job

INF = float("inf")
TINY = 1e-300
OVERHEAD = 1000  # what the costs of a partition take, in op visits
PACKED = 20  # op visits per op of an order that is packed
SUMS = 8  # op visits per op where all-reduces of gradients take time as well
RECIPES = 3


class FixedOrder:
    """One order on every partition. `few` is the same with fewer microbatches, for its time."""

    def __init__(self, program: Program, few: Program, job: Job) -> None:
        self.program, self.microbatches, self.counts = program, few.microbatches, _counts(few)
        self._lowering, self._timed = Lowering.of(job), Context.of(few)
        self.visits = few.size * (1 if program.alone else SUMS) * (4 if job.objective == "period" else 1) + OVERHEAD

    @cached_property
    def _begun(self) -> Context:
        """What is timed, lowered as far as that does not depend on costs."""
        return self._lowering.begin(self._timed)

    @cached_property
    def _whole(self) -> Context:
        same = self._timed.program is self.program
        return self._begun if same else self._lowering.begin(Context.of(self.program))

    @cached_property
    def held(self) -> list[list[holding.Held]]:
        """What each rank holds at its fullest."""
        return holding.fullest(self.program)

    def step(self, setup: Setup) -> float:
        timed = self._timed if self.program.alone else self._begun
        timed = timed.priced(setup.costs.over("eager"))  # receives are posted for these costs in the end, not here
        return (timed if self.program.alone else self._lowering.finish(timed)).step_ms(setup.job.objective)

    def over(self, setup: Setup) -> float:
        """Exact; what is on its way only counts where all else fits the device."""
        job, costs = setup.job, setup.costs
        if not limited(job):
            return -1.0
        if costs.slices == 1:
            units, sizes = holding.units_of(self.held, costs), holding.bytes_of(self.held, costs)
        else:  # one slice holds more than another
            held = peaks(self.program, replace(costs, bytes=None))
            units, sizes = [rank.units for rank in held], [rank.activations for rank in held] if costs.bytes else []
        over = above(job, setup.placement, costs, units, sizes)
        if over > 1e-9 or job.hardware.memory_gib is None or costs.bytes is None:
            return over
        whole = self._lowering.finish(self._whole.priced(costs.over("eager")))
        return excess(job, peaks(whole.program, costs, whole.timeline), costs)


class Remade:
    """An order that is packed at the costs of each partition."""

    def __init__(self, job: Job, placement: Placement) -> None:
        self.microbatches = job.schedule.microbatches
        self.counts = _shares(placement, self.microbatches)
        self.visits = PACKED * 3 * placement.stages * self.microbatches + OVERHEAD
        self._made: tuple[Setup, Ordered] | None = None

    def _ordered(self, setup: Setup) -> Ordered:
        if self._made is None or self._made[0] is not setup:
            self._made = setup, setup.make(0.0)
        return self._made[1]

    def step(self, setup: Setup) -> float:
        return self._ordered(setup).step_ms(setup.job)

    def over(self, setup: Setup) -> float:
        return over_of(setup.job, self._ordered(setup))


class Recipes:
    """The best of a few recipes, for searched orders of one pipe."""

    def __init__(self, first: Setup, engine: Engine) -> None:
        self.microbatches, self.engine = reduced(first.job).schedule.microbatches, engine
        self.counts = _shares(first.placement, self.microbatches)
        problem = self._problem(first)
        self.recipes: Sequence[Recipe] = liked(problem, first.job.objective, engine)[:RECIPES]
        self.visits = RECIPES * LIST_VISITS * problem.size + OVERHEAD

    def step(self, setup: Setup) -> float:
        objective = setup.job.objective
        bench = Bench(self._problem(setup), self.engine, objective)
        for recipe in self.recipes:
            bench.decode(recipe, "")
        return INF if bench.best is None else bench.best.cost(objective)

    def over(self, setup: Setup) -> float:
        return -1.0  # a search keeps to its limit; partitions with which no order can are not asked for

    def _problem(self, setup: Setup) -> Problem:
        costs, limits = setup.limit.costs, setup.limit.units
        costs = costs if setup.schedule.splits_backward else costs.joined()
        return Problem.make(setup.placement, costs, self.microbatches, None if limits is None else list(limits))


Timing = FixedOrder | Remade | Recipes


def _counts(program: Program) -> list[list[float]]:
    table = [[0.0] * program.placement.stages for _ in program.ranks]
    for rank, _, op in program:
        table[rank][op.stage] += op.kind is Kind.F
    return table


def _shares(placement: Placement, microbatches: int) -> list[list[float]]:
    """As many microbatches, or one more, run in each pipe."""
    table = [[0.0] * placement.stages for _ in range(placement.ranks)]
    for pipe in placement.pipes:
        for stage, rank in enumerate(pipe):
            table[rank][stage] += microbatches // len(placement.pipes)
    return table


def over_of(job: Job, ordered: Ordered) -> float:
    """By what share an order is above the limits of its job; 0 if it fits."""
    if not limited(job):
        return 0.0
    device = job.hardware.memory_gib is not None  # then receive buffers count
    memory = (
        ordered.memory
        if device or ordered.lowering.offload is not None
        else peaks(ordered.program, ordered.costs, ordered.compute.timeline)
    )
    try:
        check_memory(job, memory, ordered.costs)
    except ZbcError:
        return max(excess(job, memory, ordered.costs), TINY)
    return 0.0


def limited(job: Job) -> bool:
    """Whether memory is."""
    return job.schedule.memory_limit is not None or job.hardware.memory_gib is not None


def reduced(job: Job) -> Job:
    """The job with 4p microbatches, where that is clearly fewer: a step of more has more of the same in its middle."""
    few = 4 * job.parallel.pp
    if job.schedule.microbatches <= 1.5 * few:
        return job
    return replace(job, schedule=job.schedule.model_copy(update={"microbatches": few}))
