"""The best order of a job: over partitions and recompute for one schedule, and for `auto` over all schedules.

Every schedule starts from a few partitions (Evaluator.starts), and a local search looks for a better one. Of schedules
made by hand, the local search times the order on each partition, so what it finds is planned. A searched order is
searched for on several partitions, each with a share of the budget: half of it for the first that fits, the rest for
what the local search finds. A small budget has no local search and gives each as much, so with more memory, which lets
more of them fit, it is never worse.

`auto` leaves out only what a lower bound rules out. So its answer is no worse than that of a schedule by name with the
same budget, and it takes a few times as long. Without a budget it searches on for the most promising ones only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from zbc.compiler.cost import estimate
from zbc.compiler.partition.evaluate import INF, Evaluator, Judged
from zbc.compiler.partition.limits import smallest
from zbc.compiler.partition.local_search import LocalSearch
from zbc.compiler.partition.moving import planned
from zbc.compiler.partition.setup import Choice, Ordered, Setup, freezing_refused, moves, refuse_placement
from zbc.compiler.partition.timing import over_of
from zbc.compiler.schedules import BUDGET, SCHEDULES, ScheduleCard
from zbc.compiler.schedules.searched import own_limit
from zbc.compiler.search.engine import Engine, available
from zbc.compiler.search.ladder import LARGE
from zbc.compiler.search.portfolio import Effort
from zbc.errors import ZbcError
from zbc.job.spec import Job

# Searched schedules in the order in which they are asked: of equally good ones the first is taken.
SEARCHED = ("zb-auto", "v-auto", "looped-zb", "1f1b-v", "zb-v", "v-half", "v-min", "chimera-zb", "bitpipe-zb")
CHUNKS = {"looped-zb": (2, 3, 4)}  # stages per rank worth trying where the job leaves them open
SMALL_BUDGET = 0.02  # seconds up to which there is no local search; and, of two pipes, for each smaller limit
RATE = 1_500_000  # op visits of a local search per second, in plain Python
USUAL, MOST = 0.6, 2.0  # seconds of a local search where no budget was asked for, and at most
SEARCHING = 0.05  # of that, in op visits of compiled kernels
LEAST = 400_000  # op visits of a local search for the least memory
FINALISTS, WEIGHED = 2, 64  # partitions of schedules made by hand that are planned: where one fits, and where none does
# Of the usual budget, to the most promising plans, where none was asked for; the local search takes some of it.
DEFAULT, DEFAULT_IF_OPEN = (0.6, 0.2), (0.25, 0.1)
FIRST = 3  # partitions of each schedule that are tried where no budget was asked for
EXPLORED = 2  # schedules whose partitions are searched where no budget was asked for
SAME = 1e-12


class Best:
    """The best order that fits, so far, of equally good ones the first; and why others do not do."""

    def __init__(self, job: Job) -> None:
        self.job, self.step = job, INF
        self.ordered: Ordered | None = None
        self._too_large: tuple[float, Ordered] | None = None
        self._refused: list[tuple[bool, float, ZbcError]] = []  # whether it is about more than memory, the least limit

    def offer(self, ordered: Ordered) -> float:
        """Keep it if it is better and fits; what its step takes, in ms."""
        step = ordered.step_ms(self.job)
        refused = freezing_refused(self.job, ordered)
        if refused is not None:
            self.refuse(refused)
        elif step < self.step * (1 - SAME):
            over = over_of(self.job, ordered)
            if not over:
                self.ordered, self.step = ordered, step
            elif over < self.over:
                self._too_large = over, ordered
        return step

    @property
    def over(self) -> float:
        """By what share of a limit the least too large is above it; 0 if one fits."""
        return 0.0 if self.ordered is not None else INF if self._too_large is None else self._too_large[0]

    def rules_out(self, setup: Setup) -> bool:
        """Whether none of its orders can be better; bounds know nothing of overlap."""
        return self.job.costs.overlap == 0 and setup.least_step >= self.step * (1 - SAME)

    def refuse(self, error: ZbcError, needed: float = INF) -> None:
        """A schedule that cannot be, and the limit from which it could."""
        self._refused.append((error.code != "E303", needed, error))

    def answer(self) -> Ordered:
        """The best. If nothing fits, raises what names the least limit, or answers with what checks will refuse."""
        if self.ordered is not None:
            return self.ordered
        if self._refused:
            limited, _, error = min(self._refused, key=lambda entry: entry[:2])
            if not limited or self._too_large is None:
                raise error
        if self._too_large is None:
            raise ZbcError("E303", "schedule: no schedule can be made for this job")
        return self._too_large[1]


# ---- one schedule ----------------------------------------------------------------------------------------------------


def best_of_one(
    job: Job, table: Sequence[estimate.Layer], schedule: ScheduleCard, chunks: int | None, budget: float | None = None
) -> Ordered:
    """The best order of one schedule. Raises E1xx (it cannot be) or E303 (nothing keeps to the limit)."""
    evaluator, best = Evaluator(job, table, schedule, chunks), Best(job)
    if not evaluator.free or moves(job, evaluator.placement):
        return planned(evaluator.setup(evaluator.start), budget)
    if not schedule.searched:
        _by_hand(best, evaluator, _local(budget))
        return best.answer()
    for choice, seconds in shares(evaluator, budget).items():
        setup = evaluator.setup(choice)
        if not best.rules_out(setup):
            best.offer(setup.make(seconds))
    if best.ordered is None:
        _least_memory(best, evaluator)
    return best.answer()


def _local(budget: float | None) -> float:
    """Seconds of a local search."""
    return USUAL if budget is None else 0.0 if budget <= SMALL_BUDGET else min(budget, MOST)


def _by_hand(best: Best, evaluator: Evaluator, seconds: float) -> float:
    """Offers the best plans of a schedule made by hand, after a local search of so many seconds; ms of the best."""
    if not evaluator.free:
        return best.offer(evaluator.setup(evaluator.start).make(0.0))
    search = LocalSearch(evaluator, evaluator.timing(evaluator.start, Engine(False)))
    search.run(evaluator.starts, int(RATE * seconds))
    for rank, judged in enumerate(search.ranked()[:WEIGHED]):
        # What is too large was weighed without what is on its way, which is more with some than with others.
        if best.over <= judged.over and (rank >= FINALISTS or judged.over):
            break
        ordered = evaluator.setup(judged.choice).make(0.0)
        if seconds:
            ordered = replace(ordered, tried=search.tried, all_tried=search.all_tried)
        best.offer(ordered)
    return min((judged.step for judged in search.ranked()), default=INF)


def shares(evaluator: Evaluator, budget: float | None) -> dict[Choice, float]:
    """For searched schedules: what to search an order for, and for how many seconds. Nothing where nothing fits."""
    seconds = evaluator.schedule.budget if budget is None else budget
    fitting = evaluator.fitting or _tightest(evaluator)
    if not evaluator.free or not fitting:
        return dict.fromkeys(fitting, seconds)
    # What a small budget gives to each does not depend on how many fit.
    each = min(seconds, SMALL_BUDGET) / max(2, len(evaluator.starts))
    given = dict.fromkeys(fitting, each)
    if budget is None or seconds > SMALL_BUDGET:
        left = seconds - (len(evaluator.starts) - 1) * each
        given[fitting[0]] = max(each, left / 2)
        found = _explored(evaluator, fitting[0], budget)
        given[found] = given.get(found, 0.0) + left - given[fitting[0]]
    return given


def _explored(evaluator: Evaluator, first: Choice, budget: float | None) -> Choice:
    """What a local search finds for a searched schedule; the first where that finds nothing that fits."""
    seconds = evaluator.schedule.budget if budget is None else budget
    engine = Engine(available() and seconds > 0)
    visits = int(RATE * _local(budget))
    if budget is not None and engine.compiled and not evaluator.two_pipes:
        visits = Effort.seconds(SEARCHING * _local(budget), engine).visits
    search = LocalSearch(evaluator, evaluator.timing(first, engine))
    search.run([first, *evaluator.starts], visits)
    # Of few microbatches no order may have been found for what fits, so that what does not is all that is left.
    return first if search.best is None or search.best.over else search.best.choice


@lru_cache(maxsize=32)
def _least(evaluator: Evaluator) -> Judged:
    """The choice with which a searched schedule needs the least memory."""
    search = LocalSearch(evaluator)
    search.run(evaluator.starts, LEAST)
    return search.best or Judged(0.0, 0.0, evaluator.start)


def _tightest(evaluator: Evaluator) -> list[Choice]:
    """Where no start fits: the choice that needs the least memory, if that fits."""
    found = _least(evaluator)
    return [] if found.over else [found.choice]


def _least_memory(best: Best, evaluator: Evaluator) -> None:
    """Offer a plan for the choice that needs the least memory, or tell `best` why even that cannot be."""
    choice, schedule = _least(evaluator).choice, evaluator.schedule
    try:
        best.offer(evaluator.setup(choice).make(0.0))
    except ZbcError as error:
        costs = evaluator.costs(choice)
        needed = smallest(best.job, evaluator.placement, costs, split=schedule.splits_backward)
        best.refuse(error, needed if own_limit(schedule.name, 1) is None else INF)


# ---- all schedules ---------------------------------------------------------------------------------------------------


def best_of_all(job: Job, table: Sequence[estimate.Layer], budget: float | None = None) -> Ordered:
    """The best order; each search takes `budget` seconds (None: the usual budget for the most promising together).

    Raises E1xx (impossible as asked) or E303 (memory_limit below what any order needs).
    """
    best, seen, found = Best(job), set[tuple[object, ...]](), list[tuple[float, Evaluator]]()
    for schedule, chunks in entrants(job):
        try:
            evaluator = Evaluator(job, table, schedule, chunks)
            refuse_placement(job, evaluator.placement, evaluator.costs(evaluator.start), schedule.name)
        except ZbcError as error:
            best.refuse(error)
            continue
        step = _first(best, evaluator, seen, budget) if evaluator.least_step() < best.step else None
        found += [] if step is None else [(step, evaluator)]
    evaluators = [evaluator for _, evaluator in sorted(found, key=lambda pair: pair[0])]
    by_hand = [one for one in evaluators[: EXPLORED if budget is None else None] if not one.schedule.searched]
    searched = [one for one in evaluators if one.schedule.searched]
    most_promising = DEFAULT_IF_OPEN if any(one.free for one in evaluators) else DEFAULT
    seconds = [BUDGET * share for share in most_promising] if budget is None else [budget] * len(searched)
    for evaluator, most in zip(searched, seconds, strict=False):
        _asked(best, evaluator, most, usual=budget is None)
    for evaluator in by_hand:
        if evaluator.free and _local(budget) and evaluator.least_step() < best.step:
            _by_hand(best, evaluator, _local(budget))
    if best.ordered is None:
        for evaluator in searched:
            _least_memory(best, evaluator)
    return best.answer()


def _first(best: Best, evaluator: Evaluator, seen: set[tuple[object, ...]], budget: float | None) -> float | None:
    """Offers what a schedule makes of its starts; of searched ones, as the fast tier finds it. ms of the best.

    None where no order could be better, or where all were looked for by schedules before this one.
    """
    if not evaluator.schedule.searched:
        return _by_hand(best, evaluator, 0.0)
    choices = evaluator.fitting or _tightest(evaluator)
    setups = [setup for setup in map(evaluator.setup, choices) if not best.rules_out(setup)]
    if budget is None:
        setups = sorted(setups, key=lambda setup: setup.least_step)[:FIRST]
    fresh = [setup for setup in setups if setup.looks_for not in seen]
    seen |= {setup.looks_for for setup in fresh}
    steps = [_offer(best, setup, 0.0, 0.0 if budget == 0 else None) for setup in fresh]
    return min(steps, default=None if choices else INF)


def _offer(best: Best, setup: Setup, seconds: float, rungs: float | None) -> float:
    """Offers a plan, with `rungs` seconds for each smaller limit too; ms of the first.

    Two pipes without a limit by name keep to what 1F1B holds. Here they may use all they can.
    """
    if len(setup.placement.pipes) == 1:
        return best.offer(setup.make(seconds, compiled=True, rungs=rungs, beat=INF if rungs is None else best.step))
    step = best.offer(setup.make(seconds))
    small = 3 * setup.placement.stages * setup.job.schedule.microbatches <= LARGE
    for place, lower in enumerate(setup.lowered()):
        if place and (rungs is None or not small or best.rules_out(lower)):
            break
        if lower.limit.units != setup.limit.units:
            best.offer(lower.make(min(rungs, SMALL_BUDGET) if place and rungs is not None else seconds))
    return step


def _asked(best: Best, evaluator: Evaluator, budget: float, *, usual: bool) -> None:
    """Offers what a searched schedule by name would be with that budget, and what it is under smaller limits.

    Of the usual budget, smaller limits get the fast tier, those of two pipes nothing; nor do the other starts.
    """
    if not budget or evaluator.least_step() >= best.step:
        return
    for choice, seconds in shares(evaluator, budget).items():
        setup = evaluator.setup(choice)
        if best.rules_out(setup) or (usual and seconds <= SMALL_BUDGET):
            continue
        if usual and evaluator.two_pipes:
            best.offer(next(setup.lowered()).make(seconds))
        else:
            _offer(best, setup, seconds, 0.0 if usual else seconds)


def entrants(job: Job) -> Iterator[tuple[ScheduleCard, int | None]]:
    """Every schedule with the chunks worth trying; those by hand last, when most of them can be ruled out."""
    asked = job.schedule.chunks
    for name in SEARCHED:
        schedule = SCHEDULES[name]
        for v in CHUNKS.get(name, (schedule.default_chunks,)) if asked is None else (asked,):
            if schedule.allows(v):
                yield schedule, v
    for schedule in SCHEDULES.values():
        if not schedule.searched and schedule.allows(asked):
            yield schedule, asked
