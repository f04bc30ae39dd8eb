"""A schedule on one partition: its costs, its memory limit, its lower bound, and the resulting order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

from zbc import excludes
from zbc.compiler.check.memory import check_memory, excess
from zbc.compiler.cost import pricing
from zbc.compiler.cost.cost import Costs
from zbc.compiler.lowering import Lowering
from zbc.compiler.memory.per_rank import RankMemory, peaks
from zbc.compiler.partition.initial import Stages, initial
from zbc.compiler.partition.limits import Limit, bounds_of, limit_of, room_of, under, whole
from zbc.compiler.partition.userpass import passes_of
from zbc.compiler.schedules import SCHEDULES, Request, ScheduleCard, several
from zbc.compiler.schedules.searched import own_limit
from zbc.compiler.search.feasible import least_of
from zbc.compiler.sim.bounds import Bounds
from zbc.compiler.sim.context import Context
from zbc.compiler.steps import settled
from zbc.errors import ZbcError, raise_all
from zbc.ir import Placement, Program
from zbc.job.sections import Memory, Schedule
from zbc.job.spec import Job

STEP = 0.25  # activation units: the least step by which the limit of an order is lowered
WORTH = 0.002  # of a step: the least saving for keeping the logits of a second unit
TINY = 1e-9  # of a step
INF, LEAST = float("inf"), 1e-300
LARGE = 4000  # ops from which orders for smaller limits are left out
RETRIES = 4  # with less for activations, until tensors in flight fit as well


class Choice(NamedTuple):
    """A partition, by its points as in balance.py, and the stages that recompute."""

    points: tuple[int, ...]
    recompute: frozenset[int] = frozenset()

    @classmethod
    def of(cls, stages: Stages) -> Choice:
        """The choice of stages that all have a layer at least."""
        return cls((*(part[0] for part in stages), stages[-1][-1] + 1))

    @property
    def stages(self) -> Stages:
        """Stage -> indices of its layers."""
        return tuple(tuple(range(a, b)) for a, b in pairwise(self.points))


def lowering_of(job: Job) -> Lowering:
    """The lowering of the programs of a job."""
    lowering = Lowering.of(job, partial(several, group=job.schedule.group, early=job.schedule.early))
    return replace(lowering, own=passes_of(job)) if job.schedule.passes else lowering


@dataclass(frozen=True)
class Ordered:
    """A compute-only program with the partition and the costs it was made for; lowered on first use."""

    name: str
    program: Program
    stages: Stages
    costs: Costs
    bounds: Bounds
    lowering: Lowering
    recompute: frozenset[int] = frozenset()  # stages chosen by memory.activations = "auto"
    activations: Memory | None = None  # the policy it was made with instead of "auto", if several were weighed
    options: Schedule | None = None  # the options it was made with, if "auto" chose more than a schedule
    weighed: tuple[tuple[str, float | None], ...] = ()  # policies by name, with ms of a step; None: does not fit
    copy_share: float | None = None  # ms of a copy over F + B + W, if copies were weighed
    rivals: tuple[tuple[str, int, float], ...] = ()  # schedules, chunks, step over the best that fits
    tried: int = 1  # number of simulated partitions
    all_tried: bool = False  # whether no other one could be better for this schedule

    @cached_property
    def compute(self) -> Context:
        """The program as it is."""
        return Context(self.program, self.costs)

    @cached_property
    def begun(self) -> Context:
        """The program after the first passes of its lowering."""
        return self.lowering.begin(self.compute)

    @cached_property
    def complete(self) -> Context:
        """The program with its transfers and step-level ops."""
        return self.lowering.finish(self.begun)

    @property
    def plain(self) -> bool:
        """Whether passes only add to the order, so that it tells time and activations as it is."""
        return self.program.alone and not self.lowering.moves

    @property
    def judged(self) -> Context:
        """The program that time and memory are read of: the complete one, unless the order tells the same for less."""
        return self.compute if self.plain else self.complete

    @cached_property
    def memory(self) -> list[RankMemory]:
        """Memory of each rank of the complete program."""
        return peaks(self.complete.program, self.costs, self.complete.timeline)

    def told(self, **facts: Any) -> Ordered:
        """The same with other facts on how it was found; what is lowered stays so."""
        other = replace(self, **facts)
        vars(other).update({name: vars(self)[name] for name in ("compute", "complete", "memory") if name in vars(self)})
        return other

    def relowered(self, lowering: Lowering) -> Ordered:
        """The same order with another lowering; the first passes run once if they are the same."""
        other = replace(self, lowering=lowering)
        vars(other)["compute"] = self.compute
        if lowering.first == self.lowering.first:
            vars(other)["begun"] = self.begun
        return other

    def repriced(self, job: Job) -> Ordered:
        """The same order at the costs of another job. Raises E110."""
        placement = self.program.placement
        costs = pricing.build(as_ordered(job, self), placement, self.stages)
        program = finished(job, self.program, costs, self.stages)
        return replace(self, program=program, costs=costs, bounds=bounds_of(job, placement, costs))

    def step_ms(self, job: Job) -> float:
        """ms of a step as it is reported: in steady state, or by the job's objective (see `Job.steady`)."""
        return settled(self.complete) if job.steady else self.judged.step_ms(job.objective)


@dataclass(frozen=True, slots=True)
class Setup:
    """A schedule with all inputs of its order; `make` may be called for several budgets."""

    job: Job
    schedule: ScheduleCard
    placement: Placement
    v: int
    stages: Stages
    recompute: frozenset[int]
    costs: Costs
    limit: Limit
    lowering: Lowering
    woven: dict[tuple[Program, int], Ordered] = field(default_factory=dict, compare=False)  # with late units, see Weave
    compiled: bool = False  # loads compiled kernels for the fast tier, too

    @classmethod
    def of(cls, job: Job, schedule: ScheduleCard, placement: Placement, v: int, choice: Choice, costs: Costs) -> Setup:
        """Raises E303 (memory_limit below the need of any order)."""
        own, limit = own_limit(schedule.name, placement.ranks, costs), Limit(costs, None)
        own = None if own is None else own + meetings(job)
        if moves(job, placement):
            limit = room_of(job, placement, costs, own=own)
        elif schedule.searched:
            limit = limit_of(job, placement, costs, split=schedule.splits_backward, own=own)
            if len(placement.pipes) > 1:
                limit = _whole(limit, placement, job.schedule.microbatches)
        return cls(job, schedule, placement, v, choice.stages, choice.recompute, costs, limit, lowering_of(job))

    def make(self, budget: float | None = None, *, beat: float = INF) -> Ordered:
        """The order; searched ones take about `budget` seconds (None: the schedule's default), and none under limits at
        which less than `beat` ms is impossible. If the result needs too many bytes, the search runs again with the
        tighter limit; if tensors in flight need more of the device than the limit left for them, with that much less
        for activations."""
        order = self._best(budget, beat)
        tighter = self.limit.tighter
        if tighter is not None and excess(self.job, order.memory, self.costs) > 0:
            return replace(self, limit=tighter).make(budget, beat=beat)
        units = self.limit.units
        for _ in range(RETRIES):
            over = self.beyond(order)
            if units is None or not any(over):
                break
            held = [rank.units for rank in peaks(order.program, replace(self.limit.costs, bytes=None))]
            lowered = (now - more if more else most for now, more, most in zip(held, over, units, strict=True))
            units = tuple(map(max, lowered, least_of(self.placement, self.limit.costs)))
            order = self.under(units)._best(budget, beat)
        return order

    def beyond(self, order: Ordered) -> list[float]:
        """By rank the units by which all it holds exceeds its device; [] if that is no limit of the search."""
        device, unit = self.job.room, self.limit.unit
        if device is None or not unit:
            return []
        return [max(0.0, rank.bytes - device) / each for rank, each in zip(order.memory, unit, strict=True)]

    def _best(self, budget: float | None, beat: float) -> Ordered:
        """One order for its limit. If searches do not see all costs of a step, the best by the full step of that and of
        the hand-made orders; as long as bounds, which do not include overlap, allow a better one."""
        best = self.ordered(budget)
        if not self.schedule.searched or not unseen(self.job, self.costs) or len(self.placement.pipes) > 1:
            return best
        over, step = self._over(best), best.step_ms(self.job)
        for order in self.by_hand():
            if not (over or self.job.costs.overlap) and self.least_step >= min(step, beat) * (1 - TINY):
                break
            took = order.step_ms(self.job)
            shorter = took < step * (1 - TINY)
            if (over or shorter) and ((now := self._over(order)) < over or (shorter and now <= over)):
                best, over, step = order, now, took
        return best

    def _over(self, order: Ordered) -> float:
        """The share by which an order exceeds the limits of its job and its schedule, in activation units; 0 if it
        fits."""
        over = over_of(self.job, order)
        if over or self.limit.units is None:
            return over
        held = peaks(order.judged.program, replace(self.limit.costs, bytes=None, shares=()))
        return (
            LEAST if any(rank.units > most + 1e-6 for rank, most in zip(held, self.limit.units, strict=True)) else 0.0
        )

    def by_hand(self, some: Callable[[list[int]], list[int]] = list) -> Iterator[Ordered]:
        """Yields orders of other schedules for the same placement that take no search; `some` selects group sizes."""
        p = self.placement.ranks
        for card in SCHEDULES.values():
            whole = self.schedule.splits_backward or not card.splits_backward
            if card.searched or card.grouped or not whole or not card.allows(self.v):
                continue
            if card.placement(p, self.v) != self.placement or any(refusals(self.job, card)):
                continue
            setup = replace(self, schedule=replace(card, name=self.schedule.name))
            for group in [None] if card.groups is None else some(list(card.groups(p))):
                try:
                    order = setup.ordered(0.0, group=group)
                except ZbcError:  # not for this number of microbatches
                    continue
                named = (self.schedule.name, *order.program.history[1:])  # as in results that a search takes from there
                yield replace(order, program=replace(order.program, history=named))

    def quick(self, budget: float) -> Ordered:
        """One order for its limit, not the best possible with vocabulary parallelism."""
        if not self.job.vocabulary:
            return self._ordered(self.limit.units, budget)
        order = self._ordered(self._less(meetings(self.job)), budget)
        weave = order.lowering.weave
        quick = None if weave is None else replace(weave, quick=True)
        return replace(order, lowering=replace(order.lowering, weave=quick))

    def _less(self, more: float) -> tuple[float, ...] | None:
        """The limit less `more` units of each rank, but enough for some order."""
        if self.limit.units is None:
            return None
        needs = least_of(self.placement, self.limit.costs)
        return tuple(max(least, most - more) for least, most in zip(needs, self.limit.units, strict=True))

    def ordered(self, budget: float | None, *, group: int | None = None) -> Ordered:
        """One order for its limit; `group` instead of the job's. With vocabulary parallelism it is made for less than
        the limit, since collectives before the last stage's backwards make it hold units longer; the difference is
        known only after weaving."""
        units, extra = self.limit.units, meetings(self.job)
        if not self.job.vocabulary:
            return self._ordered(units, budget, group)
        if units is None:
            return self._later(self._ordered(units, budget, group))
        for _ in range(RETRIES):
            order = self._ordered(self._less(extra), budget, group)
            held = peaks(order.complete.program, replace(self.limit.costs, bytes=None, shares=()))
            over = max(rank.units - most for rank, most in zip(held, units, strict=True))
            if over <= 1e-6:
                break
            extra += max(over, STEP)
        return self._later(order)

    def _later(self, found: Ordered) -> Ordered:
        """The order with the logits of two units at a time, if that makes a step shorter and fits."""
        weave = found.lowering.weave
        if weave is None or weave.late != 1:
            return found
        lowering = replace(found.lowering, weave=replace(weave, late=2))
        later = self.woven.setdefault((found.program, 2), replace(found, lowering=lowering))
        if later.step_ms(self.job) > found.step_ms(self.job) * (1 - WORTH):
            return found
        return found if self._over(later) else later

    def _ordered(self, units: tuple[float, ...] | None, budget: float | None, group: int | None = None) -> Ordered:
        job, asked = self.job, self.job.schedule
        request = Request(
            p=job.parallel.pp,
            m=asked.microbatches,
            v=self.v,
            group=group or asked.group,
            early=asked.early,
            overlap=self._overlaps,
            costs=self.limit.costs,
            memory_limit=units,
            objective=job.objective,
            slices=job.slices,
            budget=self.schedule.budget if budget is None else budget,
            compiled=self.compiled,
            fits=None if job.vocabulary or moves(job, self.placement) else lambda one: not any(self.beyond(made(one))),
        )

        @cache
        def made(found: Program) -> Ordered:
            program = finished(job, found, self.costs, self.stages)
            lower = bounds_of(job, self.placement, self.costs.hidden() if program.grouped else self.costs)
            order = Ordered(self.schedule.name, program, self.stages, self.costs, lower, self.lowering, self.recompute)
            return self.woven.setdefault((program, 1), order) if job.vocabulary else order

        return made(self.schedule.make(request))

    @property
    def _overlaps(self) -> bool:
        """Whether pairs of an F and a backward are overlap groups, in schedules that have such pairs."""
        asked = self.job.schedule.overlap
        return self.job.costs.overlap > 0 if asked is None else asked

    @property
    def _groups(self) -> bool:
        """Whether its orders have overlap groups, which hide tensor-parallel collectives."""
        return self.schedule.grouped or ("overlap" in self.schedule.options and self._overlaps)

    def under(self, units: tuple[float, ...]) -> Setup:
        """This setup under another limit."""
        return replace(self, limit=replace(self.limit, units=units))

    def lowered(self) -> Iterator[Setup]:
        """Yields this setup under every distinct limit, up to its own or to all usable memory; largest first."""
        needs = least_of(self.placement, self.limit.costs)
        most = everything(self.placement, self.limit.costs, self.job.schedule.microbatches)
        yield from map(self.under, whole(self.limit.units or most, needs))

    @property
    def least_step(self) -> float:
        """A lower bound for all orders of this schedule: `bounds` include neither its own limit nor fused backwards."""
        costs = self.limit.costs if self.schedule.splits_backward else self.limit.costs.joined()
        costs = costs.hidden() if self._groups else costs
        return under(self.job, self.placement, costs, self.limit.units).of(self.job.objective)


def meetings(job: Job) -> float:
    """Activation units that a rank holds longer because of vocabulary collectives before the last stage's backwards."""
    return job.vocabulary / job.slices


def moves(job: Job, placement: Placement) -> bool:
    """Whether activations of any stage may move to the host."""
    return any(job.memory.offloads(s) for s in range(placement.stages))


def unseen(job: Job, costs: Costs) -> bool:
    """Whether searches miss costs of a step: vocabulary collectives, or occupied links."""
    return bool(job.vocabulary) or any(any(links.values()) for links in costs.occupies)


def limited(job: Job) -> bool:
    """Whether memory is limited."""
    return job.schedule.memory_limit is not None or job.hardware.memory_gib is not None


def held_in(job: Job, order: Ordered) -> list[RankMemory]:
    """Memory of each rank as limits count it: on a device with receive buffers."""
    plain = job.hardware.memory_gib is None and order.plain
    return peaks(order.program, order.costs, order.compute.timeline) if plain else order.memory


def over_of(job: Job, order: Ordered) -> float:
    """The share by which an order exceeds the limits of its job; 0 if it fits."""
    if not limited(job):
        return 0.0
    memory = held_in(job, order)
    try:
        check_memory(job, memory, order.costs)
    except ZbcError:
        return max(excess(job, memory, order.costs), LEAST)
    return 0.0


def with_recompute(job: Job, recompute: Collection[int], placement: Placement) -> Job:
    """The job with the recomputing stages written down. Raises E110 for a stage that doesn't exist."""
    pricing.check_stages(job, placement)
    memory = job.memory.decided(recompute, placement.stages)
    return job if memory is job.memory else replace(job, memory=memory)


def as_ordered(job: Job, found: Ordered) -> Job:
    """The job with an order's activation policy written down."""
    made = job if found.activations is None else replace(job, memory=found.activations)
    return with_recompute(made, found.recompute, found.program.placement)


def start_of(job: Job, placement: Placement) -> tuple[Stages, Costs]:
    """The partition a job starts from, and the costs of its stages."""
    stages = initial(job, placement)
    return stages, pricing.build(with_recompute(job, (), placement), placement, stages)


def finished(job: Job, program: Program, costs: Costs, stages: Stages) -> Program:
    """The program with the job's settings for all steps; `stages` are the layers of each. Raises E110."""
    refuse_placement(job, program.placement, costs, program.history[0])
    trained = set() if job.adapter.rank or job.vocabulary else job.model.tied_layers
    tied = [s for s, part in enumerate(stages) if trained & set(part)]
    ep, routed = job.parallel.ep if job.parallel.ep > 1 else 0, job.model.routed
    return replace(
        program,
        dp=job.parallel.dp,
        cp=job.parallel.cp,
        tp=job.parallel.tp,
        node=None if costs.node is None or costs.node[0] == program.placement.ranks else costs.node,
        order=tuple(job.parallel.order or ()),
        tied=len(tied) > 1 or (job.ties_words and program.placement.stages > 1),
        ties=tuple(tied) if len(tied) > 1 else (),
        sharded=job.parallel.shard != "none",
        scatters=job.parallel.scatters,
        ep=ep,
        folded=job.parallel.folded,
        dense=tuple(s for s, part in enumerate(stages) if ep and not any(i in routed for i in part)),
        near=costs.near,
        averages=0 if (asked := job.parallel.average) is None else 1 if asked.delay else 2,
        one_sided=job.parallel.one_sided,
    )


def refusals(job: Job, card: ScheduleCard) -> Iterator[ZbcError]:
    """Yields the reasons why a job cannot use a schedule, as far as known before it has a placement."""
    asked = vars(job) | {"schedule": job.schedule.model_copy(update={"slices": job.slices, "kind": card.name})}
    return excludes.of_schedule(asked, job.document.where, card.name, card.traits)


def freezing_refused(job: Job, found: Ordered) -> ZbcError | None:
    """E110 for an order in which no layers can be frozen, if the job requests freezing."""
    if not job.freeze.share:
        return None
    traits = {"groups"} if found.complete.graph.marks else set[str]()
    traits |= {"copies"} if len(found.program.placement.pipes) > 1 else set()
    return next(excludes.of_schedule(vars(job), job.document.where, found.name, traits), None)


def refuse_placement(job: Job, placement: Placement, costs: Costs, name: str) -> None:
    """Raise E110 if this placement, of the schedule `name`, cannot do what the job's replicas need."""
    if len(placement.pipes) > 1:
        raise_all(excludes.of_schedule(vars(job), job.document.where, name, {"copies"}))
    parallel, size = job.parallel, job.hardware.ranks_per_node
    alone = max(parallel.copies, parallel.of_experts) == 1 and (len(placement.pipes) == 1 or parallel.frees)
    if parallel.shard != "none" and alone:
        text = f'config: parallel.shard = "{parallel.shard}" has nobody to share with: each rank has weights of its own'
        hint = "set parallel.dp to 2 or more, or drop parallel.shard"
        raise ZbcError("E110", text, where=job.where("parallel", "shard"), hint=hint)
    if not parallel.one_sided:
        return
    run = replace(parallel.topology, node=costs.node)
    for stage in range(placement.stages):
        holders = sorted({*placement.holders(stage)})
        hosts = {number // size for number in run.ranks(holders)}
        if len(hosts) > 1:
            whose = f"replicas of rank {holders[0]}" if len(holders) == 1 else f"copies of stage {stage}"
            text = f'config: parallel.exchange = "one-sided", and the {whose} are on {len(hosts)} nodes'
            count = parallel.copies * len(holders)
            hint = f'use "collective", or a node for {count} {whose.split()[0]}: hardware.ranks_per_node is {size}'
            raise ZbcError("E110", text, where=job.where("parallel", "exchange"), hint=hint)


def _whole(limit: Limit, placement: Placement, microbatches: int) -> Limit:
    """The limit rounded down to values that make a difference to two pipes."""
    tighter = None if limit.tighter is None else _whole(limit.tighter, placement, microbatches)
    if limit.units is None:
        return replace(limit, tighter=tighter)
    given = map(min, limit.units, everything(placement, limit.costs, microbatches))
    return replace(limit, units=whole(tuple(given), least_of(placement, limit.costs))[0], tighter=tighter)


def everything(placement: Placement, costs: Costs, microbatches: int) -> tuple[float, ...]:
    """Activation units per rank beyond which more memory changes nothing: all microbatches in one pipe."""
    units = [0.0] * placement.ranks
    most = list(map(max, costs.units("kept"), costs.units("left")))  # recompute leaves W more than B
    for pipe in placement.pipes:
        held = [0.0] * placement.ranks
        for stage, rank in enumerate(pipe):
            held[rank] += microbatches * most[stage]
        units = list(map(max, units, held))
    return tuple(units)
