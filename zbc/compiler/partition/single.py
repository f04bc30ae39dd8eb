"""The order of one schedule for a job: its cut, its costs, its limit and its bounds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add
from typing import Any

from zbc.compiler.cost import cost, estimate
from zbc.compiler.cost.cost import Costs
from zbc.compiler.lowering import Lowering
from zbc.compiler.memory.per_rank import RankMemory, peaks
from zbc.compiler.partition.cuts import Cut
from zbc.compiler.partition.limits import Limit, limit_of
from zbc.compiler.partition.partition import Stages, partition
from zbc.compiler.schedules import Request, Schedule
from zbc.compiler.schedules.searched import OWN_LIMIT
from zbc.compiler.search.feasible import least_of
from zbc.compiler.search.rungs import whole
from zbc.compiler.sim.bounds import Bounds, bounds, with_sums
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.ir import Placement, Program
from zbc.job.spec import Job
from zbc.text import GIB

RETRIES = 4  # with less for activations, until what is on its way fits as well


@dataclass(frozen=True)
class Ordered:
    """A compute-only program with the cut and the costs it was made for; lowered when that is first asked for."""

    name: str
    program: Program
    stages: Stages
    costs: Costs
    bounds: Bounds
    lowering: Lowering
    again: frozenset[int] = frozenset()  # the stages that recompute because memory.activations = "auto" lets them
    tried: int = 1  # cuts that were simulated
    all_tried: bool = False  # no other one could be better for this schedule

    @cached_property
    def compute(self) -> Context:
        """The program as it is."""
        return Context(self.program, self.costs)

    @cached_property
    def complete(self) -> Context:
        """The program with its transfers and step-level ops."""
        return self.lowering.lower(self.compute)

    @cached_property
    def memory(self) -> list[RankMemory]:
        """What each rank of the complete program holds."""
        return peaks(self.complete.program, self.costs, self.complete.timeline)

    def step_ms(self, job: Job) -> float:
        """What a step costs by the job's objective, sums of gradients over ranks included."""
        return (self.compute if self.program.alone else self.complete).step_ms(job.objective)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A schedule with all it is made from; `make` may be called for several budgets."""

    job: Job
    schedule: Schedule
    placement: Placement
    v: int
    stages: Stages
    costs: Costs
    limit: Limit
    again: frozenset[int] = frozenset()

    def make(self, budget: float | None = None, **search: Any) -> Ordered:
        """The order; searched ones take about `budget` seconds (None: what the schedule takes by default).

        `search` sets more of the request: see `Request`. Where tensors on their way need more of the device than the
        limit left for them, the search runs again with that much less for activations.
        """
        found = self._make(budget, search)
        device, units, unit = self.job.hardware.memory_gib, self.limit.units, self.limit.unit
        for _ in range(RETRIES):
            if device is None or units is None or not unit:
                break
            excess = [max(0.0, rank.bytes - device * GIB) / unit for rank in found.memory]
            if not any(excess):
                break
            needs = least_of(self.placement, self.limit.costs)
            used = [
                rank.units - more if more else limit
                for rank, more, limit in zip(found.memory, excess, units, strict=True)
            ]
            units = tuple(map(max, used, needs))
            found = replace(self, limit=replace(self.limit, units=units))._make(budget, search)
        return found

    def _make(self, budget: float | None, search: dict[str, Any]) -> Ordered:
        job = self.job
        request = Request(
            p=job.parallel.pp,
            m=job.schedule.microbatches,
            v=self.v,
            group=job.schedule.group,
            early=job.schedule.early,
            overlap=job.costs.overlap > 0 if job.schedule.overlap is None else job.schedule.overlap,
            costs=self.limit.costs,
            memory_limit=self.limit.units,
            objective=job.objective,
            budget=self.schedule.budget if budget is None else budget,
            **search,
        )
        program = finished(job, self.schedule.make(request), self.costs)
        found = bounds_of(job, self.placement, self.costs)
        return Ordered(self.schedule.name, program, self.stages, self.costs, found, Lowering.of(job), self.again)

    @property
    def limits(self) -> tuple[float, ...] | None:
        """Units per rank, the schedule's own limit included."""
        own, given = OWN_LIMIT.get(self.schedule.name), self.limit.units
        if own is None:
            return given
        units = own(self.placement.ranks)
        return tuple(min(units, limit) for limit in given or (units,) * self.placement.ranks)

    def smaller(self) -> Iterator[Prepared]:
        """With several pipes, the same for each smaller limit that makes a difference, largest first."""
        if len(self.placement.pipes) > 1 and self.schedule.searched and self.limit.units is not None:
            for units in whole(self.limit.units, least_of(self.placement, self.limit.costs))[1:]:
                yield replace(self, limit=replace(self.limit, units=units))

    def widest(self) -> Prepared:
        """With several pipes, the same with room for everything where no limit is given; else it is this one."""
        if len(self.placement.pipes) == 1 or not self.schedule.searched or self.limit.units is not None:
            return self
        most = _everything(self.placement, self.limit.costs, self.job.schedule.microbatches)
        units = whole(most, least_of(self.placement, self.limit.costs))[0]
        return replace(self, limit=replace(self.limit, units=units))

    @property
    def busiest(self) -> float:
        """ms that a microbatch takes of the rank with most to do; with several pipes they share the microbatches."""
        pipes = self.placement.pipes
        f, b, w, bw = map(self.costs.column, ("f", "b", "w", "bw"))
        backward = tuple(map(add, b, w)) if self.schedule.splits_backward else bw
        loads = [0.0] * self.placement.ranks
        for pipe in pipes:
            for s, rank in enumerate(pipe):
                loads[rank] += (f[s] + backward[s]) / len(pipes)
        return max(loads)

    @property
    def least_step(self) -> float:
        """What no order of this schedule can beat: `bounds` know neither its own limit nor a backward in one op."""
        costs, limits = self.limit.costs, self.limits
        if not self.schedule.splits_backward:
            costs = costs.joined()
        least = bounds(self.placement, costs, self.job.schedule.microbatches, limits)
        return with_sums(least, self.placement, costs).of(self.job.objective)


def prepare(
    job: Job, table: Sequence[estimate.Layer], schedule: Schedule, chunks: int | None, cut: Cut | None = None
) -> Prepared:
    """With a `cut` of its own, or the one the job starts from.

    Raises E1xx (impossible as asked) or E303 (memory_limit below what any order needs).
    """
    schedule.check_ranks(job.parallel.pp)
    v = schedule.stages_per_rank(chunks)
    placement = schedule.placement(job.parallel.pp, v)
    again = cut.again if cut is not None else frozenset()
    stages = cut.stages if cut is not None else partition(job, placement, table)
    costs = cost.build(settled(job, again, placement), placement, stages, table)
    limit = limit_of(job, placement, costs, split=schedule.splits_backward) if schedule.searched else Limit(costs, None)
    if len(placement.pipes) > 1 and schedule.searched and limit.units is not None:
        most = _everything(placement, limit.costs, job.schedule.microbatches)
        given = tuple(map(min, limit.units, most))
        limit = replace(limit, units=whole(given, least_of(placement, limit.costs))[0])
    return Prepared(job, schedule, placement, v, stages, costs, limit, again)


def settled(job: Job, again: Collection[int], placement: Placement) -> Job:
    """The job with the stages that recompute written down. Raises E110 for one that there is not."""
    cost.check_stages(job, placement)
    memory = job.memory.settled(again, placement.stages)
    return job if memory is job.memory else replace(job, memory=memory)


def _everything(placement: Placement, costs: Costs, microbatches: int) -> tuple[float, ...]:
    """Activation units per rank beyond which more room changes nothing: all microbatches in one pipe."""
    found = [0.0] * placement.ranks
    most = list(map(max, costs.units("kept"), costs.units("left")))  # recompute leaves W more than B
    for pipe in placement.pipes:
        held = [0.0] * placement.ranks
        for stage, rank in enumerate(pipe):
            held[rank] += microbatches * most[stage]
        found = list(map(max, found, held))
    return tuple(found)


def cut(job: Job, placement: Placement, table: Sequence[estimate.Layer]) -> tuple[Stages, Costs]:
    """The cut a job starts from, and what its stages cost."""
    stages = partition(job, placement, table)
    return stages, cost.build(settled(job, (), placement), placement, stages, table)


def finished(job: Job, program: Program, costs: Costs) -> Program:
    """The program with what the job does to all its steps."""
    return replace(
        program,
        dp=job.parallel.dp,
        node=None if costs.node is None or costs.node[0] == program.placement.ranks else costs.node,
        tied=job.model.tie_embeddings and program.placement.stages > 1,
        sharded=job.optimizer.zero1,
    )


def bounds_of(job: Job, placement: Placement, costs: Costs) -> Bounds:
    """What no order within the job's memory limit can beat."""
    try:
        limit = limit_of(job, placement, costs)
    except ZbcError:
        limit = Limit(costs, None)
    least = bounds(placement, limit.costs, job.schedule.microbatches, limit.units)
    return with_sums(least, placement, limit.costs)
