"""`auto`: the best order over all schedules, placements and smaller limits that fit.

Every schedule keeps to the limit by itself, so what `auto` answers is no worse than what any of them answers with the
same budget; and what it answers for a smaller limit or budget is among what it considers (search/ladder.py). Left out
is only what a lower bound rules out. So a budget is that of each search, and `auto` takes a few times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbc.compiler import estimate
from zbc.compiler.check.memory import check_memory
from zbc.compiler.limits import smallest
from zbc.compiler.memory import peaks
from zbc.compiler.passes import lower
from zbc.compiler.schedules import BUDGET, SCHEDULES, Schedule
from zbc.compiler.schedules.searched import OWN_LIMIT
from zbc.compiler.single import Ordered, Prepared, cut, prepare
from zbc.errors import ZbcError
from zbc.spec import Job

# Searched schedules in the order in which they are asked: of equally good ones the first is taken.
SEARCHED = ("zb-auto", "v-auto", "looped-zb", "1f1b-v", "zb-v", "v-half", "v-min", "chimera-zb", "bitpipe-zb")
CHUNKS = {"looped-zb": (2, 3, 4)}  # stages per rank worth trying where the job leaves them open
DEFAULT = (0.6, 0.2)  # of the usual budget, to the most promising ones, where none was asked for
BRIEF = 0.02  # seconds for two pipes under each smaller limit: all of a budget within which more memory is never worse
SAME = 1e-12


def best_of_all(job: Job, table: Sequence[estimate.Layer], budget: float | None = None) -> Ordered:
    """The best order; each search takes `budget` seconds (None: the usual budget for the most promising together).

    Raises E1xx (impossible as asked) or E303 (memory_limit below what any order needs).
    """
    best = _Best(job)
    promising = _first_pass(best, table, budget)
    promising.sort(key=lambda entry: entry[0])
    for place, (_, prepared) in enumerate(promising):
        if not best.rules_out(prepared):
            seconds = BUDGET * DEFAULT[place] if budget is None and place < len(DEFAULT) else budget or 0.0
            best.offer(prepared.make(seconds, compiled=True, rungs=budget or 0.0, beat=best.step))
    return best.answer()


def _first_pass(best: _Best, table: Sequence[estimate.Layer], budget: float | None) -> list[tuple[float, Prepared]]:
    """Offers schedules by hand, and searched ones as the fast tier finds them; returns the latter with their steps."""
    found: list[tuple[float, Prepared]] = []
    for schedule, chunks in _entrants(best.job):
        try:
            prepared = prepare(best.job, table, schedule, chunks)
        except ZbcError as error:
            best.refuse(error, _needed(best.job, table, schedule, chunks))
            continue
        if best.rules_out(prepared) or any(_alike(prepared, other) for _, other in found):
            continue
        if not schedule.searched or len(prepared.placement.pipes) > 1:
            best.offer(prepared.make(budget or 0.0))
            widest = prepared.widest()
            if widest is not prepared:
                best.offer(widest.make(budget or 0.0))
            for smaller in widest.smaller():
                if best.rules_out(smaller):
                    break
                best.offer(smaller.make(min(budget or 0.0, BRIEF)))
        elif budget == 0:  # all there is to it comes in the second pass
            found.append((len(found), prepared))
        else:
            found.append((best.offer(prepared.make(0.0, compiled=True)), prepared))
    return found


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
    return same and one.schedule.splits_backward == other.schedule.splits_backward


def _needed(job: Job, table: Sequence[estimate.Layer], schedule: Schedule, chunks: int | None) -> float:
    """The least limit with which the schedule works, to name the least of all; infinite if no limit helps."""
    if schedule.name in OWN_LIMIT:
        return float("inf")
    try:
        placement = schedule.placement(job.parallel.pp, schedule.stages_per_rank(chunks))
        return smallest(job, placement, cut(job, placement, table)[1], split=schedule.splits_backward)
    except ZbcError:
        return float("inf")


class _Best:
    """The best order that fits, so far; and why others do not."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.step = float("inf")
        self._ordered: Ordered | None = None
        self._too_large: Ordered | None = None
        self._refused: list[tuple[bool, float, ZbcError]] = []  # whether it is about more than memory, the least limit

    def offer(self, ordered: Ordered) -> float:
        """Keep it if it is better and fits; what its step takes, in ms."""
        step = ordered.step_ms(self.job)
        if step < self.step * (1 - SAME):
            if self._fits(ordered):
                self._ordered, self.step = ordered, step
            elif self._too_large is None:
                self._too_large = ordered
        return step

    def _fits(self, ordered: Ordered) -> bool:
        program = ordered.program
        if self.job.hardware.memory_gib is not None:  # then receive buffers count
            program = lower(program, self.job.optimizer.sync, ordered.costs)
        try:
            check_memory(self.job, peaks(program, ordered.costs), ordered.costs)
        except ZbcError:
            return False
        return True

    def rules_out(self, prepared: Prepared) -> bool:
        """Whether no order of that schedule can be better; bounds know nothing of overlap."""
        return self.job.costs.overlap == 0 and bool(prepared.least_step >= self.step * (1 - SAME))

    def refuse(self, error: ZbcError, needed: float) -> None:
        """A schedule that cannot be, and the limit from which it could."""
        self._refused.append((error.code != "E303", needed, error))

    def answer(self) -> Ordered:
        """The best. If nothing fits, raises what names the least limit, or answers with what checks will refuse."""
        if self._ordered is None and self._refused:
            limited, _, error = min(self._refused, key=lambda entry: entry[:2])
            if not limited or self._too_large is None:
                raise error
        found = self._ordered or self._too_large
        if found is None:
            raise ZbcError("E303", "schedule: no schedule can be made for this job")
        return found
