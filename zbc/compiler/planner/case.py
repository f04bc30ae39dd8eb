"""One schedule of a job, with open partition and open recompute stages: starting points, neighbours, and bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations, product
from operator import add

from zbc.compiler.cost import estimate, pricing
from zbc.compiler.cost.cost import Costs
from zbc.compiler.partition.balance import Loads, Weights, even, moved, of_ranks
from zbc.compiler.partition.initial import initial, is_open, times, uniform
from zbc.compiler.partition.limits import hopeless, shortage, unlimited
from zbc.compiler.partition.setup import (
    Choice,
    Setup,
    limited,
    moves,
    refusals,
    refuse_placement,
    unseen,
    with_recompute,
)
from zbc.compiler.schedules import ScheduleCard
from zbc.compiler.schedules.searched import own_limit
from zbc.compiler.search.feasible import least_of
from zbc.errors import raise_all
from zbc.ir import Placement
from zbc.job.sections import Memory
from zbc.job.spec import Job

SMALL = 4000  # ops up to which partitions that are even in memory are always evaluated
TINY, INF = 1e-9, float("inf")  # of a limit
STATE = 16.0  # resident bytes per parameter: weight, gradient and two moments
WEIGHT = 4.0  # of a frozen one, at most
SUBSETS = 64  # sets of recomputing stages up to which all are tried
NEAR = 64  # stages that give a layer to others, and stages that take one


class Case:
    """A schedule of a job with decided activations except for stages that may recompute. Raises E1xx if it is
    impossible; with `roomy`, two pipes may exceed the limit that their schedule's name implies."""

    def __init__(self, job: Job, card: ScheduleCard, chunks: int | None, *, roomy: bool = False) -> None:
        card.check_ranks(job.parallel.pp)
        raise_all(refusals(job, card))
        self.table, self.job, self.card, self.v = estimate.layers(job), job, card, card.stages_per_rank(chunks)
        self.mean = estimate.on_the_mean(job, self.table)
        self.placement = card.placement(job.parallel.pp, self.v)
        self.start = Choice.of(initial(job, self.placement))
        self.stages = self.placement.stages
        self.movable = is_open(job) and len(self.table) > self.stages > 1
        self.optional = [s for s in range(self.stages) if job.memory.of(s) == "auto"]  # stages that may recompute
        self.moves = moves(job, self.placement)
        self.two_pipes = len(self.placement.pipes) > 1
        self.roomy = roomy and self.two_pipes and card.searched
        self.size = 3 * self.stages * job.schedule.microbatches  # F, B and W of a step
        self._even = {self.start.recompute: self.start}
        self._costs = dict[Choice, Costs]()
        self._least_loads = dict[frozenset[int], Loads]()
        refuse_placement(job, self.placement, self.first, card.name)

    def with_memory(self, memory: Memory) -> Case:
        """This case with decided activations."""
        return Case(replace(self.job, memory=memory), self.card, self.v, roomy=self.roomy)

    @property
    def free(self) -> bool:
        """Whether there is anything to choose."""
        return (self.movable or bool(self.optional)) and not self.moves

    @cached_property
    def rough(self) -> bool:
        """Whether a quick look may see less than a full one: one order, not the best of several."""
        if self.moves or not (self.card.searched or self.job.vocabulary):
            return False
        return unseen(self.job, self.first) or self.roomy or limited(self.job)

    def rank(self, score: tuple[float, float]) -> tuple[float, float]:
        """The key by which quick looks rank: with a shared vocabulary their one order is often too large, which a full
        look mends, so its step alone counts."""
        return (0.0 if score[0] < INF else INF, score[1]) if self.job.vocabulary else score

    @cached_property
    def first(self) -> Costs:
        """Costs of its ops on the starting partition."""
        return self.costs(self.start)

    def setup(self, choice: Choice) -> Setup:
        """Raises E303 if no order keeps to the limit."""
        return Setup.of(self.job, self.card, self.placement, self.v, choice, self.costs(choice))

    def request(self, setup: Setup, seconds: float, *, quick: bool) -> Hashable:
        """All that decides the result of a look: schedules that differ in their own limits search for the same under a
        smaller one."""
        limit, job = setup.limit, self.job
        if not self.card.searched or limit.tighter is not None or self.moves:
            return self, setup.stages, setup.recompute, seconds, quick
        memory, options = job.memory.model_dump_json(), job.schedule.model_dump_json()
        where = self.placement, self.card.splits_backward, setup.stages, setup.recompute
        return *where, limit.units, memory, options, seconds, quick

    def costs(self, choice: Choice) -> Costs:
        """Raises E1xx (impossible as requested)."""
        if choice not in self._costs:
            job = with_recompute(self.job, choice.recompute, self.placement)
            self._costs[choice] = pricing.build(job, self.placement, choice.stages)
        return self._costs[choice]

    def times(self, recompute: frozenset[int], *, split: bool | None = None) -> list[list[float]]:
        """[stage][layer] ms, including the job's own recompute stages, with the schedule's form of backward."""
        split = self.card.splits_backward if split is None else split
        return times(self.job, self.mean, estimate.slow_of(self.job, self.placement), recompute, split=split)

    def even(self, recompute: frozenset[int]) -> Choice:
        """The partition that is most even in time if these stages recompute."""
        if not self.movable:
            return self.start._replace(recompute=recompute)
        if recompute not in self._even:
            self._even[recompute] = Choice(even(self.times(recompute), self.placement), recompute)
        return self._even[recompute]

    # ---- bounds ------------------------------------------------------------------------------------------------------

    @cached_property
    def least_step(self) -> float:
        """A lower bound in ms for all orders on all partitions: the work of a rank with an equal share."""
        if self.moves or not self.movable:
            least = unlimited(self.job, self.placement, self.first).of(self.job.objective)
            return 0.0 if self.job.costs.overlap else least
        return self._steps(sum(map(min, zip(*self._least_times(frozenset()), strict=True))) / self.placement.ranks)

    def least(self, choice: Choice) -> float:
        """A lower bound in ms for all orders of a choice, known without its costs: the work of its busiest rank."""
        if self.moves or not self.movable or self.two_pipes:
            return self.least_step
        if choice.recompute not in self._least_loads:
            self._least_loads[choice.recompute] = of_ranks(self._least_times(choice.recompute), self.placement)
        return self._steps(self._least_loads[choice.recompute].busiest(choice.points))

    def _steps(self, work: float) -> float:
        """ms of a step in which a rank has this work for each microbatch."""
        return self.job.schedule.microbatches * work * (1 - self.job.costs.overlap) * (1 - 1e-9)

    def _least_times(self, recompute: frozenset[int]) -> list[list[float]]:
        """[stage][layer] ms; some orders have both fused and split backwards."""
        tables = (self.times(recompute, split=split) for split in {False, self.card.splits_backward})
        return [list(map(min, *rows)) if len(rows) > 1 else rows[0] for rows in zip(*tables, strict=True)]

    def short(self, choice: Choice) -> float:
        """The share by which the least memory of any order of this schedule exceeds the limits; 0 if it does not."""
        where, costs = self.placement, self.costs(choice)
        over = shortage(self.job, where, costs, split=self.card.splits_backward)
        if (own := own_limit(self.card.name, where.ranks, costs)) is not None:
            over = max(over, max(least_of(where, costs)) / own - 1)
        return over if over > TINY else 0.0

    @cached_property
    def hopeless(self) -> bool:
        """Whether no partition fits: the resident state is too large for all ranks together."""
        return hopeless(self.job, self.placement, self.first)

    def missing(self, choice: Choice) -> tuple[float, float]:
        """`short` as a score, with an unknown step."""
        return self.short(choice), 0.0

    def loads(self, recompute: frozenset[int]) -> Loads:
        """The work of ranks for a microbatch, or for one in each pipe."""
        return of_ranks(self.times(recompute), self.placement)

    def below(self, step: float, most: int) -> list[Choice] | None:
        """All choices that may take less than `step` ms, if there are at most `most`; else None."""
        additive = self.job.costs.f is None or self.job.costs.per == "layer"  # times of stages or ranks need not be
        if 2 ** len(self.optional) > SUBSETS or not additive:
            return None
        m, choices = self.job.schedule.microbatches / len(self.placement.pipes), list[Choice]()
        bound = step / (m * (1 - self.job.costs.overlap)) if self.job.costs.overlap < 1 else float("inf")
        for count in range(len(self.optional) + 1):
            for recompute in map(frozenset, combinations(self.optional, count)):
                if not self.movable:
                    choices.append(self.even(recompute))
                    continue
                left = most - len(choices)
                points, whole = self.loads(recompute).below(bound, count=left, nodes=20 * left)
                if not whole:
                    return None
                choices += [Choice(cut, recompute) for cut in points]
        return choices if len(choices) <= most else None

    # ---- starting points and neighbours ------------------------------------------------------------------------------

    @cached_property
    def starts(self) -> list[Choice]:
        """Choices even in time, in blocks, in memory, in time and memory; and recompute from the first stage to all.
        None of them depends on the size of a limit, so with more memory no fewer fit."""
        if not self.free:
            return [self.start]
        choices = [self.start]
        if self.movable:
            blocks = uniform(self.table, self.stages)
            choices += [Choice.of(blocks)] if all(blocks) else []
            if limited(self.job) or self.size <= SMALL:
                choices += self._even_in_memory()
        choices += [self.even(frozenset(self.optional[:count])) for count in self.counts[1:]]
        return list(dict.fromkeys(choices))

    @cached_property
    def counts(self) -> list[int]:
        """Numbers of recomputing stages at which planning begins: none, 1, 2, 4, .., all."""
        most = len(self.optional)
        return sorted({0, most, *(1 << n for n in range(most.bit_length()))})

    def may_fit(self, choice: Choice) -> bool:
        """Whether a search may find an order that fits. Hand-made orders are evaluated for their memory."""
        return not self.card.searched or self.moves or not self.short(choice)

    def _even_in_memory(self) -> Iterator[Choice]:
        """Choices even in activations times their number on a stage; on devices also in resident state; mixed with
        time. The number is known for hand-made schedules. A search holds one microbatch at least; as many as 1F1B is a
        guess, and not worth proving the last layer's place optimal."""
        job, searched, flights = self.job, self.card.searched, [[1] * self.stages]
        if searched:
            flights.append([min(self.stages - s, job.schedule.microbatches) for s in range(self.stages)])
        else:
            for ops in self.setup(self.start).ordered(0.0).program.ranks:
                now = Counter[tuple[str, int]]()
                for op in ops:
                    for ref in op.kind.row.frees:
                        now[ref.what, op.stage] -= 1
                    for ref in op.kind.row.writes:
                        now[ref.what, op.stage] += 1
                    flights[0][op.stage] = max(flights[0][op.stage], now["kept", op.stage], now["left", op.stage])
        given = job.costs.act_b if job.costs.per == "layer" else None
        spared = any(map(job.memory.spares, range(self.stages)))
        sizes = [(estimate.selective(one, job.memory.attends_again) if spared else one).size for one in self.table]
        kept = [size.act_b for size in sizes] if given is None else estimate.each(given, self.table)
        slices = 1 if searched else job.slices
        held = [[[count * size / slices for size in kept] for count in flight] for flight in flights]
        state = [STATE * layer.params + WEIGHT * layer.frozen for layer in self.table]
        if job.hardware.memory_gib is not None:
            held += [[list(map(add, row, state)) for row in memory] for memory in held]
        for k, memory in enumerate(held):
            if any(map(any, memory)):
                yield Choice(even(memory, self.placement, exact=not searched or k % 2 == 0))
                yield Choice(even(_mixed(self.times(frozenset()), memory), self.placement, exact=False))
                if self.two_pipes and searched:  # a single microbatch uses only one pipe
                    yield Choice(even(memory, Placement(self.placement.pipes[:1])))

    def neighbours(self, choice: Choice, fullest: int | None = None) -> list[Choice]:
        """A layer moved to another stage; another stage that recomputes, with the layers as they are and even again;
        with a `fullest` rank from its stages to others, and of its stages. Of more than `NEAR` stages, those of the
        busiest ranks give, and those of the idlest take. Sorted by the work of the busiest rank, least first."""
        work = self.loads(choice.recompute).of(choice.points)
        idlest = sorted(range(self.stages), key=lambda s: max(work[rank] for rank in self.placement.holders(s)))
        givers = sorted(idlest[-NEAR:]) if fullest is None else self.placement.stages_of(fullest)
        pairs = product(givers, sorted(idlest[:NEAR])) if self.movable else ()
        found = (moved(choice.points, *pair) for pair in pairs)
        choices = [Choice(points, choice.recompute) for points in found if points is not None]
        for stage in sorted({*self.optional} & {*givers}):
            toggled = choice.recompute ^ {stage}
            choices += [Choice(choice.points, toggled), *([self.even(toggled)] if self.movable else [])]

        def weight(loads: Sequence[float]) -> tuple[float, float]:
            return round(max(loads), 9), sum(load * load for load in loads)

        loads = {recompute: self.loads(recompute) for recompute in {near.recompute for near in choices}}
        return sorted(dict.fromkeys(choices), key=lambda near: weight(loads[near.recompute].of(near.points)))


def _mixed(times: Weights, memory: Weights) -> list[list[float]]:
    """Time and memory, each as its share of the whole."""
    whole = [sum(map(sum, table)) or 1.0 for table in (times, memory)]
    return [
        [a / whole[0] + b / whole[1] for a, b in zip(*rows, strict=True)] for rows in zip(times, memory, strict=True)
    ]
