"""Activation offload: how much of a stage's activations can move to the host, and ms of the copies out and back."""

from __future__ import annotations

from typing import NamedTuple

from zbc.compiler.cost.cost import Costs, Size
from zbc.compiler.cost.stage_bytes import StageBytes
from zbc.errors import ZbcError
from zbc.ir import Placement
from zbc.job.spec import Job

BYTES_PER_MS = 1e6  # of a GB/s


class Speed(NamedTuple):
    """ms of a copy per activation unit that a stage moves, or `per_byte`."""

    out: float
    back: float
    per_byte: bool = True

    def ms(self, units: float, size: float) -> tuple[float, float]:
        """Of the copy out and of that back."""
        moved = size if self.per_byte else units
        return moved * self.out, moved * self.back


def speed_of(job: Job, *, bytes_known: bool) -> Speed:
    """From `costs.offload`, else hardware.host_gbps, else the profile. Raises E141 if none of them has it."""
    given, gbps = job.costs.offload, job.hardware.host_gbps
    if given is not None:
        out, back = given if isinstance(given, list) else (given, given)
        return Speed(out, back, per_byte=False)
    measured = job.profile.copies if job.profile is not None else None
    if gbps is None and measured is not None:
        out, back = measured.gbps
        return Speed(1 / (out * BYTES_PER_MS), 1 / (back * BYTES_PER_MS))
    if gbps is not None and bytes_known:
        return Speed(1 / (gbps * BYTES_PER_MS), 1 / (gbps * BYTES_PER_MS))
    text = f"memory: activations = {job.memory.activations!r} needs to know how long a copy to the host takes"
    hint = "give costs.offload (ms), or hardware.host_gbps, or plan with a profile made on a GPU"
    if gbps is not None:
        text += ", and the bytes of this model are not known before it is built"
        hint = "give costs.offload (ms), or plan with --profile"
    raise ZbcError("E141", text, where=job.where("memory", "activations"), hint=hint)


def alone(job: Job) -> float:
    """The share of its time that a copy takes while the other direction is idle: below 1 if a profile measured that."""
    measured = job.profile.copies if job.profile is not None else None
    if measured is None or job.costs.offload is not None or job.hardware.host_gbps is not None:
        return 1.0
    return measured.alone


def share_of(costs: Costs, placement: Placement) -> float:
    """ms of copying a rank's share of a microbatch one way, over its F + B + W; the maximum over ranks of each."""
    ranks = [placement.stages_of(r) for r in range(placement.ranks)]
    times = {name: costs.column(name) for name in ("f", "b", "w", "out")}
    work = max(sum(times[name][s] for name in ("f", "b", "w") for s in mine) for mine in ranks)
    return max(sum(times["out"][s] for s in mine) for mine in ranks) / (work or 1.0)


def possible(job: Job, *, bytes_known: bool) -> bool:
    """Whether the speed of copies to the host is known."""
    try:
        speed_of(job, bytes_known=bytes_known)
    except ZbcError:
        return False
    return True


def movable(kept: Size, stage: StageBytes) -> Size:
    """The part of a stage's kept activations that can move: all but its result, which stays until it is sent, and what
    the runtime leaves on the device."""
    left = max(0.0, kept.bytes - stage.sent - stage.stays)
    return Size(kept.units * left / kept.bytes, left) if kept.bytes else kept
