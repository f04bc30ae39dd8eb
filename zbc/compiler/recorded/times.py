"""Times of ops and transfers in recorded steps.

Two times are read off each compute op. `work` is the op itself. `cost` is the time until its rank can run the next: the
op, the runtime's work around it, and the transfers started since the previous compute op. The simulator has ranks run
one op right after the other, so it gets `cost`.

Times of microbatches of unequal length are made those of the median one, by the times predicted for each.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from zbc.compiler.cost.cost import Costs
from zbc.compiler.recorded.view import Arrival, RecordedStep
from zbc.ir import NEXT, WHOLE, Kind, Op, groups
from zbc.ops import Lane
from zbc.trace.recording import Cause

_MS = 1e6
Key = tuple[Kind, int, int]  # kind, stage, rank of the run


class Typical:
    """Predicted times of the median microbatch over those of a given one; 1 if all are alike."""

    def __init__(self, costs: Costs | None) -> None:
        self._costs = costs if costs is not None and costs.unequal else None
        self._known: dict[tuple[Op, int], float] = {}

    def of(self, op: Op) -> float:
        """For a compute op."""
        return self._share(op, -1, lambda costs, mb: costs.duration(op._replace(mb=mb)))

    def sent(self, message: Arrival) -> float:
        """For a message."""
        taker, source = message.taker, message.source.stage
        return self._share(taker, source, lambda costs, mb: costs.link(taker.pipe, source, taker.stage, mb))

    def _share(self, op: Op, source: int, ms: Callable[[Costs, int], float]) -> float:
        costs = self._costs
        if costs is None:
            return 1.0
        if (op, source) not in self._known:
            own = ms(costs, op.mb % NEXT)
            usual = statistics.median(ms(costs, mb) for mb in range(costs.unequal))
            self._known[op, source] = usual / own if own else 1.0
        return self._known[op, source]


@dataclass
class Times:
    """All samples of some steps, in ns."""

    typical: Typical = field(default_factory=lambda: Typical(None))
    work: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))
    # of a microbatch, by stage; of vocabulary ops, by rank
    cost: dict[tuple[Kind, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    closing: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))  # column, stage
    links: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))  # ranks of the run
    lags: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))  # pipe, first stage
    moves: dict[Kind, list[int]] = field(default_factory=lambda: defaultdict(list))  # ns a transfer occupies its rank
    norm: list[int] = field(default_factory=list)  # the barrier without its waits: the longest of each step
    sums: list[int] = field(default_factory=list)  # of the all-reduce over all ranks after the last one arrived


def times_of(steps: Iterable[RecordedStep], costs: Costs | None = None) -> Times:
    """The times of these steps; `costs`: those of their plan, if microbatches are of unequal length."""
    times = Times(Typical(costs))
    for step in steps:
        for rank in range(len(step.ranks)):
            _rank(times, step, rank)
        for message in step.messages():
            if message.awaited:
                took = round(message.took * times.typical.sent(message))
                times.links[message.sender, message.receiver].append(took)
                edge = min(message.source.stage, message.taker.stage)
                times.lags[message.taker.pipe, edge].append(took)
        _barrier(times, step)
    return times


def _rank(found: Times, step: RecordedStep, rank: int) -> None:
    record = step.ranks[rank]
    waited = [0] * (len(record.ops) + 1)
    for wait in record.waits:
        waited[wait.op] += wait.ns
    around, slices, seat = 0, step.program.slices, step.program.topology.of(rank).pp
    whole: dict[tuple[Kind, int, int, int], list[int]] = defaultdict(list)  # by microbatch and pipe, of its slices
    grouped = groups(record.ops) if step.program.tp > 1 else {}  # run in turns: the time of one alone is not known
    for index, op in enumerate(record.ops):
        took, share = record.end[index] - record.start[index] - waited[index], found.typical.of(op)
        if op.share != WHOLE:  # its time depends on the layers frozen in this step
            around = 0
        elif op.kind.computes:
            found.work[op.kind, op.stage, rank].append(round(share * (record.end[index] - record.work[index])))
            place = seat if op.kind.unit_wide else op.stage
            if index not in grouped:
                whole[op.kind, place, op.mb, op.pipe].append(round(share * max(0, took)) + around)
            around = 0
        elif op.kind.is_transfer:
            around += max(0, took)
            found.moves[op.kind].append(max(0, took))
        elif op.kind.stage_wide and op.kind.row.lane is Lane.COMPUTE and op.kind.row.cost:
            found.closing[op.kind.row.cost, op.stage].append(max(0, took))
    for (kind, stage, *_), parts in whole.items():
        found.cost[kind, stage].append(sum(parts) * slices // len(parts))


def _barrier(found: Times, step: RecordedStep) -> None:
    """Adds the end of a step with a barrier: gradient norms, and the all-reduce once all ranks have arrived."""
    norms, comes, leaves = [], [], []
    for record in step.ranks:
        for index, op in enumerate(record.ops):
            if op.kind.is_barrier:
                waits = {cause: record.waited(cause).get(index, 0) for cause in (Cause.ALL, Cause.SUM)}
                norms.append(max(0, record.end[index] - record.start[index] - sum(waits.values())))
                comes.append(record.end[index] - waits[Cause.ALL])
                leaves.append(record.end[index])
    if norms:
        found.norm.append(max(norms))
        found.sums.append(max(0, max(leaves) - max(comes)))


def median_ms(samples: Sequence[int]) -> float:
    """The median of some ns, in ms. Raises StatisticsError if there are none."""
    return statistics.median(samples) / _MS


def with_messages(costs: Costs, times: Times) -> Costs:
    """`costs` with the measured times of messages in place of the predicted ones, if measured."""
    links = (
        {edge: _as_long(ms, times.lags.get((pipe, edge[0]))) for edge, ms in of.items()}
        for pipe, of in enumerate(costs.links)
    )
    return replace(costs, links=tuple(links))


def _as_long(ms: float | tuple[float, ...], samples: Sequence[int] | None) -> float | tuple[float, ...]:
    """Predicted times of messages, with the measured one for that of the median microbatch."""
    if not samples:
        return ms
    found, usual = median_ms(samples), statistics.median(ms) if isinstance(ms, tuple) else 0.0
    return tuple(one * found / usual if usual else found for one in ms) if isinstance(ms, tuple) else found
