"""When does each op run? An op starts as soon as its rank is free and its input is there.

A transfer is pure latency beside compute (the time model of arXiv 2401.10241): what a rank sends is at its neighbour
`comm` after the op that made it ended. One pass, O(ops): run each rank until it must wait, go on where the result is
needed.

The two ops of a group start when both have their input, and what they make is there when both have ended. How long a
group takes is up to the costs; its time is shown as the F and behind it the backward, each with its share.

Sums of gradients run beside compute too, on a channel of their own per rank, one after the other: a sum begins when all
its ranks have come to it and are done with the one before. What of them is not over with the last op adds to the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zbc.compiler.cost import Costs
from zbc.compiler.dag import Dag, build, with_meetings
from zbc.errors import ZbcError
from zbc.ir import AHEAD, Kind, Op, Program

SAME = 1e-12  # times this close, relatively, are one


class Span(NamedTuple):
    """One op of a timeline; times in ms."""

    rank: int
    op: Op
    start: float
    end: float


class Sum(NamedTuple):
    """One collective of a timeline, on all of `ranks` at once; times in ms."""

    op: Op
    ranks: tuple[int, ...]
    start: float
    end: float


class Idle(NamedTuple):
    """Idle ms of one rank within the makespan, by cause. They and the busy time add up to the makespan."""

    warm_up: float  # before its first op
    message: float  # between ops, waiting for a tensor of another rank
    drain: float  # after its last op and its last sum
    sums: float = 0.0  # after its last op, until its last sum of gradients (or gather of weights) is over


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of every compute op, in ms, and of the sums that run beside them."""

    dag: Dag
    start: list[float]
    end: list[float]
    sums: tuple[Sum, ...] = ()

    def __iter__(self) -> Iterator[Span]:
        for i, op in enumerate(self.dag.ops):
            yield Span(self.dag.rank[i], op, self.start[i], self.end[i])

    @property
    def ranks(self) -> int:
        return len(self.dag.first) - 1

    def first_start(self, rank: int) -> float:
        i = self.dag.first[rank]
        return self.start[i] if i < self.dag.first[rank + 1] else 0.0

    def last_end(self, rank: int) -> float:
        i = self.dag.first[rank + 1]
        return self.end[i - 1] if i > self.dag.first[rank] else 0.0

    def closes(self, rank: int) -> float:
        """When its last op and the last sum it takes part in are over."""
        return max([self.last_end(rank), *(one.end for one in self.sums if rank in one.ranks)])

    def summed(self, rank: int) -> float:
        """When the last sum of gradients it takes part in is over."""
        gradients = [one.end for one in self.sums if rank in one.ranks and one.op.kind is not Kind.GATHER]
        return max(gradients, default=0.0)

    def busy(self, rank: int) -> float:
        ops = range(self.dag.first[rank], self.dag.first[rank + 1])
        return sum(self.end[i] - self.start[i] for i in ops)

    @property
    def makespan(self) -> float:
        """First start to last end over all ranks: a step whose optimizer is a barrier."""
        return max(self.closes(r) for r in range(self.ranks)) - min(self.first_start(r) for r in range(self.ranks))

    @property
    def span(self) -> float:
        """The longest own time of a rank: a step in steady state without the barrier."""
        return max(self.closes(r) - self.first_start(r) for r in range(self.ranks))

    @property
    def bubble_rate_makespan(self) -> float:
        return self._rate(self.makespan)

    @property
    def bubble_rate_span(self) -> float:
        return self._rate(self.span)

    def _rate(self, cost: float) -> float:
        """Share of `cost` in which even the busiest rank is idle."""
        return (cost - max(self.busy(r) for r in range(self.ranks))) / cost if cost > 0 else 0.0

    def idle(self, rank: int) -> Idle:
        begin = min(self.first_start(r) for r in range(self.ranks))
        first, last, closes = self.first_start(rank), self.last_end(rank), self.closes(rank)
        message = last - first - self.busy(rank)
        return Idle(first - begin, message, begin + self.makespan - closes, closes - last)


def simulate(program: Program, costs: Costs) -> Timeline:
    """The timeline of a compute-only or complete program. Raises E201 if its order can never finish."""
    return run(build(program), program, costs)


def step_ms(program: Program, costs: Costs, objective: str, timeline: Timeline | None = None) -> float:
    """What a step costs by an objective: "makespan", "span", or "period" (see `steady_state`)."""
    timeline = timeline or simulate(program, costs)
    if objective == "period":
        return steady_state(timeline.dag, program, costs)
    return timeline.makespan if objective == "makespan" else timeline.span


def steady_state(dag: Dag, program: Program, costs: Costs, steps: int = 8) -> float:
    """What a step costs, in ms, when steps follow one another without a barrier.

    Each rank starts the next step right after its own last op; the time between two ends of a rank settles after a few
    steps, and once it is the same for all ranks it stays so. Not always the span: a rank may have to wait for one that
    is late.
    """
    ranks = len(dag.first) - 1
    ends, period = [0.0] * ranks, 0.0
    length, lag = lengths(dag, costs), lags(dag, costs)
    for _ in range(steps):
        timeline = replay(dag, costs, length, lag, ends)
        fresh = [max(timeline.closes(r), ends[r]) for r in range(ranks)]
        periods = [b - a for a, b in zip(ends, fresh, strict=True)]
        ends, period = fresh, max(periods)
        if period - min(periods) <= SAME * period:
            break
    return period


def with_sums(timeline: Timeline, program: Program, costs: Costs) -> Timeline:
    """The timeline of `program`, which is that of `timeline` with collectives put in."""
    dag = with_meetings(timeline.dag, program)
    free = [timeline.last_end(r) for r in range(timeline.ranks)]
    return replace(timeline, dag=dag, sums=_sums(dag, costs, timeline.end, free))


def run(dag: Dag, program: Program, costs: Costs, free_from: Sequence[float] | None = None) -> Timeline:
    """The same with the dag at hand; `free_from` is when each rank can begin, in ms."""
    return replay(dag, costs, lengths(dag, costs), lags(dag, costs), free_from)


def replay(
    dag: Dag, costs: Costs, length: Sequence[float], lag: Sequence[float], free_from: Sequence[float] | None = None
) -> Timeline:
    """The same with ms of every op and of the transfer before it; `costs` is asked for groups and sums only."""
    ops, source, target = dag.ops, dag.source, dag.target
    start, end = [0.0] * len(ops), [-1.0] * len(ops)
    paired = dag.paired or bytes(len(ops))
    ready = [-1.0] * len(ops) if dag.paired else end  # when what an op makes is there
    ranks = len(dag.first) - 1
    at, free = dag.first[:ranks], [0.0] * ranks if free_from is None else list(free_from)
    stack = list(range(ranks - 1, -1, -1))
    while stack:
        r = stack.pop()
        i, time, stop = at[r], free[r], dag.first[r + 1]
        while i < stop:
            j = source[i]
            if j >= 0:
                arrival = ready[j]
                if arrival < 0.0:
                    break
                arrival += lag[i]
                if arrival > time:
                    time = arrival
            if paired[i]:
                j = source[i + 1]
                if j >= 0:
                    if ready[j] < 0.0:
                        break
                    time = max(time, ready[j] + lag[i + 1])
                start[i], whole = time, costs.pair(length[i], length[i + 1])
                time += whole
                end[i] = start[i + 1] = time - whole * length[i + 1] / ((length[i] + length[i + 1]) or 1.0)
                end[i + 1] = ready[i] = ready[i + 1] = time
                stack += [dag.rank[k] for k in target[i : i + 2] if k >= 0 and _awaits(at[dag.rank[k]], k, paired)]
                i += 2
                continue
            start[i] = time
            time += length[i]
            end[i] = ready[i] = time
            k = target[i]
            if k >= 0 and _awaits(at[dag.rank[k]], k, paired):
                stack.append(dag.rank[k])
            i += 1
        at[r], free[r] = i, time
    stuck = [r for r in range(ranks) if at[r] < dag.first[r + 1]]
    if stuck:
        details = [f"rank {r}: {ops[at[r]]} waits for {ops[source[at[r]]]}" for r in stuck[:8]]
        raise ZbcError("E201", "deadlock: the order of ops can never finish", details=details)
    return Timeline(dag, start, end, _sums(dag, costs, end, free))


def _awaits(at: int, op: int, paired: bytes) -> bool:
    """Whether a rank that stands at op `at` may be waiting for the input of `op`."""
    return at == op or (at == op - 1 and paired[at] == 1)


def _sums(dag: Dag, costs: Costs, end: Sequence[float], free: Sequence[float]) -> tuple[Sum, ...]:
    """When the collectives run; `free` is when each rank has ended its last op.

    Weights are gathered behind the barrier, after all sums; without one behind TENTATIVE, which waits for those of its
    rank.
    """
    if not dag.meetings:
        return ()
    found: list[Sum] = []
    over = [0.0] * len(free)  # per rank, the end of its last collective
    summed = [0.0] * len(free)  # and of its last sum of gradients
    ahead = any(op.kind is Kind.TENTATIVE for op in dag.ops)
    for op, behind in sorted(dag.meetings, key=lambda meeting: meeting.op.kind is Kind.GATHER):
        if op.kind is Kind.GATHER and ahead:
            begin = max(max(end[i], summed[rank] + costs.duration(dag.ops[i])) for rank, i in behind)
        elif op.kind is Kind.GATHER:
            begin = max(*free, *(one.end for one in found if one.op.kind is not Kind.GATHER), 0.0)
        else:
            begin = max(end[i] if i >= 0 else 0.0 for _, i in behind)
        begin = max(begin, *(over[rank] for rank, _ in behind))
        close = begin + costs.duration(op)
        for rank, _ in behind:
            over[rank] = close
            summed[rank] = close if op.kind is not Kind.GATHER else summed[rank]
        found.append(Sum(op, tuple(rank for rank, _ in behind), begin, close))
    return tuple(found)


def lengths(dag: Dag, costs: Costs) -> list[float]:
    """ms of every op."""
    known: dict[tuple[Kind, int, int], float] = {}
    result = []
    for op in dag.ops:
        key = (op[0], op[1], op[4])
        ms = known.get(key)
        if ms is None:
            ms = known[key] = costs.duration(op)
        result.append(ms)
    return result


def lags(dag: Dag, costs: Costs) -> list[float]:
    """ms from the end of the op's source to its own earliest start."""
    result, hop = [0.0] * len(dag.ops), costs.of("hop")
    for j, i in enumerate(dag.target):
        if i >= 0:
            op = dag.ops[i]
            result[i] = hop if op.kind in AHEAD else costs.link(op[3], dag.ops[j][1], op[1])
    return result
