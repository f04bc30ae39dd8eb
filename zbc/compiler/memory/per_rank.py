"""Memory of each rank over a step: peaks by category, read off the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.cost.stage_bytes import StageBytes
from zbc.compiler.graph import Graph
from zbc.compiler.memory.ledger import Activations, Entry, lasting, ledger
from zbc.compiler.sim.simulate import Timeline, simulate
from zbc.ir import Op, Program, repeated

# Steps without a flush whose peaks count. Activations are the same in each from the second one on; the set of messages
# in flight changes, and repeats after a few.
IN_A_ROW = 8


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak of one rank. Bytes are 0 if the model's sizes are not known before it is built."""

    units: float  # peak activations
    peak_op: Op | None  # the op of that peak
    in_flight: int  # microbatches held at the peak, over all stages of the rank
    weights: float  # with the most gathered at once
    gradients: float
    masters: float
    optimizer: float
    activations: float
    buffers: float  # tensors in flight, and temporaries of the running op
    together: float  # peak of all dynamic categories: each alone may be largest at another op
    logits: float = 0.0  # the part of the activations with an entry per word of the vocabulary
    kv: float = 0.0  # the part of the activations in keys, values and their gradients, which slices share
    gathered: float = 0.0  # the part of the weights that is gathered and freed

    @property
    def bytes(self) -> float:
        """The peak of all categories at any op."""
        return self.weights - self.gathered + self.masters + self.optimizer + self.together


def peaks(program: Program, costs: Costs, timeline: Timeline | None = None) -> list[RankMemory]:
    """The memory of every rank of a compute-only or complete program, whose timeline is simulated if it is not given.

    Times only decide how long a rank's sends stay with it; all else follows from the order.
    """
    if program.cyclic:
        found = peaks(repeated(program, IN_A_ROW), costs)
        return [one if one.peak_op is None else replace(one, peak_op=_of_step(one.peak_op, program)) for one in found]
    both, costs = [_Most()] * len(program.ranks), costs.run_by(program)
    if costs.bytes is not None:
        timeline = timeline or simulate(program, costs)
        both = [_buffers(timeline.graph, entries, costs) for entries in ledger(timeline, costs)]
    return [_rank(program, rank, costs, both[rank]) for rank in range(len(program.ranks))]


def _of_step(op: Op, program: Program) -> Op:
    """An op of consecutive steps, as it is in the body of their cycle."""
    return op._replace(mb=op.mb % program.microbatches)


def _rank(program: Program, rank: int, costs: Costs, by_ledger: _Most) -> RankMemory:
    """The memory of a rank; activations follow from the order of ops alone, without the ledger's times."""
    units = peak = held = most = logits = logits_then = kv = kv_then = 0.0
    flight = at_peak = 0
    where: Op | None = None
    changes = Activations(costs)
    for op in [op for op in program.ranks[rank] if not op[0].is_transfer]:
        change = changes.of(op)
        if change is None:
            continue
        held += change.bytes
        units += change.units
        flight += change.flight
        logits += change.logits
        kv += change.kv.bytes
        if units > peak + 1e-9:
            peak, where, at_peak = units, op, flight
        if held > most:
            most, logits_then, kv_then = held, logits, kv
    mine = costs.bytes_on(program.placement.stages_of(rank))
    return RankMemory(
        units=peak,
        peak_op=where,
        in_flight=at_peak,
        weights=_constant(mine, program) + by_ledger.weights,
        gradients=by_ledger.gradients if program.scatters else sum(s.gradients for s in mine),
        masters=sum(s.masters for s in mine),
        optimizer=sum(s.optimizer for s in mine),
        activations=most,
        buffers=by_ledger.buffers,
        together=by_ledger.together,
        logits=logits_then,
        kv=kv_then,
        gathered=by_ledger.weights,
    )


def _constant(stages: Sequence[StageBytes], program: Program) -> float:
    """Constant bytes of weights of a rank with these stages: if others are gathered and freed, its own shards, and the
    windows that its replicas use of its memory."""
    return sum(s.weights - (s.freed - s.own - s.window if program.resident else 0.0) for s in stages)


class _Most(NamedTuple):
    """Peak bytes at any op, by the ledger."""

    buffers: float = 0.0  # in flight, or temporaries of the op beyond the bytes held before and after it
    together: float = 0.0  # of these, the activations held around it, and the gradients and weights existing then
    weights: float = 0.0  # of weights that are gathered and freed
    gradients: float = 0.0


def _buffers(graph: Graph, entries: Iterable[Entry], costs: Costs) -> _Most:
    transit = whole = most = together = weights = gathered = there = gradients = 0.0
    for i, begin, end, change, (_, gone), (_, still) in entries:
        op, need = graph.ops[i], 0.0
        for category, _, size in begin:
            whole += size
            if category == "transit":
                transit += size
            elif category == "workspace":
                need = size
            elif category == "weights":
                weights += size
                gathered, together = max(gathered, weights), max(together, whole)
            elif category == "gradients":
                there += size
                together = max(together, whole)
            elif category == "messages":
                together = max(together, whole)
        kind = op[0]
        if kind.is_transfer:
            continue
        transit, whole = transit - gone, whole - gone
        together = max(together, whole + still)
        first, added = False, need  # `end` frees the temporaries
        for category, _, size in end:
            whole += size
            if category == "gradients":
                first, there = True, there + size
                continue
            added += size
            if category == "transit":
                transit += size
            elif category == "weights":
                weights += size
        gradients = max(gradients, there)
        if change is not None and not change.begins:  # beyond the bytes held after it, too, and without gradients
            need = max(0.0, (costs.need_bytes(op) if first and need else need) - max(0.0, added))
        elif need and not kind.computes:
            need = max(0.0, need - lasting(op, costs))
        most = max(most, transit + still + need)
        if kind.computes:
            together = max(together, whole + still)
    return _Most(most, together, gathered, gradients)


def resident(program: Program, rank: int, costs: Costs) -> float:
    """Bytes that one rank holds all the time, gradients included: they are there from the first step on."""
    mine = costs.bytes_on(program.placement.stages_of(rank))
    return _constant(mine, program) + sum(s.gradients + s.masters + s.optimizer for s in mine)
