"""How much each rank holds over a step: activation units by op order, bytes by category.

Within a rank ops run one after another, so the peak follows from the order alone; times are not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zbc.compiler.cost import Costs
from zbc.compiler.simulate import Timeline
from zbc.ir import COMPUTE, Kind, Op, Program

_CONSUMERS = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.BW: Kind.RECV_B}


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak of one rank. Bytes are 0 where the model's sizes are not known before it is built."""

    units: float  # peak activations
    peak_op: Op | None  # where that peak is reached
    in_flight: int  # microbatches held there, over all stages of the rank
    weights: float
    gradients: float
    masters: float
    optimizer: float
    activations: float
    buffers: float  # posted receive buffers, and one send in flight per direction

    @property
    def bytes(self) -> float:
        return self.weights + self.gradients + self.masters + self.optimizer + self.activations + self.buffers


def peaks(program: Program, costs: Costs) -> list[RankMemory]:
    """The memory of every rank of a compute-only or complete program."""
    return [_rank(program, rank, costs) for rank in range(len(program.ranks))]


def _rank(program: Program, rank: int, costs: Costs) -> RankMemory:
    units = peak = held = most = 0.0
    flight = at_peak = posted = most_posted = 0
    where: Op | None = None
    receives = any(op.kind.is_recv for op in program.ranks[rank])
    for op in program.ranks[rank]:
        kind = op.kind
        if kind in COMPUTE:
            change = costs.held(op)
            held += costs.held_bytes(op)
            units += change
            flight += (kind is Kind.F) - (kind is Kind.B or kind is Kind.BW)
            if receives and kind in _CONSUMERS and _remote(program, op):
                posted -= 1
        elif kind.is_recv:
            posted += 1
        if units > peak + 1e-9:
            peak, where, at_peak = units, op, flight
        most, most_posted = max(most, held), max(most_posted, posted)
    sizes = costs.bytes
    mine = [sizes[s] for s in program.placement.stages_of(rank)] if sizes else []
    boundary = max((s.boundary for s in mine), default=0.0)
    return RankMemory(
        units=peak,
        peak_op=where,
        in_flight=at_peak,
        weights=sum(s.weights for s in mine),
        gradients=sum(s.gradients for s in mine),
        masters=sum(s.masters for s in mine),
        optimizer=sum(s.optimizer for s in mine),
        activations=most,
        buffers=(most_posted + 2) * boundary if receives else 0.0,
    )


def _remote(program: Program, op: Op) -> bool:
    before = op.stage - 1 if op.kind is Kind.F else op.stage + 1
    return program.placement.neighbours(op.stage, before, op.pipe)


class Held(NamedTuple):
    """What a rank holds from `ms` on, in bytes by category."""

    ms: float
    weights: float
    gradients: float
    masters: float
    optimizer: float
    activations: float

    @property
    def bytes(self) -> float:
        return self.weights + self.gradients + self.masters + self.optimizer + self.activations


def over_time(timeline: Timeline, program: Program, rank: int, costs: Costs) -> Iterator[Held]:
    """Bytes of one rank over a step, by category; nothing where sizes are not known before the model is built.

    Weights, their masters, optimizer state and, from the first step on, gradients stay; activations come with F and
    go with backward.
    """
    if costs.bytes is None:
        return
    mine = [costs.bytes[s] for s in program.placement.stages_of(rank)]
    weights, gradients, masters, optimizer = (
        sum(getattr(s, name) for s in mine) for name in ("weights", "gradients", "masters", "optimizer")
    )
    held = 0.0
    for ms, op in _changes(timeline, rank):
        held += costs.held_bytes(op)
        yield Held(ms, weights, gradients, masters, optimizer, held)


def _changes(timeline: Timeline, rank: int) -> Iterator[tuple[float, Op]]:
    """When each op changes what the rank holds: F as it starts, backward as it ends."""
    dag = timeline.dag
    for i in range(dag.first[rank], dag.first[rank + 1]):
        op = dag.ops[i]
        yield (timeline.start[i] if op.kind is Kind.F else timeline.end[i]), op


def curve(timeline: Timeline, rank: int, costs: Costs) -> Iterator[tuple[float, float]]:
    """(ms, activation units held from then on) of one rank: F fills as it starts, backward frees as it ends."""
    units = 0.0
    for ms, op in _changes(timeline, rank):
        units += costs.held(op)
        yield ms, units
