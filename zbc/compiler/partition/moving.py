"""Orders with activation offload: made for more memory than available, and brought down to the limit.

The orders are those of a search under the limit and others, also by its fast part alone, since the result of a longer
one may be worse with copies; and hand-made ones for the same placement, with every group size. Copies only add time,
so an order is skipped if it takes as long without them as the best one with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import sub
from typing import TypeVar

from zbc.compiler.check.memory import excess
from zbc.compiler.lowering import Lowering
from zbc.compiler.partition.limits import Limit
from zbc.compiler.partition.setup import RETRIES, Ordered, Setup, everything, lowering_of, moves
from zbc.compiler.passes.offload import HUGE, LARGE, Offload, TooTight
from zbc.compiler.search.feasible import least_of
from zbc.ir import Placement
from zbc.job.spec import Job

WIDER = (0.8, 1.0, 1.3, 1.6, 2.0, 3.0)  # times the limit: limits that orders are made for
FINALISTS, NEAR = 3, 1.1  # orders evaluated fully, and the longest of their steps relative to the first
MOST = 100_000  # F, B and W of all orders together, beyond which there are fewer, at least two
SAME, TINY = 1e-12, 1e-9
INF = float("inf")
T = TypeVar("T")


def planned(setup: Setup, budget: float | None = None, *, beat: float = INF) -> Ordered:
    """`Setup.make`, or if activations may move and memory is limited, the best order that keeps to it by offloading.
    Orders that take `beat` ms without copies are skipped if there are others. If tensors in flight need more of the
    device than was left for them, activations get that much less. Raises E303 if no order fits."""
    units = setup.limit.units
    if units is None or not moves(setup.job, setup.placement):
        return setup.make(budget, beat=beat)
    orders = list(_orders(setup, units, setup.schedule.budget if budget is None else budget))
    for _ in range(RETRIES):
        best = _fastest(setup, orders, units, beat)
        if not any(over := setup.beyond(best)):
            break
        units = tuple(map(sub, units, over))
    return best


def _orders(setup: Setup, units: tuple[float, ...], budget: float) -> Iterator[Ordered]:
    """Yields the orders to bring down to `units`, searched ones with equal shares of the budget."""
    asked = setup.job.schedule
    if not setup.schedule.searched:
        groups = setup.schedule.groups
        some = [asked.group] if groups is None or asked.group else _few(setup, list(groups(setup.placement.ranks)))
        for group in some:
            yield setup.ordered(0.0, group=group)
        return
    fast = replace(setup, compiled=setup.compiled or _size(setup) > LARGE)  # then loading kernels once pays
    looked_for = _few(setup, [fast.under(limit) for limit in _limits(setup, units)])
    for variant in looked_for:
        for seconds in dict.fromkeys((0.0, budget / len(looked_for))):
            yield variant.ordered(seconds)
    yield from setup.by_hand(lambda groups: _few(setup, groups))


def _size(setup: Setup) -> int:
    """The number of F, B and W ops of an order."""
    return 3 * setup.placement.stages * setup.job.schedule.microbatches


def _few(setup: Setup, some: list[T]) -> list[T]:
    """As many as there is time for, evenly from the first to the last."""
    most = max(2, MOST // _size(setup))
    if len(some) <= most:
        return some
    return [some[round(k * (len(some) - 1) / (most - 1))] for k in range(most)]


def _limits(setup: Setup, units: tuple[float, ...]) -> Iterator[tuple[float, ...]]:
    """Yields limits from below the given one to none at all, each once."""
    placement, costs = setup.placement, setup.limit.costs
    least, most = least_of(placement, costs), everything(placement, costs, setup.job.schedule.microbatches)
    wider = [tuple(times * unit for unit in units) for times in WIDER]
    wider.append(tuple(max(unit, float(placement.ranks)) for unit in units))
    fitted = [tuple(max(min(x, top), low) for x, top, low in zip(limit, most, least, strict=True)) for limit in wider]
    yield from dict.fromkeys([*fitted, most])


def places(placement: Placement) -> list[int]:
    """For each stage, the number of its rank's stages before it."""
    numbers, seen = list[int](), [0] * placement.ranks
    for stage in range(placement.stages):
        holders = placement.holders(stage)
        numbers.append(max(seen[rank] for rank in holders))
        for rank in holders:
            seen[rank] += 1
    return numbers


def _fastest(setup: Setup, orders: Sequence[Ordered], units: tuple[float, ...], beat: float) -> Ordered:
    """Among orders brought down to `units` by offloading, the fastest that fits; else the one least too large. Raises
    E303 if no order can."""
    job, refused = setup.job, list[TooTight]()
    tried = list[tuple[float, float, Ordered]]()

    def look(order: Ordered, *, quick: bool) -> None:
        lowered = order.relowered(moving(job, setup.placement, setup.limit, units, quick=quick))
        try:
            over = excess(job, lowered.memory, lowered.costs)
        except TooTight as error:
            refused.append(error)
            return
        tried.append((over if over > TINY else 0.0, lowered.step_ms(job), lowered))

    plain = sorted(((order.step_ms(job), k) for k, order in enumerate(orders)))
    for least, k in plain:
        fastest = min((step for over, step, _ in tried if not over), default=INF)
        if not tried or least < min(fastest, beat) * (1 - SAME):
            look(orders[k], quick=True)
    if not tried:
        raise min(refused, key=lambda error: error.least)
    ranked = sorted(tried, key=lambda entry: entry[:2])
    size = ranked[0][2].complete.program.size
    for _, step, lowered in ranked[: FINALISTS if size < LARGE else 1 if size < HUGE else 0]:
        alone = lowered.relowered(lowering_of(job))
        if alone.step_ms(job) * (1 + SAME) < step < NEAR * ranked[0][1]:
            look(alone, quick=False)
    return min(tried, key=lambda entry: entry[:2])[2]


def moving(job: Job, placement: Placement, limit: Limit, units: tuple[float, ...], *, quick: bool = False) -> Lowering:
    """The lowering that keeps programs within `units` by offloading the rest."""
    may = frozenset(s for s in range(placement.stages) if job.memory.offloads(s))
    offload = Offload(units, may, job.objective, limit.costs, quick=quick, duplex=job.hardware.duplex)
    return replace(lowering_of(job), offload=offload)
