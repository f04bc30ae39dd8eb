"""Finds the best order of a job: over activation policies, partitions and recompute, for one schedule or for all.

1. Looks: every variant is planned from each starting partition, a searched order by the fast part of its search;
   variants with the least lower bound first, and none whose bound is not below the best step.
2. Moves: from the best variants to a better neighbour while there is one; first into the limit, of schedules that
   would be faster and do not fit.
3. The budget goes to the best looking searched orders, of one case also to that from which its moves began.

All of it is scored by the step of the complete plan. The looks of a larger budget begin with those of a smaller one; a
small one has no other moves, so that with more memory, which lets more variants fit, it is hardly ever worse.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from zbc.compiler.partition.moving import planned as moving
from zbc.compiler.partition.setup import Choice, Ordered
from zbc.compiler.passes.offload import TooTight, enough
from zbc.compiler.planner.best import BOTH, INF, SAME, Best, activations
from zbc.compiler.planner.case import Case
from zbc.compiler.schedules import SCHEDULES, ScheduleCard
from zbc.errors import ZbcError
from zbc.job.spec import Job

# Searched schedules in the order of evaluation: of equally good ones the first is taken.
SEARCHED = ("zb-auto", "v-auto", "looped-zb", "1f1b-v", "zb-v", "v-half", "v-min", "chimera-zb", "bitpipe-zb")
CHUNKS = {"looped-zb": (2, 3, 4)}  # stages per rank worth trying if the job leaves them open
WOVEN: dict[str, Any] = {"early": 1, "overlap": True}
SMALL_BUDGET = 0.02  # seconds up to which there are no moves
FULL = 3  # starts of a case whose orders are all evaluated, until some fit
MANY = 4  # cases beyond which it pays to load compiled kernels
IMPROVED, SHARES = 2, (0.75, 0.25)  # variants that are moved; shares of the budget for the best looking searched orders
MOVES, OPS = 400, 2_000_000  # variants for moves at most, and ops in all of them
SEARCHING, WEAVING, STEPPING = 8, 3, 8  # factors on the ops: of a search, a shared vocabulary, and several steps
RATE, LOOK, LAYER, PIPES = 100_000, 100, 10, 5  # ops in a second of a budget, of a look, of a layer; for two pipes
MOVED, LEAST_SECONDS = 0.25, 0.25  # share of a budget beside searches, and seconds, for the moves of each variant
LEAST, LEAST_OPS = 400, 200_000  # looks for the least memory, and ops in all of those at orders made by hand

Score = tuple[float, float]


def entrants(job: Job) -> Iterator[tuple[ScheduleCard, int | None]]:
    """Yields every schedule with the chunks worth trying; hand-made ones last, when most of them can be ruled out."""
    asked = job.schedule.chunks
    for name in (*SEARCHED, *(name for name, card in SCHEDULES.items() if not card.searched)):
        card = SCHEDULES[name]
        for chunks in (
            CHUNKS.get(name, (card.default_chunks if card.searched else asked,)) if asked is None else (asked,)
        ):
            if card.allows(chunks):
                yield card, chunks


def woven(job: Job, card: ScheduleCard) -> Iterator[Job]:
    """Yields the job with one more forward in the warm-up, so that pairs become overlap groups that hide exchanges
    inside of ops, if it has exchanges and leaves these options open."""
    exchanges, asked = max(job.parallel.tp, job.parallel.ep) > 1, job.schedule
    if exchanges and {*WOVEN} <= {*card.options} and asked.early is None and asked.overlap is None:
        yield replace(job, schedule=asked.model_copy(update=WOVEN))


def planned(job: Job, cards: Sequence[tuple[ScheduleCard, int | None]], budget: float | None = None) -> Ordered:
    """The best order among these schedules; searches take about `budget` seconds in all (None: the schedule's default).
    Raises E1xx (impossible as requested) or E303 (memory_limit below the need of any order)."""
    best, cases = looked(job, cards)
    if best.ordered is None:
        _least_memory(best, cases)
    else:
        for k, (case, choice) in enumerate(best.too_large_ones()):
            if k < IMPROVED or case.card.searched:
                _into_the_limit(best, case, choice)
    spent, begun = 0.0, best.ranked()
    if budget is None or budget > SMALL_BUDGET:
        share = MOVED if any(case.card.searched for case in cases) else 1 / IMPROVED
        seconds = INF if budget is None else max(budget * share, LEAST_SECONDS)
        spent = sum(_improve(best, case, choice, seconds) for case, choice in begun[:IMPROVED] if case.free)
    _search(best, begun, budget if budget is None else max(budget - spent, budget * (1 - IMPROVED * MOVED)))
    try:
        return best.answer()
    except TooTight as error:
        raise _with_recompute(error, cases) from None


def faster(job: Job, names: Container[str], step: float) -> list[str]:
    """Those of these schedules that take less than `step` ms by looks only, the fastest first."""
    best, cases = Best(job), list[Case]()
    best.step, best.compiled = step, True
    asked = job.schedule.chunks
    for name, card in SCHEDULES.items():
        if name in names and card.allows(asked):
            with suppress(ZbcError):
                cases += _cases(best, [(card, card.default_chunks if asked is None and card.searched else asked)])
    for case in sorted(cases, key=_promise):
        _look(best, case)
    return [*dict.fromkeys(case.card.name for case, _ in best.ranked(step))]


def looked(job: Job, cards: Sequence[tuple[ScheduleCard, int | None]]) -> tuple[Best, list[Case]]:
    """The best order found by looks only, if any fits, and all cases. Raises E1xx as `planned`."""
    best = Best(job)
    cases = list(_cases(best, cards))
    best.compiled = len(cards) > 1 or len(cases) > MANY
    for case in cases:
        _look(best, case)
    return best, cases


def _cases(best: Best, cards: Sequence[tuple[ScheduleCard, int | None]]) -> Iterator[Case]:
    """Yields the cases to look at, least bound first. Raises the error if the only schedule is impossible."""
    cases, job = list[Case](), best.job
    for card, chunks in cards:
        for variant in (job, *woven(job, card)) if len(cards) > 1 else (job,):
            try:
                bare = Case(variant, card, chunks, roomy=len(cards) > 1)
                for memory in activations(variant, bare):
                    cases.append(bare if memory is job.memory else bare.with_memory(memory))
            except ZbcError as error:
                if len(cards) == 1:
                    raise
                best.refuse(error)
    return iter(sorted(cases, key=_promise))


def _promise(case: Case) -> tuple[bool, float]:
    """Searched schedules first, those with the least bound before others."""
    return not case.card.searched, case.least_step


def _look(best: Best, case: Case) -> None:
    """Looks at a case from all its starts, then at all orders of the best one; for searched schedules only at starts
    that may fit, as a search finds nothing for others."""
    if case.least_step >= best.step * (1 - SAME):
        return
    scores = dict[Choice, Score]()
    for choice in (one for one in case.starts if not best.rules_out(case, case.least(one))):
        if case.may_fit(choice):
            scores[choice] = best.look(case, choice, quick=True)
        else:
            best.too_large(case, choice)
    _fewest(best, case, scores)
    for choice in sorted(scores, key=lambda choice: case.rank(scores[choice]))[: FULL if case.rough else 0]:
        if not best.look(case, choice)[0]:
            break


def _fewest(best: Best, case: Case, scores: Mapping[Choice, Score]) -> None:
    """Bisects for the fewest recomputing stages, counted from the first, between the counts of the starts."""
    few, most, counts = 0, len(case.optional), {case.even(frozenset(case.optional[:n])): n for n in case.counts}
    for choice in case.starts:
        if (count := counts.get(choice)) is not None:
            fits = choice in scores and not scores[choice][0]
            few, most = (few, min(most, count)) if fits else (max(few, count + 1), most)
    while few < most:
        middle = (few + most) // 2
        choice = case.even(frozenset(case.optional[:middle]))
        slow = best.rules_out(case, case.least(choice))
        over = INF if slow or case.short(choice) else best.look(case, choice, quick=True)[0]
        few, most = (middle + 1, most) if over else (few, middle)


def _least_memory(best: Best, cases: Sequence[Case]) -> None:
    """Looks at the variants with the least memory, or records why even these are impossible: for each searched schedule
    by the least memory of any order, for hand-made ones starting from the variant that exceeds its limit least."""
    for case in cases:
        if case.free and case.card.searched:
            _into_the_limit(best, case, min(case.starts, key=case.missing))
    nearest = best.nearest()
    if best.ordered is None and nearest is not None:
        _into_the_limit(best, *nearest)


def _into_the_limit(best: Best, case: Case, choice: Choice) -> None:
    """Moves layers and recompute of an order that is too large: made by hand, until it fits; searched, to the least
    memory of any order, which it looks at or records as impossible."""
    if case.card.searched and case.free:
        if not case.hopeless:
            start = min(case.below(INF, LEAST) or case.starts, key=case.missing)
            choice = _climbed(case, start, case.missing, LEAST)
        try:
            case.setup(choice)
        except ZbcError as error:
            best.refuse_for(case, choice, error)
        else:
            best.look(case, choice)
    elif case.free and not case.hopeless:
        most = min(LEAST, LEAST_OPS // case.size)
        _climbed(case, choice, lambda near: best.look(case, near, quick=True), most, fullest=best.fullest)


def _improve(best: Best, case: Case, choice: Choice, seconds: float) -> float:
    """Moves layers and recompute, starting from the best looking choice; looks at all choices if they are few. Returns
    the seconds that its looks count for in a budget, at most about `seconds`."""
    price = case.size * (SEARCHING if case.card.searched else 1) * (WEAVING if case.job.vocabulary else 1)
    price *= STEPPING if case.job.steady else 1
    pipes = PIPES if case.card.searched and case.two_pipes else 1
    took = (LOOK + LAYER * len(case.table) + price * pipes) / RATE
    most, before = int(min(max(2, min(MOVES, OPS // price)), seconds / took)), best.looks
    if not most:
        return 0.0
    best.compiled = True
    every = case.below(best.step, most)
    if every is None:
        _climbed(case, choice, lambda option: best.look(case, option, quick=True), most)
    for option in every or ():
        best.look(case, option, quick=True)
    best.all_looked = every is not None and not case.card.searched
    best.look(case, dict(best.ranked())[case])
    return took * (best.looks - before)


def _climbed(
    case: Case,
    at: Choice,
    score: Callable[[Choice], Score],
    most: int,
    fullest: Mapping[Choice, int] = MappingProxyType({}),
) -> Choice:
    """The best choice found from here: a better neighbour as long as there is one. At most `most` choices are scored.
    A `fullest` rank has to give something."""
    scores = {at: score(at)}
    now, better = scores[at], True
    while better and len(scores) < most and any(now):
        better = False
        for near in case.neighbours(at, fullest.get(at)):
            if near not in scores:
                scores[near] = score(near)
                if len(scores) >= most:
                    break
            if _less(scores[near], now):
                at, now, better = near, scores[near], True
                break
    return at


def _less(one: Score, other: Score) -> bool:
    """Whether a score exceeds the limits less, or equally with a shorter step."""
    return one[0] < other[0] - SAME or (one[0] <= other[0] + SAME and one[1] < other[1] * (1 - SAME))


def _search(best: Best, begun: Sequence[tuple[Case, Choice]], budget: float | None) -> None:
    """Spends the budget on the best looking searched orders; of one case, also on the one from which its moves have
    `begun`, which may look worse and be better. All of it on one if there is only one."""
    ranked = best.ranked()
    every = ranked if len(ranked) > 1 else dict.fromkeys([*ranked, *begun])
    pairs = [(case, choice) for case, choice in every if case.card.searched]
    for share, (case, choice) in zip(SHARES if len(pairs) > 1 else (1.0,), pairs, strict=False):
        seconds = (case.card.budget if budget is None else budget) * share
        if seconds and case.least_step < best.step * (1 - SAME):
            best.look(case, choice, seconds)


def _with_recompute(error: TooTight, cases: Sequence[Case]) -> ZbcError:
    """The error with the limit that would suffice if stages recomputed as well, if that is less."""
    case, hint = cases[0], error.hint
    both = {str(s): BOTH if case.job.memory.offloads(s) else case.job.memory.of(s) for s in range(case.stages)}
    variant = case.with_memory(case.job.memory.model_copy(update={"activations": both}))
    try:
        moving(variant.setup(variant.start), 0.0)
        hint = f'{hint}; memory.activations = "{BOTH}" fits as it is'
    except TooTight as tight:
        if tight.least < error.least:
            hint = f'{hint}, with memory.activations = "{BOTH}" {enough(tight.least)}'
    except ZbcError:
        pass
    return ZbcError(error.code, error.message, hint=hint)
