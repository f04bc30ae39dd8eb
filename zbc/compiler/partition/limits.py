"""How much a rank may hold, from the job: what a search is given as its limit.

`schedule.memory_limit` counts activations, as a multiple of 1F1B's peak or in bytes. Without it, the limit is what
`hardware.memory_gib` leaves beside weights, gradients, optimizer state and buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbc.compiler.cost.cost import Costs
from zbc.compiler.search.feasible import least_of
from zbc.errors import ZbcError
from zbc.ir import Placement
from zbc.job.spec import Job, parse_limit
from zbc.text import GIB, at_least, short, size

BUFFERS = 4  # boundary tensors a rank may need for receives posted ahead and sends under way


@dataclass(frozen=True, slots=True)
class Limit:
    """Units per rank, and the costs in which they are counted (units by bytes where the limit is in bytes)."""

    costs: Costs
    units: tuple[float, ...] | None
    unit: float = 0.0  # bytes of a unit, where what the device has left counts


def limit_of(job: Job, placement: Placement, costs: Costs, *, split: bool = True) -> Limit:
    """The limit for one placement, with backward in two ops or (`split` false) in one.

    Raises E303 where `memory_limit` is below what a single microbatch needs.
    """
    asked, p = _asked(job), placement.ranks
    multiple = asked is not None and asked[1] == "x"
    if costs.bytes is None and not multiple:
        return Limit(costs, None)  # check_memory refuses a limit in bytes without a model
    counted, unit = (costs, 1.0) if multiple else _counted(costs, p)
    room = _room(job, placement, costs if asked is None else counted, split)
    if asked is None:
        return Limit(costs, None) if room is None else Limit(counted, room, unit)
    most, needs = asked[0] * p if multiple else asked[0] / unit, _least(placement, counted, split)
    if max(needs) > most + (1e-6 if multiple else 1e-9):
        raise _too_small(job, needs, most, None if multiple else unit)
    if room is None:
        return Limit(counted, (most,) * p)
    return Limit(counted, tuple(min(most, left) for left in room), _counted(costs, p)[1])


def smallest(job: Job, placement: Placement, costs: Costs, *, split: bool = True) -> float:
    """The least `memory_limit` with which any order exists: a multiple or bytes, as the job has it."""
    asked = _asked(job)
    if asked is None or asked[1] == "x" or costs.bytes is None:
        return max(_least(placement, costs, split)) / placement.ranks
    counted, unit = _counted(costs, placement.ranks)
    return max(_least(placement, counted, split)) * unit


def shortage(job: Job, placement: Placement, costs: Costs, *, split: bool = True) -> float:
    """By what share the least that any order holds is above the limits; 0 or less if one may fit."""
    units = _least(placement, costs, split)
    if costs.bytes is None:
        return above(job, placement, costs, units, ())
    counted, unit = _counted(costs, placement.ranks)
    return above(job, placement, costs, units, [need * unit for need in _least(placement, counted, split)])


def above(job: Job, placement: Placement, costs: Costs, units: Sequence[float], sizes: Sequence[float]) -> float:
    """By what share ranks that hold these activations, in units and in bytes, are above the limits; 0 or less: none is.

    Of the device, what is on its way is not counted: that depends on the order.
    """
    found = [-1.0]
    asked = _asked(job)
    if asked is not None and asked[1] == "x":
        found.append(max(units) / (asked[0] * placement.ranks) - 1)
    if costs.bytes is not None:
        if asked is not None and asked[1] == "bytes":
            found.append(max(sizes) / asked[0] - 1)
        if job.hardware.memory_gib is not None:
            whole = max(_state(costs, placement, rank) + size for rank, size in enumerate(sizes))
            found.append(whole / (job.hardware.memory_gib * GIB) - 1)
    return max(found)


def _asked(job: Job) -> tuple[float, str] | None:
    return parse_limit(job.schedule.memory_limit) if job.schedule.memory_limit else None


def _counted(costs: Costs, p: int) -> tuple[Costs, float]:
    """The costs with activations counted by their bytes, and the bytes of a unit: a rank's share without recompute."""
    sizes = costs.bytes or ()
    unit = sum(stage.share for stage in sizes) / p or 1.0
    return costs.with_units(**{name: tuple(b / unit for b in costs.bytes_of(name)) for name in costs.size}), unit


def _room(job: Job, placement: Placement, costs: Costs, split: bool) -> tuple[float, ...] | None:
    """What `hardware.memory_gib` leaves each rank, in units; None if that is not known, or units are not bytes."""
    if job.hardware.memory_gib is None or costs.bytes is None:
        return None
    counted, unit = _counted(costs, placement.ranks)
    for name in costs.size:
        if any(abs(a - b) > 1e-9 for a, b in zip(costs.units(name), counted.units(name), strict=True)):
            return None
    room = [(job.hardware.memory_gib * GIB - _fixed(costs, placement, r)) / unit for r in range(placement.ranks)]
    # Below the least any order needs there is no plan; search at the least, and let check_memory say what is missing.
    return tuple(max(a, b) for a, b in zip(room, _least(placement, costs, split), strict=True))


def _least(placement: Placement, costs: Costs, split: bool) -> list[float]:
    return least_of(placement, costs if split else costs.joined())


def _state(costs: Costs, placement: Placement, rank: int) -> float:
    """Bytes of weights, gradients and what the optimizer keeps."""
    stages = [costs.bytes[s] for s in placement.stages_of(rank)] if costs.bytes else []
    return sum(s.weights + s.gradients + s.masters + s.optimizer for s in stages)


def _fixed(costs: Costs, placement: Placement, rank: int) -> float:
    """Bytes a rank holds whatever the order."""
    stages = [costs.bytes[s] for s in placement.stages_of(rank)] if costs.bytes else []
    state = _state(costs, placement, rank)
    most = max((max(s.more.f, s.more.b, s.more.w, s.more.bw, s.step) for s in stages), default=0.0)
    return state + most + BUFFERS * max((s.boundary for s in stages), default=0.0)


def _too_small(job: Job, needs: list[float], limit: float, unit: float | None) -> ZbcError:
    """`unit` is the bytes of one where the limit is in bytes."""
    rank = max(range(len(needs)), key=lambda r: needs[r])
    most = needs[rank]
    if unit is None:
        amount, given, enough = f"{short(most)} activation units", short(limit), f"{at_least(most / len(needs), 6)}x"
    else:
        amount, given, enough = size(most * unit), size(limit * unit), f"{at_least(most * unit / GIB, 6)} GiB"
    return ZbcError(
        "E303",
        f"does not fit: one microbatch holds {amount} on rank {rank}, the limit is {given}",
        where=job.where("schedule", "memory_limit"),
        hint=f'the smallest that works for this placement is memory_limit = "{enough}"',
    )
