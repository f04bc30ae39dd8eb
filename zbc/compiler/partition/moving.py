"""Orders whose activations may move to the host: made for more memory than there is, and brought down to the limit.

Which orders: those of a search under larger limits, and under the limit itself with a share of what stages keep taken
to be away, by its fast part alone as well, since what a longer one finds may be worse with copies; those made by hand
for the same placement, with every size of round. Copies only add time, so an order is left alone if it takes as
long without them as the best one with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from zbc.compiler.check.memory import excess
from zbc.compiler.lowering import Lowering
from zbc.compiler.partition.setup import Ordered, Setup, everything, lowering_of, moves
from zbc.compiler.passes.offload import HUGE, LARGE, Offload, TooTight
from zbc.compiler.search.feasible import least_of
from zbc.ir import Placement

WIDER = (1.0, 1.5, 2.0, 3.0)  # times the limit: what orders are made for
AWAY = (0.9, 0.54)  # of what the first, and any other, stage of a rank keeps: taken to be on the host
ON_THE_WAY = 0.75  # units that copies need beside it
FINALISTS, NEAR = 3, 1.1  # orders that get more than a first look, and how long their step may be beside the first
MOST = 100_000  # F, B and W of all orders together, beyond which there are fewer, but two
RETRIES = 4  # with less for activations, until what is on its way fits as well
SAME, TINY = 1e-12, 1e-9
INF = float("inf")
T = TypeVar("T")


def planned(setup: Setup, budget: float | None = None, *, beat: float = INF, **search: Any) -> Ordered:
    """As `Setup.make`, or where activations may move and memory is limited, the best that keeps to it by moving.

    Orders that take `beat` ms without copies are not looked at if there are others. Where tensors on their way need
    more of the device than was left for them, activations get that much less. Raises E303 where none can.
    """
    units, device = setup.limit.units, setup.job.room
    if units is None or not moves(setup.job, setup.placement):
        return setup.make(budget, **search)
    orders = list(_orders(setup, units, setup.schedule.budget if budget is None else budget, search))
    for _ in range(RETRIES):
        best = _fastest(setup, orders, units, beat)
        if device is None or not setup.limit.unit:
            break
        over = [max(0.0, rank.bytes - device) for rank in best.memory]
        if not any(over):
            break
        units = tuple(now - more / unit for now, more, unit in zip(units, over, setup.limit.unit, strict=True))
    return best


def _orders(setup: Setup, units: tuple[float, ...], budget: float, search: dict[str, Any]) -> Iterator[Ordered]:
    """The orders to bring down to so many units, searched ones with equal shares of the budget."""
    asked = setup.job.schedule
    if not setup.schedule.searched:
        groups = setup.schedule.groups
        some = [asked.group] if groups is None or asked.group else _few(setup, list(groups(setup.placement.ranks)))
        for group in some:
            yield setup.ordered(0.0, group=group, **search)
        return
    thin = _thin(setup, units)
    looked_for = [*([] if thin is None else [thin]), *(setup.under(limit) for limit in _limits(setup, units))]
    looked_for = _few(setup, looked_for)
    large = _size(setup) > LARGE  # then kernels that are loaded once pay
    for one in looked_for:
        for seconds in dict.fromkeys((0.0, budget / len(looked_for))):
            yield replace(one.ordered(seconds, **{"compiled": large, **search}), costs=setup.costs)
    yield from setup.by_hand(lambda groups: _few(setup, groups))


def _size(setup: Setup) -> int:
    """F, B and W of an order."""
    return 3 * setup.placement.stages * setup.job.schedule.microbatches


def _few(setup: Setup, some: list[T]) -> list[T]:
    """As many as there is time for, from the first to the last."""
    most = max(2, MOST // _size(setup))
    if len(some) <= most:
        return some
    return [some[round(k * (len(some) - 1) / (most - 1))] for k in range(most)]


def _limits(setup: Setup, units: tuple[float, ...]) -> Iterator[tuple[float, ...]]:
    """Limits from the given one to none at all, each once."""
    placement, costs = setup.placement, setup.limit.costs
    least, most = least_of(placement, costs), everything(placement, costs, setup.job.schedule.microbatches)
    wider = [tuple(times * unit for unit in units) for times in WIDER]
    wider.append(tuple(max(unit, float(placement.ranks)) for unit in units))
    fitted = [tuple(max(min(x, top), low) for x, top, low in zip(one, most, least, strict=True)) for one in wider]
    yield from dict.fromkeys([*fitted, most])


def places(placement: Placement) -> list[int]:
    """Of each stage, how many of its rank come before it."""
    found, seen = list[int](), [0] * placement.ranks
    for stage in range(placement.stages):
        holders = placement.holders(stage)
        found.append(max(seen[rank] for rank in holders))
        for rank in holders:
            seen[rank] += 1
    return found


def _thin(setup: Setup, units: tuple[float, ...]) -> Setup | None:
    """The same as if much of what may move were never there; None where one microbatch is too much even so."""
    placement, costs = setup.placement, setup.limit.costs
    here = [
        1 - AWAY[min(place, len(AWAY) - 1)] if setup.job.memory.offloads(stage) else 1.0
        for stage, place in enumerate(places(placement))
    ]
    thin = costs.counted(lambda stage, size: size.units * here[stage], "kept")
    room = tuple(unit - ON_THE_WAY for unit in units)
    if any(need > there for need, there in zip(least_of(placement, thin), room, strict=True)):
        return None
    return replace(setup, limit=replace(setup.limit, costs=thin, units=room))


def _fastest(setup: Setup, orders: Sequence[Ordered], units: tuple[float, ...], beat: float) -> Ordered:
    """Of orders that keep to so many units by moving, the fastest that fits; else the one that is least too large.

    Raises E303 where no order can.
    """
    job, refused = setup.job, list[TooTight]()
    found = list[tuple[float, float, Ordered]]()

    def look(order: Ordered, *, quick: bool) -> None:
        one = replace(order, lowering=_moving(setup, units, quick=quick))
        try:
            over = excess(job, one.memory, one.costs)
        except TooTight as error:
            refused.append(error)
            return
        found.append((over if over > TINY else 0.0, one.step_ms(job), one))

    plain = sorted(((order.step_ms(job), k) for k, order in enumerate(orders)))
    for least, k in plain:
        known = min((step for over, step, _ in found if not over), default=INF)
        if not found or least < min(known, beat) * (1 - SAME):
            look(orders[k], quick=True)
    if not found:
        raise min(refused, key=lambda error: error.least)
    ranked = sorted(found, key=lambda entry: entry[:2])
    size = ranked[0][2].complete.program.size
    for _, step, one in ranked[: FINALISTS if size < LARGE else 1 if size < HUGE else 0]:
        alone = replace(one, lowering=lowering_of(job))
        if alone.step_ms(job) * (1 + SAME) < step < NEAR * ranked[0][1]:
            look(alone, quick=False)
    return min(found, key=lambda entry: entry[:2])[2]


def _moving(setup: Setup, units: tuple[float, ...], *, quick: bool) -> Lowering:
    """How programs are lowered that keep to so many units by moving what they have beyond."""
    may = frozenset(s for s in range(setup.placement.stages) if setup.job.memory.offloads(s))
    moving = Offload(units, may, setup.job.objective, setup.limit.costs, quick=quick)
    return replace(lowering_of(setup.job), offload=moving)
