"""`auto`: the best order over all schedules, placements and smaller limits that fit.

Every schedule keeps to the limit by itself, so what `auto` answers is no worse than what any of them answers with the
same budget; and what it answers for a smaller limit or budget is among what it considers (search/ladder.py). Left out
is only what a lower bound rules out. So a budget is that of each search, and `auto` takes a few times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zbc.compiler.cost import estimate
from zbc.compiler.partition.best import Best
from zbc.compiler.partition.judging import Case
from zbc.compiler.partition.single import Ordered, Prepared
from zbc.compiler.partition.tailor import Tailor
from zbc.compiler.schedules import BUDGET, SCHEDULES, Schedule
from zbc.compiler.search.ladder import LARGE
from zbc.errors import ZbcError
from zbc.job.spec import Job

# Searched schedules in the order in which they are asked: of equally good ones the first is taken.
SEARCHED = ("zb-auto", "v-auto", "looped-zb", "1f1b-v", "zb-v", "v-half", "v-min", "chimera-zb", "bitpipe-zb")
CHUNKS = {"looped-zb": (2, 3, 4)}  # stages per rank worth trying where the job leaves them open
# Of the usual budget, to the most promising ones, where none was asked for; finding cuts as well takes some of it.
DEFAULT, DEFAULT_WITH_CUTS = (0.6, 0.2), (0.25, 0.1)
BRIEF = 0.02  # seconds for two pipes under each smaller limit: all of a budget within which more memory is never worse
FIRST = 3  # cuts of each schedule that are tried where no budget was asked for
WALKED = 2  # schedules whose cuts are walked where no budget was asked for
INF = float("inf")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A schedule that takes part, what it was first planned with and ms of these steps, and of the best of them."""

    tailor: Tailor
    plans: tuple[tuple[float, Prepared], ...]
    step: float

    @property
    def case(self) -> Case:
        return self.tailor.case


def best_of_all(job: Job, table: Sequence[estimate.Layer], budget: float | None = None) -> Ordered:
    """The best order; each search takes `budget` seconds (None: the usual budget for the most promising together).

    Raises E1xx (impossible as asked) or E303 (memory_limit below what any order needs).
    """
    best = Best(job)
    entries: list[_Entry] = []
    for schedule, chunks in _entrants(job):
        try:
            case = Case(job, table, schedule, chunks)
        except ZbcError as error:
            best.refuse(error, INF)
            continue
        entry = _first(best, Tailor(case), entries, budget)
        entries += [] if entry is None else [entry]
    entries.sort(key=lambda entry: entry.step)
    if budget is None:
        _usual(best, entries)
    else:
        for entry in entries:
            _asked(best, entry, budget)
    if not best.found:
        for entry in entries:
            if entry.case.schedule.searched:
                entry.tailor.offer_least(best)
    return best.answer()


def _first(best: Best, tailor: Tailor, entries: Sequence[_Entry], budget: float | None) -> _Entry | None:
    """Offers what a schedule makes of the cuts that are always planned; of searched ones, as the fast tier finds it."""
    case = tailor.case
    if tailor.least_step(best.job) >= best.step:
        return None
    if not case.schedule.searched:
        return _Entry(tailor, (), tailor.by_hand(best))
    cuts = tailor.searchable()
    if not cuts:
        tailor.offer_least(best)
    left = [one for one in map(case.prepared, cuts) if not best.rules_out(one)]
    if budget is None:
        left = sorted(left, key=lambda one: one.least_step)[:FIRST]
    others = [other for entry in entries for _, other in entry.plans]
    if all(any(_alike(one, other) for other in others) for one in left):
        return None
    if budget == 0 and not case.two_pipes:  # all there is to it comes in the second pass
        return _Entry(tailor, tuple((INF, one) for one in left), float(len(entries)))
    plans = tuple((_offered(best, one, 0.0), one) for one in left)
    return _Entry(tailor, plans, min(step for step, _ in plans))


def _offered(best: Best, prepared: Prepared, seconds: float) -> float:
    """Offers a plan, of two pipes without a limit also with room for everything; ms of the first."""
    two_pipes = len(prepared.placement.pipes) > 1
    step = best.offer(prepared.make(seconds, compiled=not two_pipes))
    widest = prepared.widest()
    if widest is not prepared:
        best.offer(widest.make(seconds))
    return step


def _usual(best: Best, entries: Sequence[_Entry]) -> None:
    """Walks among the cuts of the most promising schedules, then searches for the most promising plans."""
    found: list[tuple[float, Prepared]] = []
    for place, entry in enumerate(entries):
        walked = place < WALKED and entry.case.free
        if not entry.case.schedule.searched:
            if walked:
                entry.tailor.walk_by_hand(best, None)
            continue
        found += entry.plans
        fresh = [one for one, _ in entry.tailor.plans(None)] if walked else []
        known = [one for _, one in entry.plans]
        found += [
            (best.offer(one.make(0.0, compiled=True)), one)
            for one in fresh
            if not any(_alike(one, other) for other in known) and not best.rules_out(one)
        ]
    found.sort(key=lambda pair: pair[0])
    shares = DEFAULT_WITH_CUTS if any(entry.case.free for entry in entries) else DEFAULT
    for (_, prepared), share in zip(found, shares, strict=False):
        if not best.rules_out(prepared):
            best.offer(prepared.make(BUDGET * share, compiled=True, rungs=0.0, beat=best.step))


def _asked(best: Best, entry: _Entry, budget: float) -> None:
    """Offers what a schedule by name would be with that budget, and what it is under smaller limits."""
    if entry.tailor.least_step(best.job) >= best.step:
        return
    if not entry.case.schedule.searched:
        entry.tailor.walk_by_hand(best, budget)
        return
    for prepared, seconds in entry.tailor.plans(budget):
        if best.rules_out(prepared):
            continue
        if not entry.case.two_pipes:
            best.offer(prepared.make(seconds, compiled=True, rungs=seconds, beat=best.step))
            continue
        fresh = not any(_alike(prepared, other) for _, other in entry.plans)  # found by a walk
        if fresh or seconds:
            _offered(best, prepared, seconds)
        if not fresh:
            _lowered(best, prepared.widest(), min(seconds, BRIEF))


def _lowered(best: Best, prepared: Prepared, seconds: float) -> None:
    """Offers two pipes under each smaller limit, for so many seconds each; large ones under their own limit alone."""
    size = 3 * prepared.placement.stages * prepared.job.schedule.microbatches
    for smaller in prepared.smaller() if size <= LARGE else ():
        if best.rules_out(smaller):
            return
        best.offer(smaller.make(seconds))


def _entrants(job: Job) -> Iterator[tuple[Schedule, int | None]]:
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


def _alike(one: Prepared, other: Prepared) -> bool:
    """Whether two searched schedules look for the same orders under the same limit."""
    same = one.placement == other.placement and one.limits == other.limits
    same = same and one.stages == other.stages and one.again == other.again
    return same and one.schedule.splits_backward == other.schedule.splits_backward
