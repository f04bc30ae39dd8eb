"""One schedule of a job on any partition: does it fit, and what does a step cost?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from operator import add
from typing import NamedTuple

from zbc.compiler.cost import estimate, pricing
from zbc.compiler.cost.cost import Costs
from zbc.compiler.partition.balance import Weights, even
from zbc.compiler.partition.initial import initial, is_open, recomputing, times, uniform
from zbc.compiler.partition.limits import shortage
from zbc.compiler.partition.setup import Choice, Setup, refusals, with_recompute
from zbc.compiler.partition.timing import FixedOrder, Recipes, Remade, Timing, limited, reduced
from zbc.compiler.schedules import ScheduleCard
from zbc.compiler.schedules.searched import own_limit
from zbc.compiler.search.engine import Engine
from zbc.compiler.search.feasible import least_of
from zbc.errors import raise_all
from zbc.ir import Placement
from zbc.job.spec import Job

INF = float("inf")
SMALL = 4000  # ops up to which partitions that are even in memory are always planned
TINY = 1e-9  # of a limit
STATE = 16.0  # bytes that stay with a parameter: weight, gradient and two moments


class Judged(NamedTuple):
    """By what share a choice is above the limits (0: it fits), and ms of its step.

    Of equals the one with the more even ranks is better, so that a search can cross level ground.
    """

    over: float
    step: float
    choice: Choice
    uneven: float = 0.0


class Evaluator:
    """One schedule of a job, and what may be chosen for it. Raises E1xx where it cannot be."""

    def __init__(self, job: Job, table: Sequence[estimate.Layer], schedule: ScheduleCard, chunks: int | None) -> None:
        self.job, self.table, self.schedule = job, table, schedule
        schedule.check_ranks(job.parallel.pp)
        raise_all(refusals(job, schedule))
        self.v = schedule.stages_per_rank(chunks)
        self.placement = schedule.placement(job.parallel.pp, self.v)
        self.start = Choice.of(initial(job, self.placement, table))
        stages = self.placement.stages
        self.movable = is_open(job) and len(table) > stages > 1
        self.optional = [s for s in range(stages) if job.memory.of(s) == "auto"]  # stages that may recompute
        self.two_pipes = len(self.placement.pipes) > 1
        self._even = {self.start.recompute: self.start}

    @property
    def free(self) -> bool:
        """Whether there is anything to choose."""
        return self.movable or bool(self.optional)

    def setup(self, choice: Choice, job: Job | None = None) -> Setup:
        """Raises E303 where no order keeps to the limit."""
        return Setup.of(job or self.job, self.table, self.schedule, self.placement, self.v, choice)

    def costs(self, choice: Choice) -> Costs:
        job = with_recompute(self.job, choice.recompute, self.placement)
        return pricing.build(job, self.placement, choice.stages, self.table)

    def times(self, recompute: frozenset[int], *, split: bool | None = None) -> list[list[float]]:
        """[stage][layer] ms, with the stages that the job itself has recompute, the backward as the schedule has it."""
        stages, split = self.placement.stages, self.schedule.splits_backward if split is None else split
        return times(self.table, recomputing(self.job, stages) | recompute, stages, split=split)

    def even(self, recompute: frozenset[int]) -> Choice:
        """The partition that is most even in time if these stages recompute."""
        if not self.movable:
            return self.start._replace(recompute=recompute)
        if recompute not in self._even:
            self._even[recompute] = Choice(even(self.times(recompute), self.placement), recompute)
        return self._even[recompute]

    def least_step(self) -> float:
        """ms that no order on any partition can beat: the work of a rank that has its share of the whole."""
        if not self.movable:
            return 0.0  # the bound of the one partition there is knows better
        both = {False, self.schedule.splits_backward}  # some orders have backwards in one op and in two
        tables = [self.times(frozenset(), split=split) for split in both]
        share: float = sum(map(min, zip(*chain(*tables), strict=True))) / self.placement.ranks
        return self.job.schedule.microbatches * share * (1 - self.job.costs.overlap) * (1 - 1e-9)

    def short(self, choice: Choice) -> float:
        """By what share the least that any order of this schedule holds is above the limits; 0 if it is not."""
        where, costs = self.placement, self.costs(choice)
        over = shortage(self.job, where, costs, split=self.schedule.splits_backward)
        if (own := own_limit(self.schedule.name, where.ranks, costs)) is not None:
            over = max(over, max(least_of(where, costs)) / own - 1)
        return over if over > TINY else 0.0

    # ---- where the search starts -------------------------------------------------------------------------------------

    @cached_property
    def starts(self) -> list[Choice]:
        """Even in time, in blocks, in memory, in time and memory; and recompute from the first stage to all.

        None of them depends on how large a limit is, so with more memory there are never fewer that fit.
        """
        found, size = [self.start], 3 * self.placement.stages * self.job.schedule.microbatches
        if self.movable:
            blocks = uniform(self.table, self.placement.stages)
            found += [Choice.of(blocks)] if all(blocks) else []
            if limited(self.job) or size <= SMALL:
                found += self._even_in_memory()
        count = 1
        while self.optional and count < 2 * len(self.optional):
            found.append(self.even(frozenset(self.optional[:count])))
            count *= 2
        return list(dict.fromkeys(found))

    def _even_in_memory(self) -> Iterator[Choice]:
        """By what layers keep, as often as a stage holds it; on a device also by what stays; and mixed with their time.

        How often is known of schedules made by hand. A search holds one microbatch at least; as many as 1F1B is a
        guess, which is not worth a proof that the last layer is where it should be.
        """
        job, stages, searched = self.job, self.placement.stages, self.schedule.searched
        flights = [[1] * stages]
        if searched:
            flights.append([min(stages - s, job.schedule.microbatches) for s in range(stages)])
        else:
            for stage, counts in chain.from_iterable(chain.from_iterable(self.order.held)):
                flights[0][stage] = max(flights[0][stage], *counts)
        given = estimate.given_activations(job, list(self.table))
        kept = [layer.size.act_b for layer in self.table] if given is None else [act_b for act_b, _ in given]
        slices = 1 if searched else job.slices
        held = [[[count * size / slices for size in kept] for count in flight] for flight in flights]
        state = [STATE * layer.params for layer in self.table]
        if job.hardware.memory_gib is not None:
            held += [[list(map(add, row, state)) for row in memory] for memory in held]
        for k, memory in enumerate(held):
            if any(map(any, memory)):
                yield Choice(even(memory, self.placement, exact=not searched or k % 2 == 0))
                yield Choice(even(_mixed(self.times(frozenset()), memory), self.placement, exact=False))
                if self.two_pipes and searched:  # one microbatch alone is in one of them
                    yield Choice(even(memory, Placement(self.placement.pipes[:1])))

    @cached_property
    def fitting(self) -> list[Choice]:
        """The starts with which a searched schedule can keep to its limits."""
        return [choice for choice in self.starts if not self.short(choice)]

    # ---- what a step costs -------------------------------------------------------------------------------------------

    @cached_property
    def order(self) -> FixedOrder:
        """The order on the first partition: of schedules made by hand, that on any."""
        return self._order(self.start)

    def _order(self, choice: Choice) -> FixedOrder:
        small, full = reduced(self.job), self.setup(choice).make(0.0).program
        few = full if small is self.job else self.setup(choice, small).make(0.0).program
        return FixedOrder(full, few, self.job)

    def timing(self, first: Choice, engine: Engine) -> Timing:
        """How steps are timed, from the order on a partition that fits."""
        if self.schedule.fitted:
            return Remade(self.job, self.placement)
        if self.schedule.searched:
            return self._order(first) if self.two_pipes else Recipes(self.setup(first), engine)
        return self.order

    def judge(self, choice: Choice, timing: Timing | None, limit: float) -> Judged | None:
        """None if a step takes longer than `limit` ms, or if no order was found. Without a timing, its memory alone."""
        searched = self.schedule.searched
        short = self.short(choice) if searched or timing is None else 0.0
        if short or timing is None:
            return Judged(short, INF if short else 0.0, choice)
        setup = self.setup(choice)
        step = timing.step(setup) + (self.job.schedule.microbatches - timing.microbatches) * setup.busiest
        if step > limit or step == INF:
            return None
        over = 0.0 if searched else timing.over(setup)
        return Judged(over if over > TINY else 0.0, step, choice)


def _mixed(times: Weights, memory: Weights) -> list[list[float]]:
    """Time and memory, each by its share of the whole."""
    whole = [sum(map(sum, table)) or 1.0 for table in (times, memory)]
    return [
        [a / whole[0] + b / whole[1] for a, b in zip(*rows, strict=True)] for rows in zip(times, memory, strict=True)
    ]
