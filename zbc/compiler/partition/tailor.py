"""Cut, recompute and order of one schedule together: what `plan` answers for a schedule by name, and `auto` for each.

Some cuts are always planned: the one whose ranks are even in time, the uniform one, those even in memory, and in both.
With more than no budget, a walk among cuts (walk.py) asks an oracle (oracles.py) for better ones. Orders made by hand
are timed for each cut, so the answer of a walk is their plan. For searched orders it is one more cut to search an order
for, with a share of the budget. How long a walk is and what a cut gets depend on the budget in steps, and what is
walked and searched with less of it is the beginning of what is with more: so more budget is never worse.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from operator import add

from zbc.compiler.cost import estimate
from zbc.compiler.partition.balance import Weights, even
from zbc.compiler.partition.best import Best
from zbc.compiler.partition.cuts import Cut, of_stages
from zbc.compiler.partition.judging import Case
from zbc.compiler.partition.limits import smallest
from zbc.compiler.partition.oracles import Oracle, Recipes, Remade, reduced
from zbc.compiler.partition.partition import uniform
from zbc.compiler.partition.single import Ordered, Prepared
from zbc.compiler.partition.walk import Judged, Walk
from zbc.compiler.schedules.searched import OWN_LIMIT
from zbc.compiler.search.engine import Engine, available
from zbc.compiler.search.ladder import ENOUGH
from zbc.compiler.search.portfolio import Effort
from zbc.errors import ZbcError
from zbc.ir import Placement
from zbc.job.spec import Job

RATE = 1_500_000  # op visits of a walk per second, in plain Python
USUAL, MOST = 0.6, 2.0  # seconds of a walk where no budget was asked for, and at most
INF = float("inf")
LEAST = 400_000  # op visits of a walk towards the least memory
WEIGHED = 64  # cuts whose memory is asked for to the byte where none fits
SMALL = 4000  # ops up to which cuts that are even in memory are always planned
STATE = 16.0  # bytes that stay with a parameter: weight, gradient and two moments
# Budgets from which on a searched schedule has cuts walked for: op visits of the search, of them those of the walk, and
# the share of the search that the walk's answer gets. What is left is for the cut that is even in time.
LEVELS = ((2_000_001, 1_000_000, 0.25), (20_000_000, 4_000_000, 0.15), (200_000_000, 40_000_000, 0.1))


class Tailor:
    """Plans one schedule with the cuts that suit it."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @cached_property
    def known(self) -> list[Cut]:
        """Cuts even in time, in blocks, in memory, and in time and memory; and recompute from the first stage to all.

        None of them depends on how large a limit is, so with more memory there are never fewer that fit.
        """
        case = self.case
        cuts = [case.first]
        spread = uniform(case.table, case.placement.stages)
        if case.open and all(spread):
            cuts.append(of_stages(spread))
        size = 3 * case.placement.stages * case.job.schedule.microbatches
        if case.open and (case.limited or size <= SMALL):
            cuts += self._even_in_memory()
        count = 1
        while case.flags and count < 2 * len(case.flags):
            cuts.append(case.spread(frozenset(case.flags[:count])))
            count *= 2
        return list(dict.fromkeys(cuts))

    def _even_in_memory(self) -> Iterator[Cut]:
        """By what layers keep for a microbatch, on a device also by what stays with them; and mixed with their time."""
        case = self.case
        given = estimate.given_activations(case.job, list(case.table))
        kept = [layer.size.act_b for layer in case.table] if given is None else [act_b for act_b, _ in given]
        several = [([[count * size for size in kept] for count in flight], exact) for flight, exact in self._flights()]
        if case.job.hardware.memory_gib is not None:
            state = [STATE * layer.params for layer in case.table]
            several += [([list(map(add, row, state)) for row in memory], exact) for memory, exact in several]
        times = case.times(frozenset())
        for memory, exact in several:
            if any(map(any, memory)):
                yield Cut(tuple(even(memory, case.placement, exact=exact)))  # for a guess the last layer does not count
                yield Cut(tuple(even(_mixed(times, memory), case.placement, exact=False)))
                if case.two_pipes and case.schedule.searched:  # one microbatch alone is in one of them
                    yield Cut(tuple(even(memory, Placement(case.placement.pipes[:1]))))

    def _flights(self) -> list[tuple[list[int], bool]]:
        """Microbatches each stage holds at most, and whether that is exact or a guess.

        In the order if it is known beforehand; else one, which no order goes below, and as with 1F1B, which is a guess.
        """
        case = self.case
        stages, m = case.placement.stages, case.job.schedule.microbatches
        if case.schedule.searched:
            return [([1] * stages, True), ([min(stages - s, m) for s in range(stages)], False)]
        flight = [1] * stages
        for rank in case.order.held:
            for one in rank:
                for stage, counts in one:
                    flight[stage] = max(flight[stage], *counts)
        return [(flight, True)]

    def least_step(self, job: Job) -> float:
        """ms that no order of any cut can beat: the work of a rank that has its share of the whole."""
        case = self.case
        if not case.open:
            return 0.0  # the bound of the one cut there is knows better
        tables = [case.times(frozenset(), split=split) for split in {False, case.split}]  # some orders have both
        shares = [min(row) for row in zip(*chain(*tables), strict=True)]
        share: float = sum(shares) / case.placement.ranks * (1 - job.costs.overlap)
        return job.schedule.microbatches * share * (1 - 1e-9)

    def by_hand(self, best: Best) -> float:
        """Offer the plans of a schedule whose order is known beforehand; ms of the best that does not fall out."""
        least = INF
        for cut in self.known:
            prepared = self.case.prepared(cut)
            if not best.rules_out(prepared):
                least = min(least, best.offer(prepared.make(0.0)))
        return least

    def walk_by_hand(self, best: Best, budget: float | None) -> None:
        """Offer what a walk among its cuts finds. That depends on the limit: not with a budget that is exact in it."""
        if not self.case.free or (budget is not None and _visits(budget) <= ENOUGH):
            return
        case = self.case
        found = Walk(case.ground(Remade(case.prepared(case.first)) if case.schedule.fitted else case.order))
        found.run(self.known, int(RATE * (USUAL if budget is None else min(budget, MOST))))
        if found.best is not None:
            best.offer(case.prepared(found.best.cut).make(0.0))
            best.note(case.schedule, found.tried, all_tried=found.all_tried)
        # Cuts that are too large were weighed without what is on its way, which is more with some than with others.
        for judged in found.least_over()[:WEIGHED]:
            if judged.over >= best.over:
                break
            best.offer(case.prepared(judged.cut).make(0.0))

    def searchable(self) -> list[Cut]:
        """What a searched schedule is planned with by any budget; nothing where no cut fits."""
        cuts = [cut for cut in self.known if not self.case.short(cut)]
        return cuts or ([] if self.least.over else [self.least.cut])

    @cached_property
    def least(self) -> Judged:
        """The cut with which a searched schedule needs the least memory."""
        found = Walk(self.case.memory_ground())
        found.run(self.known, LEAST)
        return found.best or Judged(0.0, 0.0, self.case.first)

    def offer_least(self, best: Best) -> None:
        """Offer a plan for the cut that needs the least memory, or tell `best` why even that cannot be."""
        case, cut = self.case, self.least.cut
        try:
            best.offer(case.prepared(cut).make(0.0))
        except ZbcError as error:
            own = case.schedule.name in OWN_LIMIT
            best.refuse(error, INF if own else smallest(case.job, case.placement, case.costs(cut), split=case.split))

    def plans(self, budget: float | None) -> Iterator[tuple[Prepared, float]]:
        """For searched schedules: what to search, and for how many seconds. Nothing where no cut fits."""
        case = self.case
        seconds = case.schedule.budget if budget is None else budget
        cuts = self.searchable()
        if not case.free or not cuts:
            yield from ((case.prepared(cut), seconds) for cut in cuts)
            return
        # Which cuts fit, and which of them comes first, depends on the limit. A small budget gives as much to each, and
        # what that is does not depend on how many fit, as exactness in the limit needs.
        first = 1 - sum(share for _, _, share in LEVELS)
        enough = Effort.lasting(ENOUGH, Engine(available() and seconds > 0))
        each = min(seconds, enough) * min(first, 1 / len(self.known))
        left = seconds - (len(self.known) - 1) * each
        given = dict.fromkeys(cuts, each)
        if seconds > enough:
            given[cuts[0]] = max(each, min(seconds * first, left))
        left -= given[cuts[0]]
        for cut, share in self._walked(cuts[0], budget, seconds):
            more = min(seconds * share, left)
            given[cut] = given.get(cut, 0.0) + more
            left -= more
        yield from ((case.prepared(cut), amount) for cut, amount in given.items())

    def _walked(self, start: Cut, budget: float | None, seconds: float) -> Iterator[tuple[Cut, float]]:
        """The answers of walks with the shares of their levels."""
        if budget == 0:
            return
        engine = Engine(available() and seconds > 0)
        levels = LEVELS if budget is None else [level for level in LEVELS if _visits(seconds) >= level[0]]
        if not levels:
            return
        oracle = self._oracle(start, engine)
        for _, walk, share in [(0, int(USUAL * RATE), 1.0)] if budget is None else levels:
            found = Walk(self.case.ground(oracle))
            found.run([start, *self.known], walk)
            # Of few microbatches no order may have been found for what fits, so that what does not is all that is left.
            fits = found.best is not None and not found.best.over
            yield found.best.cut if found.best is not None and fits else start, share if budget is not None else 0.5

    def _oracle(self, start: Cut, engine: Engine) -> Oracle:
        if len(self.case.placement.pipes) > 1:
            return self.case.order_for(start)
        return Recipes(self.case.prepared(start), reduced(self.case.job).schedule.microbatches, engine)


def best_cut(case: Case, budget: float | None) -> Ordered:
    """The best order of one schedule over its cuts. Raises E303 where nothing keeps to the limit."""
    if not case.free:
        return case.prepared(case.first).make(budget)
    best, tailor = Best(case.job), Tailor(case)
    if case.schedule.searched:
        for prepared, seconds in tailor.plans(budget):
            if not best.rules_out(prepared):
                best.offer(prepared.make(seconds))
        if not best.found:
            tailor.offer_least(best)
    else:
        tailor.by_hand(best)
        tailor.walk_by_hand(best, budget)
    return best.answer()


def _visits(seconds: float) -> int:
    """Op visits of a search that takes so long."""
    return Effort.seconds(seconds, Engine(available() and seconds > 0)).visits


def _mixed(times: Weights, memory: Weights) -> list[list[float]]:
    """Time and memory, each by its share of the whole."""
    whole = [sum(map(sum, table)) or 1.0 for table in (times, memory)]
    return [
        [a / whole[0] + b / whole[1] for a, b in zip(*rows, strict=True)] for rows in zip(times, memory, strict=True)
    ]
