"""How much each rank holds over a step: activation units by op order, bytes by category.

Within a rank ops run one after another, so what is held follows from the order alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zbc.compiler.cost import Costs
from zbc.compiler.simulate import Timeline, simulate
from zbc.compiler.transit import in_transit
from zbc.ir import COMPUTE, TRANSFER, Kind, Op, Program

WIDE = 2**20  # gradients are widened to 8 bytes in pieces of so many elements, to sum their squares


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
    buffers: float  # tensors on their way (see transit.py), and what the running op needs beyond what is held
    together: float  # most of gradients, activations and buffers together: each alone may be largest at another op
    logits: float = 0.0  # of the activations, what there is for every word of the vocabulary

    @property
    def bytes(self) -> float:
        """The most of everything at any op."""
        return self.weights + self.masters + self.optimizer + self.together


def peaks(program: Program, costs: Costs, timeline: Timeline | None = None) -> list[RankMemory]:
    """The memory of every rank of a compute-only or complete program, whose timeline is simulated if it is not given.

    Times only decide how long what a rank sends stays with it; all else follows from the order.
    """
    buffers = [(0.0, 0.0)] * len(program.ranks)
    if costs.bytes is not None:
        moving = in_transit(program, costs, timeline or simulate(program, costs))
        buffers = [_buffers(program, rank, costs, moving[rank]) for rank in range(len(program.ranks))]
    return [_rank(program, rank, costs, *buffers[rank]) for rank in range(len(program.ranks))]


def _rank(program: Program, rank: int, costs: Costs, buffers: float, together: float) -> RankMemory:
    units = peak = held = most = logits = logits_then = 0.0
    flight = at_peak = 0
    where: Op | None = None
    change: dict[tuple[Kind, int], tuple[float, float]] = {}
    for op in program.ranks[rank]:
        kind = op[0]
        if kind not in COMPUTE:
            continue
        key = kind, op[1]
        if key not in change:
            change[key] = costs.held_bytes(op), costs.held(op)
        bytes_more, units_more = change[key]
        held += bytes_more
        units += units_more
        flight += (kind is Kind.F) - (kind is Kind.B or kind is Kind.BW)
        if units > peak + 1e-9:
            peak, where, at_peak = units, op, flight
        if costs.bytes is not None and kind is not Kind.W:
            logits += costs.bytes[op[1]].logits * (1 if kind is Kind.F else -1)
        if held > most:
            most, logits_then = held, logits
    mine = [costs.bytes[s] for s in program.placement.stages_of(rank)] if costs.bytes else []
    return RankMemory(
        units=peak,
        peak_op=where,
        in_flight=at_peak,
        weights=sum(s.weights for s in mine),
        gradients=sum(s.gradients for s in mine),
        masters=sum(s.masters for s in mine),
        optimizer=sum(s.optimizer for s in mine),
        activations=most,
        buffers=buffers,
        together=together,
        logits=logits_then,
    )


def _buffers(program: Program, rank: int, costs: Costs, moving: Sequence[float]) -> tuple[float, float]:
    """The most bytes at any op that are on their way (`moving` tensors) or that the op needs for itself; and the most
    of these, of the activations held around it and of the gradients that there are by then.

    No time passes in transfers: what they begin is on its way in the op behind them.
    """
    mine, last = program.placement.stages_of(rank), program.placement.stages - 1
    boundary = max((costs.bytes[s].boundary for s in mine), default=0.0) if costs.bytes else 0.0
    known: dict[tuple[Kind, int, bool], tuple[float, float, float]] = {}
    gradients = Gradients(program.ranks[rank], costs)
    most = together = held = 0.0
    for op, count in zip(program.ranks[rank], moving, strict=True):
        kind, stage = op[0], op[1]
        if kind in TRANSFER:
            continue
        sent, before = count * boundary, gradients.bytes
        if kind not in COMPUTE:
            own = _own(op, costs, mine)
            most, together = max(most, sent + own), max(together, held + sent + own + before)
            gradients.after(op)
            continue
        first = gradients.makes(op)
        if (kind, stage, first) not in known:
            rise = 0.0 if kind is Kind.F else costs.rise_bytes(op, first=first)
            known[kind, stage, first] = costs.more_bytes(op, first=first), rise, costs.held_bytes(op)
        own, rise, change = known[kind, stage, first]
        most = max(most, sent + own)
        if kind is Kind.F:
            together = max(together, max(held, held + change) + sent + own + before)
        else:
            # `moving` has the gradient that it makes, and not the one that it is given; `rise` has it the other way.
            there = sent if kind is Kind.W else sent + boundary * ((stage < last) - (stage > 0))
            if first:
                gradients.after(op)
            together = max(together, held + there + rise + before, held + change + sent + gradients.bytes)
        held += change
    return most, together


class Gradients:
    """Bytes of gradients that a rank has before and after its ops; B makes a few, BW or W all others.

    They are there until the step of their stage, which without a barrier comes behind the next step's first forwards.
    That of a weight which the first stage shares with the last one on its rank may come with either.
    """

    def __init__(self, ops: Sequence[Op], costs: Costs) -> None:
        self._costs = costs
        self._there: dict[int, float] = {}  # bytes by stage
        self._whole: set[int] = set()  # stages that have all
        self._lent = 0.0  # what the last stage has made of the first one's
        self.bytes = 0.0
        for op in ops:
            if op.kind is Kind.COMMIT:
                self._have(op.stage, whole=True)

    def makes(self, op: Op) -> bool:
        """Whether a backward makes gradients where there are none."""
        if op.kind is Kind.B:
            return op.stage not in self._there
        return op.kind is not Kind.F and op.stage not in self._whole

    def after(self, op: Op) -> None:
        """Go on behind an op."""
        if op.kind in (Kind.STEP, Kind.COMMIT):
            self.bytes -= self._there.pop(op.stage, 0.0)
            self._whole.discard(op.stage)
        elif op.kind in COMPUTE and self.makes(op):
            self._have(op.stage, whole=op.kind is not Kind.B)

    def _have(self, stage: int, *, whole: bool) -> None:
        if self._costs.bytes is None:
            return
        size = self._costs.bytes[stage]
        before, lent = self._there.get(stage, 0.0), self._lent
        self._there[stage] = size.gradients if whole else size.early
        if whole:
            self._whole.add(stage)
            self._lent = 0.0 if 0 in self._whole else lent + size.lent
        self.bytes += self._there[stage] - before + self._lent - lent


def _own(op: Op, costs: Costs, mine: Sequence[int]) -> float:
    """What an op that computes nothing for a microbatch needs while it runs; `mine` are the stages of its rank."""
    sizes = costs.bytes or ()
    if op.kind is Kind.REDUCE:  # gradients move into one message
        return sizes[op.stage].summed
    if op.kind is Kind.GATHER:  # as a rule less than the gradients that are gone
        return max(0.0, sizes[op.stage].gathered - sizes[op.stage].gradients)
    if op.kind is Kind.TIE:
        return costs.tied
    if op.kind in (Kind.VALIDATE, Kind.NORM):
        return 8 * min(max((sizes[s].largest for s in mine), default=0.0), WIDE)
    if op.kind in (Kind.STEP, Kind.COMMIT):
        return sizes[op.stage].step
    if op.kind is Kind.TENTATIVE:
        return sizes[op.stage].tentative + sizes[op.stage].step
    return 0.0


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
    for i in timeline.ops(rank):
        op = timeline.graph.ops[i]
        yield (timeline.start[i] if op.kind is Kind.F else timeline.end[i]), op


def curve(timeline: Timeline, rank: int, costs: Costs) -> Iterator[tuple[float, float]]:
    """(ms, activation units held from then on) of one rank: F fills as it starts, backward frees as it ends."""
    units = 0.0
    for ms, op in _changes(timeline, rank):
        units += costs.held(op)
        yield ms, units
