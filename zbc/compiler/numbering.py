"""schedule.tokens: the order of unequal microbatches in a step.

The order of ops for microbatches of equal length is a candidate for unequal ones, too, so a plan is never slower than
that. If the job allows new numbers (`schedule.renumber`), each order of ops is tried with the microbatches as given,
sorted, long and short in turn, and long ones in the middle or at both ends; from the best of these, pairs change places
as long as the step gets shorter. Finally the ops are ordered again for the best numbers.

`auto` does this for each schedule that is near the best one before it: with other numbers another one may be best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

from zbc.compiler.partition.limits import limits_of
from zbc.compiler.partition.setup import Ordered, over_of
from zbc.compiler.report.report import Facts, told
from zbc.compiler.seating import seated
from zbc.errors import ZbcError
from zbc.job.spec import Job

_OPS, _LEAST, _MOST = 2_000_000, 40, 2000  # ops that are simulated for numbers, and tries at least and at most
_BETTER = 1 - 1e-9
NEAR = 1.1  # times the best step, within which a schedule gets numbers of its own
INF = float("inf")

Numbers = tuple[int, ...]  # microbatch -> which of the given ones it is
Score = tuple[float, float]  # the share by which an order is too large, and ms of its step
_Numbered = tuple[Score, Job, Ordered, Facts]  # with tokens of rows as numbered and as given, and ms of a step


def numbered(job: Job, budget: float | None) -> tuple[Job, Ordered, Facts | None]:
    """The job with its microbatches numbered and its ranks ordered, its order of ops, and a report on unequal
    microbatches. Raises like `order`."""
    if not job.tokens:
        return *seated(job, budget), None
    chosen, found = _numbered(job, budget)
    for rival in _rivals(job, found):
        with suppress(ZbcError):
            chosen = min(chosen, _numbered(rival, budget)[0], key=lambda one: one[0])
    _, numbered, order, report = chosen
    unnamed = {key: getattr(job.schedule, key) for key in ("kind", "chunks")}
    return replace(numbered, schedule=numbered.schedule.model_copy(update=unnamed)), order, report


def _rivals(job: Job, found: Sequence[Ordered]) -> Iterator[Job]:
    """Yields the job under each schedule whose step is near the best one before microbatches are numbered, for given or
    equal lengths, the nearest first."""
    near = dict[tuple[str, int], float]()
    for order in found:
        for name, chunks, share in order.rivals:
            near[name, chunks] = min(near.get((name, chunks), INF), share)
    for (name, chunks), share in sorted(near.items(), key=lambda entry: entry[1]):
        if share <= NEAR and len(near) > 1:
            yield replace(job, schedule=job.schedule.model_copy(update={"kind": name, "chunks": chunks}))


def _numbered(job: Job, budget: float | None) -> tuple[_Numbered, Sequence[Ordered]]:
    """Also the orders to begin with. Raises like `order`."""
    found, failed = list[Ordered](), None
    try:
        job, given = seated(job, budget)
        found.append(given)
    except ZbcError as error:  # in other orders ranks may gather weights in turns that never end
        failed = error
    alike = _alike(job, budget)
    found += [] if alike is None else [alike]
    if not found and failed is not None:
        raise failed
    as_given = [one.step_ms(job) for one in found]
    chosen, best = job, min(found, key=lambda order: _score(job, order))
    if job.schedule.renumber:
        every = [_renumbered(job, one) for one in found]
        numbers, best = min(every, key=lambda pair: _score(job, pair[1]))
        chosen = job.with_tokens([job.tokens[k] for k in numbers])
        if numbers != tuple(range(len(numbers))):
            best = _again(chosen, best, budget)
    report = told(
        tokens=chosen.tokens,
        given=job.tokens,
        ms=best.step_ms(chosen),
        given_ms=as_given[0],  # with the given numbers
        alike_ms=as_given[-1] if alike is not None else None,  # with these, in the order for equal lengths, if it fits
    )
    return (_score(chosen, best), chosen, best, report), found


def _score(job: Job, order: Ordered) -> Score:
    return over_of(job, order), order.step_ms(job)


def _again(job: Job, best: Ordered, budget: float | None) -> Ordered:
    """The order for the new numbers, if there is one and it is better than the one that they were found for."""
    try:
        _, found = seated(job, budget)
    except ZbcError:
        return best
    over, ms = _score(job, found)
    return found if (over, ms / _BETTER) < _score(job, best) else best


def _alike(job: Job, budget: float | None) -> Ordered | None:
    """The order of the job with whole rows, at the costs of its unequal ones; None if no such order fits."""
    even = job.with_tokens(())
    try:
        made = seated(even, budget)[1].repriced(job)
    except ZbcError:
        return None
    return made if _fits(job, made) else None


def _fits(job: Job, found: Ordered) -> bool:
    most = limits_of(job, found.name, found.costs).activation_units  # as the name of a schedule may imply one
    return not over_of(job, found) and (most is None or max(rank.units for rank in found.memory) <= most + 1e-6)


def _renumbered(job: Job, found: Ordered) -> tuple[Numbers, Ordered]:
    """The numbers that give an order its shortest step that fits, found by local search."""
    lengths, fits, best, least = job.tokens, _fits(job, found), found, found.step_ms(job)
    numbers, asked = tuple(range(len(lengths))), {tuple(lengths)}
    tries = max(_LEAST, min(_MOST, _OPS // max(1, found.program.size)))

    def better(other: Numbers) -> bool:
        """Makes `other` the best numbers if they are better; returns whether they were."""
        nonlocal numbers, best, least
        now = tuple(lengths[k] for k in other)
        if now in asked:
            return False
        asked.add(now)
        costs = found.costs.renumbered(other)
        if found.judged.priced(costs).step_ms(job.objective) >= least * _BETTER:
            return False
        one = replace(found, costs=costs)
        ms = one.step_ms(job)
        if ms >= least * _BETTER or (fits and not _fits(job, one)):
            return False
        numbers, best, least = other, one, ms
        return True

    for other in _starts(lengths):
        better(other)
    going = True
    while going and len(asked) <= tries:
        going = False
        for i, j in combinations(range(len(lengths)), 2):
            swapped = list(numbers)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            going = better(tuple(swapped)) or going
            if len(asked) > tries:
                break
    return numbers, best


def _starts(lengths: Sequence[int]) -> Iterator[Numbers]:
    """Start points of the search, other than the given numbers."""
    short = sorted(range(len(lengths)), key=lambda k: (lengths[k], k))
    long = short[::-1]
    yield tuple(long)
    yield tuple(short)
    for first, other in ((long, short), (short, long)):
        turns = [k for pair in zip(first, other, strict=True) for k in pair]
        yield tuple(dict.fromkeys(turns))
        yield (*first[::2], *first[1::2][::-1])  # the first of `first` at both ends
