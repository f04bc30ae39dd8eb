"""Memory of each rank over a step: peaks by category, read off the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zbc.compiler.cost.cost import Costs
from zbc.compiler.cost.stage_bytes import StageBytes
from zbc.compiler.memory.ledger import Activations, Entry, ledger
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
    costs = costs.run_by(program)
    if costs.bytes is None:
        changes = Activations(costs)
        plain = ([(op, Entry(0, (), (), changes.of(op))) for op in ops] for ops in program.ranks)
        return [_rank(program, rank, costs, ops) for rank, ops in enumerate(plain)]
    timeline = timeline or simulate(program, costs)
    ops, ranks = timeline.graph.ops, enumerate(ledger(timeline, costs))
    return [_rank(program, rank, costs, ((ops[one.op], one) for one in entries)) for rank, entries in ranks]


def _of_step(op: Op, program: Program) -> Op:
    """An op of consecutive steps, as it is in the body of their cycle."""
    return op._replace(mb=op.mb % program.microbatches)


def _rank(program: Program, rank: int, costs: Costs, entries: Iterable[tuple[Op, Entry]]) -> RankMemory:
    """The memory of a rank, whose ops have these entries."""
    units = peak = held = most = logits = logits_then = kv = kv_then = 0.0  # activations
    flight = at_peak = 0
    where: Op | None = None
    transit = whole = weights = there = buffers = together = gathered = gradients = 0.0
    for op, (_, begin, end, change, (_, gone), (_, still)) in entries:
        kind, need = op[0], 0.0
        if change is not None:
            held, units, flight = held + change.bytes, units + change.units, flight + change.flight
            logits, kv = logits + change.logits, kv + change.kv.bytes
            if units > peak + 1e-9:
                peak, where, at_peak = units, op, flight
            if held > most:
                most, logits_then, kv_then = held, logits, kv
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
        if kind.is_transfer:
            continue
        transit, whole = transit - gone, whole - gone
        together = max(together, whole + still)
        came, added = 0.0, need  # `end` frees the temporaries
        for category, _, size in end:
            whole += size
            if category == "gradients":
                came, there = came + size, there + size
                continue
            added += size
            if category == "transit":
                transit += size
            elif category == "weights":
                weights += size
        gradients = max(gradients, there)
        if change is not None and not change.begins:  # beyond the bytes held after it, too, new gradients included
            need = max(0.0, need - max(0.0, came) - max(0.0, added))
        buffers = max(buffers, transit + still + need)
        if kind.computes:
            together = max(together, whole + still)
    mine = costs.bytes_on(program.placement.stages_of(rank))
    return RankMemory(
        units=peak,
        peak_op=where,
        in_flight=at_peak,
        weights=_constant(mine, program) + gathered,
        gradients=gradients if program.scatters else sum(s.gradients for s in mine),
        masters=sum(s.masters for s in mine),
        optimizer=sum(s.optimizer for s in mine),
        activations=most,
        buffers=buffers,
        together=together,
        logits=logits_then,
        kv=kv_then,
        gathered=gathered,
    )


def _constant(stages: Sequence[StageBytes], program: Program) -> float:
    """Constant bytes of weights of a rank with these stages: if others are gathered and freed, its own shards, and the
    windows that its replicas use of its memory."""
    return sum(s.weights - (s.freed - s.own - s.window if program.resident else 0.0) for s in stages)


def resident(program: Program, rank: int, costs: Costs) -> float:
    """Bytes that one rank holds all the time, gradients included: they are there from the first step on."""
    mine = costs.bytes_on(program.placement.stages_of(rank))
    return _constant(mine, program) + sum(s.gradients + s.masters + s.optimizer for s in mine)
