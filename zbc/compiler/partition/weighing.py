"""What happens to activations, by predicted step: kept, recomputed, copied to the host meanwhile, or both.

Where `memory.activations = "auto"` leaves it open, memory is limited and copies have a known speed, each answer is
planned as a job of its own, with the whole budget; so what is taken is never slower than one of them by name. What a
lower bound rules out is left out. Where both recompute and offload apply, the stages that recompute are the first one
of each rank, whose activations live longest, the first two, all, or those that recompute alone would choose.

With `kind = "auto"` every schedule is planned by the fast search, and the budget goes to the most promising.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from zbc.compiler.check.memory import check_host
from zbc.compiler.cost import copies, estimate
from zbc.compiler.partition import auto
from zbc.compiler.partition.auto import SAME, Best, entrants
from zbc.compiler.partition.evaluate import INF, Evaluator
from zbc.compiler.partition.limits import unlimited
from zbc.compiler.partition.moving import planned
from zbc.compiler.partition.setup import Ordered, as_ordered, moves, start_of
from zbc.compiler.partition.timing import limited, over_of
from zbc.compiler.passes.offload import TooTight, enough
from zbc.compiler.schedules import BUDGET, ScheduleCard
from zbc.errors import ZbcError
from zbc.ir import Placement
from zbc.job.sections import Memory
from zbc.job.spec import Job

AUTO, KEEP, RECOMPUTE, OFFLOAD, BOTH = "auto", "keep", "recompute", "offload", "recompute+offload"
FINALISTS = (
    0.5,
    0.3,
    0.2,
)  # of the usual budget, to plans whose order is open: where one was asked for, all of it each


def best_of_one(
    job: Job, table: Sequence[estimate.Layer], schedule: ScheduleCard, chunks: int | None, budget: float | None = None
) -> Ordered:
    """The best order of one schedule. Raises E1xx (it cannot be) or E303 (nothing keeps to the limit)."""
    evaluator = Evaluator(job, table, schedule, chunks)
    if not _open(evaluator):
        try:
            return auto.best_of_one(job, table, schedule, chunks, budget)
        except TooTight as error:
            raise _with_recompute(error, evaluator) from None
    best = _Weighing(job, table)
    for memory in _alone(job.memory, evaluator.placement.stages):
        if best.step > _least_step(evaluator) * (1 + SAME):
            best.weigh(evaluator, memory, budget)
    again = frozenset[int]() if best.ordered is None else _recomputed(job, best.ordered)
    for memory in _with_copies(job.memory, evaluator.placement, again):
        one = Evaluator(replace(job, memory=memory), table, schedule, chunks)
        if best.step > _least_step(one) * (1 + SAME):
            best.weigh(one, memory, budget)
    return best.answer()


def best_of_all(job: Job, table: Sequence[estimate.Layer], budget: float | None = None) -> Ordered:
    """The best order of all schedules. Raises E1xx (impossible as asked) or E303 (nothing keeps to the limit)."""
    best, found, left_open = _Weighing(job, table), list[tuple[float, int, Evaluator]](), False
    for number, (schedule, chunks) in enumerate(entrants(job)):
        try:
            evaluator = Evaluator(job, table, schedule, chunks)
            left_open = left_open or _open(evaluator)
        except ZbcError as error:
            best.refuse(error)
            continue
        found.append((_least_step(evaluator), number, evaluator))
    if not left_open and not any(moves(job, one.placement) for _, _, one in found):
        return auto.best_of_all(job, table, budget)
    if left_open:
        best.take(AUTO, lambda: auto.best_of_all(job, table, budget))
    looked = list[tuple[float, int, Evaluator]]()
    for _, _, evaluator in sorted(found, key=lambda entry: entry[:2]):
        for memory in _with_copies(job.memory, evaluator.placement):
            one = Evaluator(replace(job, memory=memory), table, evaluator.schedule, evaluator.v)
            if best.step > _least_step(one) * (1 + SAME):
                looked.append((best.weigh(one, memory, 0.0), len(looked), one))
    open_orders = [
        one for step, _, one in sorted(looked, key=lambda entry: entry[:2]) if step < INF and one.schedule.searched
    ]
    for share, one in zip(FINALISTS if budget != 0 else (), open_orders, strict=False):
        if best.step > _least_step(one) * (1 + SAME):
            best.weigh(one, one.job.memory, share * BUDGET if budget is None else budget)
    return best.answer()


class _Weighing(Best):
    """The best so far, with what each answer takes."""

    def __init__(self, job: Job, table: Sequence[estimate.Layer]) -> None:
        super().__init__(job)
        self.table = table
        self.weighed = dict[str, float | None]()

    def weigh(self, one: Evaluator, memory: Memory, budget: float | None) -> float:
        """Plan a schedule with these activations; ms of its step, infinite where it cannot be."""
        job, stages = replace(self.job, memory=memory), one.placement.stages

        def make() -> Ordered:
            if moves(job, one.placement):
                return planned(one.setup(one.start), budget, beat=self.step)
            return auto.best_of_one(job, one.table, one.schedule, one.v, budget)

        return self.take(_name(memory, stages), lambda: replace(make(), activations=memory))

    def take(self, name: str, make: Callable[[], Ordered]) -> float:
        """Offer what `make` makes, or remember why there is nothing."""
        self.weighed.setdefault(name, None)
        try:
            ordered = make()
            check_host(self.job, ordered.complete.program, ordered.costs)
        except ZbcError as error:
            self.refuse(error, error.least if isinstance(error, TooTight) else INF)
            return INF
        step, over = ordered.step_ms(self.job), over_of(self.job, ordered)
        if not over:
            self.weighed[name] = min(step, self.weighed[name] or INF)
        self.offer(ordered)
        return INF if over else step

    def answer(self) -> Ordered:
        found = super().answer()
        if AUTO not in self.job.memory.chosen():
            return found
        placement = found.program.placement
        moved = replace(self.job, memory=self.job.memory.with_choice([OFFLOAD] * placement.stages))
        return replace(
            found,
            bounds=unlimited(self.job, placement, found.costs),
            weighed=tuple(self.weighed.items()),
            copy_share=copies.share_of(start_of(moved, placement, self.table)[1], placement),
        )


def _open(evaluator: Evaluator) -> bool:
    """Whether offload is among the answers: something is open, memory is limited, and copies have a known speed."""
    job = evaluator.job
    if AUTO not in job.memory.chosen() or not evaluator.optional or not limited(job):
        return False
    return copies.possible(job, bytes_known=evaluator.costs(evaluator.start).bytes is not None)


def _alone(memory: Memory, stages: int) -> Iterator[Memory]:
    """Without copies: all that is open kept, recomputed where that helps, recomputed."""
    yield memory.with_choice([KEEP] * stages)
    yield memory
    yield memory.with_choice([RECOMPUTE] * stages)


def _with_copies(memory: Memory, placement: Placement, again: frozenset[int] = frozenset()) -> Iterator[Memory]:
    """With copies, from no stage that recomputes to all; `again` are those that do where nothing is copied."""
    stages, place, seen = placement.stages, list[int](), [0] * placement.ranks
    for stage in range(stages):
        holders = placement.holders(stage)
        place.append(max(seen[rank] for rank in holders))
        for rank in holders:
            seen[rank] += 1
    most = max(place) + 1
    sets = [frozenset(s for s in range(stages) if place[s] < count) for count in sorted({0, 1, min(2, most), most})]
    made = [memory.with_choice([BOTH if s in one else OFFLOAD for s in range(stages)]) for one in [*sets, again]]
    yield from (one for k, one in enumerate(made) if one not in made[:k])


def _recomputed(job: Job, found: Ordered) -> frozenset[int]:
    """The stages that recompute in an order."""
    memory = as_ordered(job, found).memory
    return frozenset(s for s in range(found.program.placement.stages) if memory.recomputes(s))


def _least_step(evaluator: Evaluator) -> float:
    """ms that no order beats, whatever memory it has, on the partition that it starts from; on any if that is open."""
    job, placement = evaluator.job, evaluator.placement
    if evaluator.movable and not moves(job, placement):
        return evaluator.least_step()
    _, costs = start_of(job, placement, evaluator.table)
    return 0.0 if job.costs.overlap else unlimited(job, placement, costs).of(job.objective)


def _name(memory: Memory, stages: int) -> str:
    """`offload`, or `recompute+offload of 8 stages, offload of 8`."""
    each = [memory.of(s) for s in range(stages)]
    kinds = [what for what in (KEEP, RECOMPUTE, BOTH, OFFLOAD, AUTO) if what in each]
    if AUTO in kinds:
        return "recompute of some"
    if len(kinds) == 1:
        return kinds[0]
    return ", ".join(f"{what} of {each.count(what)}{' stages' if k == 0 else ''}" for k, what in enumerate(kinds))


def _with_recompute(error: TooTight, evaluator: Evaluator) -> ZbcError:
    """The error with the limit that would do if stages recomputed as well, where that is less."""
    job, stages = evaluator.job, evaluator.placement.stages
    both = {str(s): BOTH if job.memory.offloads(s) else job.memory.of(s) for s in range(stages)}
    memory = job.memory.model_copy(update={"activations": both})
    one = Evaluator(replace(job, memory=memory), evaluator.table, evaluator.schedule, evaluator.v)
    hint = error.hint
    try:
        planned(one.setup(one.start), 0.0)
        hint = f'{hint}; memory.activations = "{BOTH}" fits as it is'
    except TooTight as other:
        if other.least < error.least:
            hint = f'{hint}, with memory.activations = "{BOTH}" {enough(other.least)}'
    except ZbcError:
        pass
    return ZbcError(error.code, error.message, hint=hint)
