"""What a walk among cuts asks of one schedule: whether a cut fits, and what its step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zbc.compiler.cost import cost, estimate
from zbc.compiler.cost.cost import Costs
from zbc.compiler.partition.balance import even
from zbc.compiler.partition.cuts import Cut, Lightest, of_stages
from zbc.compiler.partition.limits import shortage
from zbc.compiler.partition.oracles import OVERHEAD, FixedOrder, Oracle, Remade, reduced
from zbc.compiler.partition.partition import is_open, partition, weights
from zbc.compiler.partition.single import Prepared, prepare, settled
from zbc.compiler.partition.walk import Ground, Judged
from zbc.compiler.schedules import Schedule
from zbc.compiler.schedules.searched import OWN_LIMIT
from zbc.compiler.search.feasible import least_of
from zbc.job.spec import Job

INF = float("inf")
TINY = 1e-9  # of a limit


@dataclass
class Case:
    """One schedule of a job, and the cuts it may have. Raises E1xx where it cannot be."""

    job: Job
    table: Sequence[estimate.Layer]
    schedule: Schedule
    chunks: int | None

    def __post_init__(self) -> None:
        job, schedule = self.job, self.schedule
        schedule.check_ranks(job.parallel.pp)
        self.placement = schedule.placement(job.parallel.pp, schedule.stages_per_rank(self.chunks))
        self.first = of_stages(partition(job, self.placement, self.table))
        self.open = is_open(job) and self.first.points[-1] > self.placement.stages > 1
        self.flags = [s for s in range(self.placement.stages) if job.memory.of(s) == "auto"]
        self._spread = {frozenset[int](): self.first}

    @property
    def free(self) -> bool:
        """Whether there is anything to choose."""
        return self.open or bool(self.flags)

    @property
    def split(self) -> bool:
        return self.schedule.splits_backward

    @property
    def two_pipes(self) -> bool:
        return len(self.placement.pipes) > 1

    @property
    def limited(self) -> bool:
        """Whether memory is."""
        return self.job.schedule.memory_limit is not None or self.job.hardware.memory_gib is not None

    def prepared(self, cut: Cut, job: Job | None = None) -> Prepared:
        """Raises E303 where no order keeps to the limit with this cut."""
        return prepare(job or self.job, self.table, self.schedule, self.chunks, cut)

    def costs(self, cut: Cut) -> Costs:
        return cost.build(settled(self.job, cut.again, self.placement), self.placement, cut.stages, self.table)

    def spread(self, again: frozenset[int]) -> Cut:
        """The cut that is even in time if these stages recompute."""
        if not self.open:
            return self.first._replace(again=again)
        if again not in self._spread:
            self._spread[again] = Cut(tuple(even(self.times(again), self.placement)), again)
        return self._spread[again]

    def times(self, again: frozenset[int], *, split: bool | None = None) -> list[list[float]]:
        """[stage][layer] ms, with the stages that the job itself has recompute, the backward as the schedule has it."""
        stages = range(self.placement.stages)
        named = {s for s in stages if self.job.memory.of(s) == "recompute"}
        return weights(self.table, len(stages), named | again, split=self.split if split is None else split)

    @cached_property
    def order(self) -> FixedOrder:
        """The order for the first cut: of schedules made by hand, that for any cut."""
        return self.order_for(self.first)

    def order_for(self, cut: Cut) -> FixedOrder:
        small = reduced(self.job)
        full = self.prepared(cut).make(0.0).program
        return FixedOrder(self.job, full, full if small is self.job else self.prepared(cut, small).make(0.0).program)

    def short(self, cut: Cut) -> float:
        """By what share the least that any order of this schedule holds is above the limits; 0 if it is not."""
        job, where, costs = self.job, self.placement, self.costs(cut)
        over = shortage(job, where, costs, split=self.split)
        if self.schedule.name in OWN_LIMIT:
            over = max(over, max(least_of(where, costs)) / OWN_LIMIT[self.schedule.name](where.ranks) - 1)
        return over if over > TINY else 0.0

    def ground(self, oracle: Oracle) -> Ground:
        """For walks towards the shortest step."""
        m = self.job.schedule.microbatches
        few = m if isinstance(oracle, Remade) else reduced(self.job).schedule.microbatches
        searched = self.schedule.searched

        def judge(cut: Cut, limit: float) -> Judged | None:
            short = self.short(cut) if searched else 0.0
            if short:
                return Judged(short, INF, cut)
            prepared = self.prepared(cut)
            step = oracle.step(prepared) + (m - few) * prepared.busiest
            if step > limit or step == INF:
                return None
            over = 0.0 if searched else oracle.over(prepared)
            return Judged(over if over > TINY else 0.0, step, cut)

        # What a stage costs is not the sum of its layers where it was given for stages or ranks.
        known = self.job.costs.f is None or self.job.costs.per == "layer"
        factor = (1 - self.job.costs.overlap) * m / few if known else 0.0
        return Ground(self.open, self.flags, judge, oracle.visits, LightestBy(self, oracle.counts), self.spread, factor)

    def memory_ground(self) -> Ground:
        """For walks towards the least memory; all cuts that fit are as good."""

        def judge(cut: Cut, _: float) -> Judged:
            return Judged(self.short(cut), 0.0, cut)

        counts = [[0.0] * self.placement.stages for _ in range(self.placement.ranks)]
        return Ground(self.open, self.flags, judge, OVERHEAD, LightestBy(self, counts), self.spread, 0.0)


class LightestBy:
    """The work of ranks for any stages that recompute."""

    def __init__(self, case: Case, counts: Sequence[Sequence[float]]) -> None:
        self._case, self._counts = case, counts
        self._made: dict[frozenset[int], Lightest] = {}

    def __call__(self, again: frozenset[int]) -> Lightest:
        if again not in self._made:
            self._made[again] = Lightest(self._case.times(again), self._counts)
        return self._made[again]
