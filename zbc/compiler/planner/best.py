"""Evaluates a variant of a job with open settings: it is ordered, completed, timed and weighed as its plan would be.

Keeps the shortest step that fits, all evaluated variants, and the reasons why others are impossible.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

from zbc import excludes
from zbc.compiler.check.memory import check_host, fullest
from zbc.compiler.cost import copies
from zbc.compiler.partition.limits import smallest, unlimited
from zbc.compiler.partition.moving import places, planned
from zbc.compiler.partition.setup import (
    LARGE,
    Choice,
    Ordered,
    Setup,
    freezing_refused,
    held_in,
    limited,
    over_of,
    start_of,
)
from zbc.compiler.partition.userpass import PassFailed
from zbc.compiler.passes.offload import TooTight
from zbc.compiler.planner.case import Case
from zbc.compiler.schedules.searched import own_limit
from zbc.errors import ZbcError
from zbc.job.sections import Memory
from zbc.job.spec import Job

INF = float("inf")
SAME = 1e-12
AUTO, KEEP, SELECTIVE, RECOMPUTE, OFFLOAD = "auto", "keep", "selective", "recompute", "offload"
SPARED, BOTH = "selective+offload", "recompute+offload"


class Best:
    """The best order that fits so far, the first of equals; and the reasons why others do not fit."""

    def __init__(self, job: Job) -> None:
        self.job, self.step = job, INF
        self.ordered: Ordered | None = None
        self.looks = 0
        self.compiled = False  # whether kernels are loaded for the fast tier, too: it pays before many searches
        self.all_looked = False  # whether nothing else could be better for its schedule
        self.weighed = dict[str, float | None]()  # ms of a step by activation policy; None: does not fit
        self.fullest = dict[Choice, int]()  # the rank that exceeds a limit most, of the last order that does
        self._known = dict[tuple[Case, Choice, float, bool], tuple[float, float]]()
        self._made = dict[Hashable, tuple[float, float]]()
        self._likely = dict[Hashable, Setup]()  # of two pipes, under the limit whose order looks best
        self._too_large: tuple[float, Ordered] | None = None
        self._refused: list[tuple[bool, float, ZbcError]] = []  # whether the error is not about memory, the least limit

    def look(self, case: Case, choice: Choice, seconds: float = 0.0, *, quick: bool = False) -> tuple[float, float]:
        """The share by which a variant exceeds the limits (0: it fits), and ms of its step; both infinite if it cannot
        be better or is impossible. A `quick` look evaluates one order of a search, without those for smaller limits."""
        quick = quick and case.rough
        key = case, choice, seconds, quick
        if key not in self._known:
            self._known[key] = self._looked(case, choice, seconds, quick=quick)
        return self._known[key]

    def _looked(self, case: Case, choice: Choice, seconds: float, *, quick: bool) -> tuple[float, float]:
        name = _named(case, choice)
        try:
            if self.rules_out(case, case.least(choice)):
                return INF, INF
            setup = case.setup(choice)
            if self.rules_out(case, setup.least_step):
                return INF, INF
            self.weighed.setdefault(name, None)
            self.looks += 1
            request = case.request(setup, seconds, quick=quick)
            score = self._made.get(request, (INF, INF))
            for order in () if request in self._made else self._orders(case, setup, seconds, quick=quick):
                check_host(self.job, order.complete.program, order.costs)
                score = min(score, self._offered(case, order))
            self._made.setdefault(request, score)
        except ZbcError as error:
            self.weighed.setdefault(name, None)
            self.refuse(error, error.least if isinstance(error, TooTight) else INF)
            return INF, INF
        if not score[0]:
            self.weighed[name] = min(score[1], self.weighed[name] or INF)
        return score

    def rules_out(self, case: Case, least: float) -> bool:
        """Whether no order with this bound can be better; bounds include neither overlap nor offload copies."""
        return not case.job.costs.overlap and not case.moves and least >= self.step * (1 - SAME)

    def _orders(self, case: Case, setup: Setup, seconds: float, *, quick: bool) -> Iterator[Ordered]:
        setup = replace(setup, compiled=self.compiled and case.card.searched and not case.two_pipes)
        if quick:
            yield setup.quick(seconds)
            return
        if not case.roomy:
            yield planned(setup, seconds, beat=self.step)
            return
        # They may use all memory. The budget is for the limit whose order looks best.
        where, looks = (case, setup.stages, setup.recompute), list[tuple[tuple[float, float], Setup]]()
        for place, rung in enumerate([setup, *setup.lowered()] if where not in self._likely else []):
            if place > 1 and (case.size > LARGE or self.rules_out(case, rung.least_step)):
                break
            if not place or rung.limit.units != setup.limit.units:
                order = planned(rung, 0.0)
                looks.append(((over_of(case.job, order), order.step_ms(self.job)), rung))
                yield order
        likely = self._likely.setdefault(where, min(looks, key=lambda look: look[0])[1] if looks else setup)
        if seconds:
            yield planned(likely, seconds)

    def _offered(self, case: Case, one: Ordered) -> tuple[float, float]:
        refused, step, over = freezing_refused(self.job, one), one.step_ms(self.job), over_of(case.job, one)
        if refused is not None:
            raise refused
        one = one.told(activations=case.job.memory) if case.job.memory is not self.job.memory else one
        one = one.told(options=case.job.schedule) if case.job.schedule is not self.job.schedule else one
        if not over and step < self.step * (1 - SAME):
            self.ordered, self.step = one, step
        if over:
            choice = Choice.of(one.stages)._replace(recompute=one.recompute)
            self.fullest[choice] = fullest(case.job, held_in(case.job, one), one.costs)
        if over and (self._too_large is None or over < self._too_large[0]):
            self._too_large = over, one
        return over, step

    def ranked(self, below: float = INF) -> list[tuple[Case, Choice]]:
        """The best choice of each case that fits and takes less than `below` ms, the shortest step first."""
        chosen = dict[Case, Choice]()
        for (case, choice, *_), (over, step) in sorted(self._known.items(), key=lambda entry: entry[1]):
            if not over and step < below:
                chosen.setdefault(case, choice)
        return [*chosen.items()]

    def too_large(self, case: Case, choice: Choice) -> None:
        """Records a choice that no order can make fit, without evaluating it."""
        self.weighed.setdefault(_named(case, choice), None)

    def nearest(self) -> tuple[Case, Choice] | None:
        """The choice that exceeds the limits least, if nothing fits."""
        scores = [(*score, k, *key[:2]) for k, (key, score) in enumerate(self._known.items()) if score[0] < INF]
        return min(scores, key=lambda entry: entry[:3])[3:] if scores else None

    def too_large_ones(self) -> list[tuple[Case, Choice]]:
        """Of each schedule of which no order fits, and some are shorter than the best, the choice that exceeds the
        limits least; the shortest first."""
        found = dict[str, list[tuple[float, float, int, Case, Choice]]]()
        for k, ((case, choice, *_), (over, step)) in enumerate(self._known.items()):
            if step < INF:
                found.setdefault(case.card.name, []).append((over, step, k, case, choice))
        nearest = [(min(one[1] for one in some), *min(some, key=lambda one: one[:3])) for some in found.values()]
        promising = [one for one in nearest if one[1] and one[0] < self.step * (1 - SAME)]
        return [(case, choice) for *_, case, choice in sorted(promising, key=lambda one: one[0])]

    def refuse(self, error: ZbcError, needed: float = INF) -> None:
        """Records an impossible variant, and the limit from which it would be possible. Raises an error of a pass."""
        if isinstance(error, PassFailed):
            raise error
        self._refused.append((error.code != "E303", needed, error))

    def refuse_for(self, case: Case, choice: Choice, error: ZbcError) -> None:
        """Records the variant of a case with the least memory as impossible."""
        needed = smallest(self.job, case.placement, case.costs(choice), split=case.card.splits_backward)
        self.refuse(error, needed if own_limit(case.card.name, 1) is None else INF)

    def answer(self) -> Ordered:
        """The best order. If nothing fits, raises the error with the least limit, or returns one that is too large."""
        order = self.ordered or (self._too_large and self._too_large[1])
        if self.ordered is None and self._refused:
            elsewhere, _, error = min(self._refused, key=lambda entry: entry[:2])
            if not elsewhere or order is None:
                raise error
        if order is None:
            raise ZbcError("E303", "schedule: no schedule can be made for this job")
        steps = dict[tuple[str, int], float]()
        for (case, *_), (_, step) in self._known.items():
            key = case.card.name, case.v
            steps[key] = min(step, steps.get(key, INF))
        least = self.step if self.step < INF else min(steps.values(), default=INF)
        rivals = sorted(
            ((*key, step / (least or 1.0)) for key, step in steps.items() if step < INF), key=lambda rival: rival[-1]
        )
        order = order.told(tried=self.looks, all_tried=self.all_looked, rivals=tuple(rivals))
        if AUTO not in self.job.memory.chosen() or not any(case.moves for case, *_ in self._known):
            return order
        placement = order.program.placement
        moved = replace(self.job, memory=self.job.memory.with_choice([OFFLOAD] * placement.stages))
        return order.told(
            bounds=unlimited(self.job, placement, order.costs),
            weighed=tuple(self.weighed.items()),
            copy_share=copies.share_of(start_of(moved, placement)[1], placement),
        )


# ---- activation policies ---------------------------------------------------------------------------------------------


def activations(job: Job, case: Case) -> Iterator[Memory]:
    """Yields the candidates for `memory.activations = "auto"`: kept or recomputed as the partition decides. If memory
    is limited, also selective recompute, of one stage per rank to all, some of them fully recomputed; and, if the speed
    of copies is known, offloaded, with none to all of the stages recomputed as well. Each rank's stages with the
    longest-lived activations come first."""
    yield job.memory
    if AUTO in job.memory.chosen() and case.optional and limited(job):
        jobs = (replace(job, memory=memory) for memory in _less(job, case))
        yield from (variant.memory for variant in jobs if not any(excludes.clashes(vars(variant), case.card.traits)))


def _less(job: Job, case: Case) -> Iterator[Memory]:
    """Yields the policies with less memory, before the job's exclusions."""
    place = places(case.placement)
    counts = sorted({*(count for count in (1, 2) if count <= max(place)), max(place) + 1})

    def choice(first: str, rest: str, count: int) -> Memory:
        return job.memory.with_choice([first if before < count else rest for before in place])

    spares = any(layer.card is not None for layer in case.table)
    kept, both = {"attention": KEEP}, spares and job.memory.attention is None
    if spares:
        selective = [choice(SELECTIVE, AUTO, count) for count in counts]
        yield from selective[-1:] if both else selective  # of some stages, the cheaper way
        yield from (one.model_copy(update=kept) for one in selective if both)
        yield from (choice(RECOMPUTE, SELECTIVE, count) for count in counts[:-1])
    if copies.possible(job, bytes_known=case.first.bytes is not None):
        yield choice(OFFLOAD, OFFLOAD, 0)
        yield from (choice(BOTH, OFFLOAD, count) for count in counts)
        if spares:
            moved = [choice(SPARED, OFFLOAD, count) for count in counts]
            yield from moved
            yield from [moved[-1].model_copy(update=kept)] if both else ()


def _named(case: Case, choice: Choice) -> str:
    """`offload`, or `recompute+offload of 8 stages, offload of 8`."""
    if choice.recompute and len(choice.recompute) < len(case.optional):
        return "recompute of some"
    memory = case.job.memory.decided(choice.recompute, case.stages)
    ways = [memory.of(s) for s in range(case.stages)]
    kinds = [what for what in (KEEP, SELECTIVE, RECOMPUTE, SPARED, BOTH, OFFLOAD) if what in ways]
    kept = "" if memory.attends_again else " (attention kept)"
    if len(kinds) == 1:
        return kinds[0] + kept
    each = (f"{what} of {ways.count(what)}{' stages' if k == 0 else ''}" for k, what in enumerate(kinds))
    return ", ".join(each) + kept
