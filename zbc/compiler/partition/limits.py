"""The memory limit of each rank for a search, from the job.

`schedule.memory_limit` counts activations, as a multiple of 1F1B's peak or in bytes. Without it, the limit is
`hardware.memory_gib` less its reserve, weights, gradients, optimizer state and buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log2

from zbc.compiler.check.memory import asked_of
from zbc.compiler.cost.cost import Costs
from zbc.compiler.report.report import Facts, told
from zbc.compiler.schedules.searched import own_limit
from zbc.compiler.search.feasible import least_of
from zbc.compiler.sim.bounds import Bounds, bounds, with_sums, without_a_flush
from zbc.errors import ZbcError
from zbc.ir import Placement
from zbc.job.spec import Job
from zbc.text import GIB, at_least, short, size

BUFFERS = 4  # boundary tensors a rank may need for receives posted ahead and sends in flight
SLACK = 1e-6  # limits this close are equal, as in every comparison of memory


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of each rank, and the costs that count it, as input of a search. Limits in units and in bytes are one
    limit if units are shares of bytes. If they are not, the units count, and `tighter` keeps to the bytes too, for
    orders that turn out to need more of them."""

    costs: Costs
    units: tuple[float, ...] | None
    unit: tuple[float, ...] = ()  # by rank the bytes of a unit, if the device's memory counts
    tighter: Limit | None = None


def limit_of(job: Job, placement: Placement, costs: Costs, *, split: bool = True, own: float | None = None) -> Limit:
    """The limit for one placement, with backward in two ops or (`split` false) in one; `own` units at most. Raises E303
    if `memory_limit` is below the need of a single microbatch."""
    p, (units, sizes) = placement.ranks, _limits(job, placement, costs, split)
    per_rank = _tightest(_each(units, p), _each(own, p))
    if sizes is None:
        return Limit(costs, per_rank)
    device, asked = job.hardware.memory_gib is not None, asked_of(job)
    counted, unit = _counted(costs, p)
    if per_rank is None or _same(costs, counted):
        room = _tightest(per_rank, [size / unit for size in sizes])
        inside = Limit(costs if asked[0] is not None else counted, room, (unit,) * p if device else ())
        return inside if any(asked) or _same(costs, counted) else Limit(costs, None, tighter=inside)
    both, rates = _both(costs, placement, per_rank, sizes, split)
    return Limit(costs, per_rank, tighter=Limit(both, per_rank, rates if device else ()))


def room_of(job: Job, placement: Placement, costs: Costs, *, own: float | None = None) -> Limit:
    """The limit of each rank if activations may move to the host: the least need of an order does not matter. `own`
    units at most."""
    p, (asked, most) = placement.ranks, asked_of(job)
    units = _tightest(_each(asked, p), _each(own, p))
    sizes = None if costs.bytes is None else _tightest(_each(most, p), _left(job, placement, costs, [0.0] * p))
    if sizes is None:
        return Limit(costs, units)
    counted, unit = _counted(costs, p)
    if units is not None and not _same(costs, counted):
        counted = costs.counted(lambda stage, size: max(size.units, size.bytes / unit))
    room = _tightest(units, [size / unit for size in sizes])
    return Limit(counted, room, (unit,) * p if job.room is not None else ())


def _each(amount: float | None, p: int) -> tuple[float, ...] | None:
    return None if amount is None else (amount,) * p


def _tightest(*limits: Sequence[float] | None) -> tuple[float, ...] | None:
    """By rank the least of these limits; None: no such limit."""
    given = [limit for limit in limits if limit is not None]
    return tuple(map(min, zip(*given, strict=True))) if given else None


def _left(job: Job, placement: Placement, costs: Costs, least: Sequence[float]) -> tuple[float, ...] | None:
    """Bytes that `hardware.memory_gib` leaves each rank for activations, `least` at least."""
    rooms = enumerate(zip(job.rooms or (), least, strict=False))
    return tuple(max(room - _fixed(costs, placement, rank), need) for rank, (room, need) in rooms) or None


def bounds_of(job: Job, placement: Placement, costs: Costs) -> Bounds:
    """Lower bounds within the job's memory limit; with offload copies, and without a flush, memory bounds nothing."""
    if job.flushless or any(job.memory.offloads(s) for s in range(placement.stages)):
        return unlimited(job, placement, costs)
    try:
        units, sizes = _limits(job, placement, costs, split=True)
    except ZbcError:
        units = sizes = None
    limits = [] if units is None else [(costs, [units] * placement.ranks)]
    if sizes is not None:
        counted, unit = _counted(costs, placement.ranks)
        room = [size / unit for size in sizes]
        same = bool(limits) and _same(costs, counted)
        limits = [(costs, [min(units or 0.0, size) for size in room])] if same else [*limits, (counted, room)]
    m = job.schedule.microbatches
    rows = [bounds(placement, counted, m, most) for counted, most in limits] or [bounds(placement, costs, m)]
    least = Bounds(max(row.makespan for row in rows), max(row.span for row in rows))
    return with_sums(least, placement, costs, ahead=job.optimizer.sync == "post-validate")


def unlimited(job: Job, placement: Placement, costs: Costs) -> Bounds:
    """Lower bounds for any memory."""
    return replace(under(job, placement, costs, None), memory=False)


def under(job: Job, placement: Placement, costs: Costs, units: Sequence[float] | None) -> Bounds:
    """Lower bounds of a step with at most these activation units per rank."""
    if job.flushless:
        return without_a_flush(placement, costs, job.schedule.microbatches)
    least = bounds(placement, costs, job.schedule.microbatches, units)
    return with_sums(least, placement, costs, ahead=job.optimizer.sync == "post-validate")


def _same(costs: Costs, counted: Costs) -> bool:
    """Whether units are shares of bytes."""
    names = [(costs.units(name), counted.units(name)) for name in costs.amounts]
    return all(abs(a - b) <= 1e-9 for pair in names for a, b in zip(*pair, strict=True))


def limits_of(job: Job, schedule: str, costs: Costs | None) -> Facts:
    """The limits of a rank that a plan of the job by this schedule has to keep: activations in units and in bytes, and
    bytes of everything; None for no such limit."""
    (units, in_bytes), own = asked_of(job), own_limit(schedule, job.parallel.pp, costs)
    least = min((each for each in (units, own and own + job.vocabulary / job.slices) if each is not None), default=None)
    return told(activation_units=least, activation_bytes=in_bytes, device_bytes=job.room)


def _limits(job: Job, placement: Placement, costs: Costs, split: bool) -> tuple[float | None, tuple[float, ...] | None]:
    """The job's limit of each rank, in units and in bytes of activations; None for no such limit, or none known. Below
    the least need of any order, `hardware.memory_gib` allows that need: check_memory will report the shortage."""
    (units, most), (needs, sizes) = asked_of(job), _needs(placement, costs, split)
    if units is not None and max(needs) > units + 1e-6:
        raise _too_small(job, needs, units, in_bytes=False)
    if sizes is None:  # check_memory refuses a limit in bytes without a model
        return units, None
    if most is not None and max(sizes) > most * (1 + 1e-9):
        raise _too_small(job, sizes, most, in_bytes=True)
    return units, _tightest(_each(most, placement.ranks), _left(job, placement, costs, sizes))


def _both(
    costs: Costs, placement: Placement, units: Sequence[float], sizes: Sequence[float], split: bool
) -> tuple[Costs, tuple[float, ...]]:
    """Costs whose units cover both `units` and bytes, and the bytes of a unit by rank. A stage counts as the larger of
    its units and its bytes, as shares of its rank's limits. That may be too much for a single microbatch; such ranks
    count units alone."""
    ranks = range(placement.ranks)
    rates = [units[rank] / max(sizes[rank], 1.0) for rank in ranks]

    def measure() -> Costs:
        most = [max(rates[rank] for rank in placement.holders(s)) for s in range(placement.stages)]
        return costs.counted(lambda stage, size: max(size.units, size.bytes * most[stage]))

    needs, bytes_of_one = _needs(placement, measure(), split)[0], tuple(1 / rate for rate in rates)
    rates = [0.0 if needs[rank] > units[rank] + 1e-9 else rates[rank] for rank in ranks]
    return measure(), bytes_of_one


def smallest(job: Job, placement: Placement, costs: Costs, *, split: bool = True) -> float:
    """The least `memory_limit` with which any order exists: a multiple or bytes, as in the job."""
    units, sizes = _needs(placement, costs, split)
    return max(units) / placement.ranks if sizes is None or asked_of(job)[1] is None else max(sizes)


def shortage(job: Job, placement: Placement, costs: Costs, *, split: bool = True) -> float:
    """The share by which the least need of any order exceeds the limits; 0 or less if one may fit. On the device,
    tensors in flight are not counted: they depend on the order."""
    (units, sizes), (most, most_bytes) = _needs(placement, costs, split), asked_of(job)
    shares = [] if most is None else [max(units) / most]
    shares += [] if most_bytes is None or sizes is None else [max(sizes) / most_bytes]
    if sizes is not None:
        shares += [(_state(costs, placement, rank) + sizes[rank]) / room for rank, room in enumerate(job.rooms or ())]
    return max(shares, default=0.0) - 1


def hopeless(job: Job, placement: Placement, costs: Costs) -> bool:
    """Whether weights, gradients and optimizer state are too large for all ranks together: no partition helps then."""
    if job.rooms is None or costs.bytes is None or job.parallel.frees or job.parallel.scatters:
        return False  # sharded weights and gradients are less than a stage's
    return sum(_state(costs, placement, rank) for rank in range(placement.ranks)) > sum(job.rooms)


def _counted(costs: Costs, p: int) -> tuple[Costs, float]:
    """The costs with activations counted by their bytes, and the bytes of a unit: a rank's share without recompute."""
    sizes = costs.bytes or ()
    unit = sum(stage.share for stage in sizes) / p or 1.0
    return costs.counted(lambda stage, size: size.bytes / unit), unit


def _needs(placement: Placement, costs: Costs, split: bool) -> tuple[list[float], list[float] | None]:
    """Activation units, and bytes if known, of each rank without which no order exists."""
    units = least_of(placement, costs if split else costs.joined())
    if costs.bytes is None:
        return units, None
    counted, unit = _counted(costs, placement.ranks)
    return units, [need * unit for need in least_of(placement, counted if split else counted.joined())]


def _state(costs: Costs, placement: Placement, rank: int) -> float:
    """Bytes of weights, gradients, masters and optimizer state."""
    stages = costs.bytes_on(placement.stages_of(rank))
    return sum(s.weights + s.gradients + s.masters + s.optimizer for s in stages)


def _fixed(costs: Costs, placement: Placement, rank: int) -> float:
    """Bytes a rank holds in any order."""
    stages = costs.bytes_on(placement.stages_of(rank))
    state = _state(costs, placement, rank)
    most = max((max(s.step, *(s.needs.get(op, 0.0) for op in ("f", "w", "bw"))) for s in stages), default=0.0)
    most += max((share.working for share in costs.shares), default=0.0)
    ends = [end for s in placement.stages_of(rank) for end in (s, *placement.sources(s))] if costs.bytes else []
    sent = max((costs.bytes_owned(end).behind for end in ends), default=0.0)
    return state + most + BUFFERS * sent


def _too_small(job: Job, needs: list[float], limit: float, *, in_bytes: bool) -> ZbcError:
    most, rank = max((need, -r) for r, need in enumerate(needs))
    amount, given, enough = f"{short(most)} activation units", short(limit), f"{at_least(most / len(needs), 6)}x"
    if in_bytes:
        amount, given, enough = size(most), size(limit), f"{at_least(most / GIB, 6)} GiB"
    text = f"does not fit: one microbatch holds {amount} on rank {-rank}, the limit is {given}"
    hint = f'the smallest that works for this placement is memory_limit = "{enough}"'
    return ZbcError("E303", text, where=job.where("schedule", "memory_limit"), hint=hint)


def whole(limits: Sequence[float], needs: Sequence[float]) -> list[tuple[float, ...]]:
    """Limits rounded down to rungs if the ranks' needs allow, and all smaller such limits, largest first: a fixed grid,
    so that more memory only ever adds candidates. In activation units, up to 1F1B's peak (p); beyond, each doubling of
    the limit doubles the steps: 1/4 for up to 2 ranks, 1/2 for up to 5, else 1."""
    p, found = len(limits), list[tuple[float, ...]]()
    rung = _floor(p, max(limits))
    while not found or any(limit > need for limit, need in zip(found[-1], needs, strict=True)):
        lowered = [min(limit, max(need, rung)) for limit, need in zip(limits, needs, strict=True)]
        found.append(tuple(lowered))
        rung = _floor(p, rung - max(2 * SLACK, 1e-9 * rung))  # relative, as SLACK would be lost in rounding a large one
    return found


def _floor(p: int, limit: float) -> float:
    """The largest rung not above `limit`."""
    doublings = max(0, ceil(log2(limit / p) - SLACK)) if limit > 0 else 0
    base = p * 2.0 ** (doublings - 1) if doublings else 0.0
    step = (0.25 if p <= 2 else 0.5 if p <= 5 else 1.0) * 2.0**doublings
    return round(base + floor((limit - base + SLACK) / step) * step, 9)
