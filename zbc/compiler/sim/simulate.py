"""Simulates the time of each op: an op starts as soon as its rank is free and its inputs exist.

A transfer is pure latency in parallel with compute (the time model of arXiv 2401.10241): a message arrives `link` ms
after its SEND; with `Costs.rendezvous`, after its SEND and the post of its buffer. With `Costs.occupies` a link carries
one message of a direction at a time, in the order of the SENDs. Collectives run in parallel with compute too, on a lane
of their own per rank, one after the other: one begins when all its ranks have come to it and have completed the one
before. The order of every lane is fixed, so one walk over the nodes of the graph, in the order that the proof found,
times them.

The two ops of a group start when both have their inputs, and their results exist when both have ended. The costs decide
how long a group takes; its time is shown as the first op and after it the second, each with its share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.cost.cost import Links as LinkTimes
from zbc.compiler.graph import Graph, build
from zbc.compiler.sim.links import Links, by_time
from zbc.errors import ZbcError
from zbc.ir import Op, Program
from zbc.job.throughput import balance, idle_rate
from zbc.ops import Lane

SAME = 1e-12  # times this close, relatively, are equal


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
    drain: float  # after its last op and its last collective
    sums: float = 0.0  # after its last op, until its last gradient or weight collective is completed


@dataclass(frozen=True)
class Timeline:
    """Start and end of every node of a graph, in ms; for an event, of the time it is going on. `closing`: ops that
    close a step ahead of the barrier take their time and count among the ops of their rank. Otherwise only ops that
    compute count, as papers compare them; closing a step then takes no time."""

    graph: Graph
    start: list[float]
    end: list[float]  # after the nodes, entries of `replay`: the start of each rank, and of the step
    closing: bool = False

    def __repr__(self) -> str:
        return f"<Timeline of {self.ranks} ranks: makespan {self.makespan:g} ms, span {self.span:g} ms>"

    def __iter__(self) -> Iterator[Span]:
        ops = self.graph.ops
        for rank in range(self.ranks):
            for i in self.ops(rank):
                yield Span(rank, ops[i], self.start[i], self.end[i])

    @property
    def ranks(self) -> int:
        return len(self.graph.first) - 1

    def ops(self, rank: int) -> list[int]:
        """The ops of a rank that count, as nodes, in order."""
        return self.graph.timed[rank] if self.closing else self.graph.computing[rank]

    def first_start(self, rank: int) -> float:
        mine = self.ops(rank)
        return self.start[mine[0]] if mine else 0.0

    def last_end(self, rank: int) -> float:
        mine = self.ops(rank)
        return self.end[mine[-1]] if mine else 0.0

    @cached_property
    def sums(self) -> tuple[Sum, ...]:
        """The collectives in parallel with compute, in the order in which they begin."""
        graph = self.graph
        found = []
        for event, ops in graph.met.items():
            op = graph.ops[ops[0]]
            if op.kind.is_collective and not op.kind.is_barrier:
                ranks = tuple(sorted(graph.rank(i) for i in ops))
                found.append(Sum(op, ranks, self.start[event], self.end[event]))
        return tuple(sorted(found, key=lambda one: one.start))

    @cached_property
    def _edges(self) -> tuple[list[float], list[float]]:
        opens, closes = ([edge(rank) for rank in range(self.ranks)] for edge in (self.first_start, self.last_end))
        for one in self.sums:
            for rank in one.ranks:
                opens[rank], closes[rank] = min(opens[rank], one.start), max(closes[rank], one.end)
        return opens, closes

    def closes(self, rank: int) -> float:
        """ms when a rank's last op and the last collective it takes part in are completed."""
        return self._edges[1][rank]

    def opens(self, rank: int) -> float:
        """ms when a rank's first op begins, or an earlier collective (of weights that its first op needs)."""
        return self._edges[0][rank]

    def waited_for(self, op: int) -> int:
        """The op on another rank that sent the last input of an op (or of its group), -1 for none."""
        last = max(self.graph.arrivals(op), key=self.end.__getitem__, default=-1)
        return self.graph.before[last] if last >= 0 else -1

    @cached_property
    def _busy(self) -> list[float]:
        return [sum([self.end[i] - self.start[i] for i in self.ops(rank)]) for rank in range(self.ranks)]

    def busy(self, rank: int) -> float:
        return self._busy[rank]

    @property
    def makespan(self) -> float:
        """First start to last end over all ranks: the time of a step with an optimizer barrier."""
        opens, closes = self._edges
        return max(closes) - min(opens)

    @property
    def span(self) -> float:
        """The longest own time of a rank: the time of a step in steady state without the barrier."""
        return max(self.closes(r) - self.opens(r) for r in range(self.ranks))

    @property
    def bubble_rate_makespan(self) -> float:
        return self._rate(self.makespan)

    @property
    def bubble_rate_span(self) -> float:
        return self._rate(self.span)

    @property
    def idle_rate(self) -> float:
        """The mean over ranks of 1 - busy / makespan."""
        return idle_rate(self._busy, self.makespan)

    @property
    def balance(self) -> float:
        """The mean work of a rank relative to the busiest rank's."""
        return balance(self._busy)

    def _rate(self, cost: float) -> float:
        """The share of `cost` in which even the busiest rank is idle."""
        return (cost - max(self._busy)) / cost if cost > 0 else 0.0

    def idle(self, rank: int) -> Idle:
        begin = min(self._edges[0])
        first, last, closes = self.first_start(rank), self.last_end(rank), self.closes(rank)
        message = last - first - self.busy(rank)
        return Idle(first - begin, message, begin + self.makespan - closes, closes - last)


def simulate(program: Program, costs: Costs) -> Timeline:
    """The timeline of a compute-only or complete program. Raises E201 if its order can never finish, E202 if an op
    needs a value that no op makes."""
    return run(build(program), costs)


def run(graph: Graph, costs: Costs, free_from: Sequence[float] | None = None) -> Timeline:
    """The timeline of a given graph; `free_from` is when each rank can begin, in ms."""
    return replay(graph, costs, lengths(graph, costs), free_from)


def steady_state(first: Timeline, costs: Costs, steps: int = 8) -> float:
    """ms of a step in steady state, when steps follow one another without a barrier, the `first` of them as given. Each
    rank starts the next step right after its own last op. The time between two ends of a rank converges after a few
    steps, and stays once it is the same for all ranks. It can exceed the span: a rank may have to wait for a late
    one."""
    timeline, ends, period = first, [0.0] * first.ranks, 0.0
    length = lengths(first.graph, costs)
    for step in range(steps):
        timeline = replay(first.graph, costs, length, ends) if step else first
        fresh = [max(timeline.closes(r), end) for r, end in enumerate(ends)]
        periods = [b - a for a, b in zip(ends, fresh, strict=True)]
        ends, period = fresh, max(periods)
        if period - min(periods) <= SAME * period:
            break
    return period


class Transfers(NamedTuple):
    """ms of the makespan if no message waits for its buffer, and if each does."""

    eager_makespan_ms: float
    rendezvous_makespan_ms: float

    @property
    def text(self) -> str:
        eager, late = self
        if late <= eager * (1 + SAME):
            return "no message comes later because it waits for its buffer"
        return f"{late / eager - 1:.1%} longer where a message waits for its buffer (NCCL, gloo) than where it does not"


def either_transfer(graph: Graph, costs: Costs) -> Transfers:
    """ms of a step of a complete program on both kinds of transports."""
    eager, late = (run(graph, costs.over(transfer)).makespan for transfer in ("eager", "rendezvous"))
    return Transfers(round(eager, 9), round(late, 9))


def lengths(graph: Graph, costs: Costs, *, closing: bool = False) -> list[float]:
    """ms of every node: of ops that take a rank's time, of messages and of the other events. Without `closing`, ops
    that close a step take no time, and no rank waits for the numbers that ranks agree with."""
    per_row = []  # of each part
    for row in graph.rows:
        counts = row.row.cost and (closing or not row.row.closes)
        place = row.rank if row.kind.unit_wide else row.stage
        parts = range(costs.unequal) if costs.unequal else (row.slice,)
        per_row.append([costs.paced(row.kind, row.pipe, place, part) if counts else 0.0 for part in parts])
    own = [ms if row.lane is Lane.COMPUTE else [0.0] * len(ms) for ms, row in zip(per_row, graph.rows, strict=True)]
    own.append([0.0] * (costs.unequal or 1))
    ops, row_of = graph.ops, graph.row_of
    if costs.unequal:
        found = [own[r][costs.part(op[2], 0)] for r, op in zip(row_of, ops, strict=True)]
    else:
        found = [own[r][0] for r in row_of]
    for i in graph.frozen:
        found[i] -= costs.frozen(ops[i])
    found += _of_messages(graph, costs.links, costs.of("hop") if closing else -math.inf)
    if costs.unequal:
        found += [max(per_row[row_of[i]][costs.part(ops[i][2], 0)] for i in met) for met in graph.met.values()]
    else:
        found += [max([per_row[row_of[i]][0] for i in met]) for met in graph.met.values()]
    return found


def _of_messages(graph: Graph, links: Sequence[LinkTimes], hop: float) -> list[float]:
    """The entry of `links` for each message by its edge; `hop` for a message of no edge."""
    layout, found = graph.layout, list[float]()
    for (_, message), base, stop in zip(layout.channels, layout.firsts, layout.stops, strict=True):
        ms = hop if message.edge < 0 else links[message.home][layout.edges[message.edge]]
        found += ms * ((stop - base) // len(ms)) if isinstance(ms, tuple) else [ms] * (stop - base)
    return found


def replay(
    graph: Graph,
    costs: Costs,
    length: Sequence[float],
    free_from: Sequence[float] | None = None,
    *,
    closing: bool = False,
) -> Timeline:
    """The timeline of a graph, given ms of every node. Raises E201 or E202."""
    order, done = graph.ran
    if not graph.finishes:
        raise _stuck(graph, done)
    ranks = len(graph.first) - 1
    start, end = [0.0] * len(length), [0.0] * len(length)
    # `before` of the first node of rank r leads here from the end of the list, `NOTHING` to the last entry.
    end += [*reversed(free_from or [0.0] * ranks), 0.0]
    before, ptr, pred = graph.before, graph.ptr, graph.pred
    link = Links(graph, costs) if costs.shared > 1 or costs.alone < 1 else None
    if link is not None and link.lane_of:
        _slowly(graph, costs, by_time(graph, end, posted=costs.rendezvous), list(length), start, end, link)
    elif graph.marks or graph.waits or costs.rendezvous or costs.occupies:
        _slowly(graph, costs, order, list(length), start, end)
    else:
        for i in order:
            time = end[before[i]]
            for k in pred[ptr[i] : ptr[i + 1]]:
                if end[k] > time:
                    time = end[k]
            start[i] = time
            end[i] = time + length[i]
    return Timeline(graph, start, end, closing)


def _slowly(
    graph: Graph,
    costs: Costs,
    order: Iterable[int],
    length: list[float],
    start: list[float],
    end: list[float],
    link: Links | None = None,
) -> None:
    """The walk with groups, and with messages that wait for more than their SEND: for events that bring their data, for
    the buffer, for the link. Copies that share a `link` to the host need an `order` by time."""
    marks, waits, first, late = set(graph.marks), graph.waits, len(graph.ops), costs.rendezvous
    stop = first + len(graph.posted)
    before, ptr, pred, posted = graph.before, graph.ptr, graph.pred, graph.posted
    busy = _of_messages(graph, costs.occupies, 0.0) if costs.occupies else []
    lines = graph.line_of if busy else []
    free = [0.0] * (1 + max(lines, default=0))
    shares = {mark: (length[mark + 1], length[mark + 2]) for mark in marks}
    for i in order:
        time = end[before[i]]
        for k in (*pred[ptr[i] : ptr[i + 1]], *waits[i]) if i in waits else pred[ptr[i] : ptr[i + 1]]:
            if end[k] > time:
                time = end[k]
        if first <= i < stop:
            if late and end[posted[i - first]] > time:
                time = end[posted[i - first]]
            if busy:
                line = lines[i - first]
                if free[line] > time:
                    time = free[line]
                free[line] = time + busy[i - first]
        elif i in marks:  # a group is one item: its ops begin with it, their results exist at its end
            length[i] = costs.pair(graph.ops[i + 1], graph.ops[i + 2], *shares[i])
            length[i + 1] = length[i + 2] = 0.0
        elif link is not None and i in link.lane_of:
            time, length[i] = link.copy(i, time, length[i])
        start[i] = time
        end[i] = time + length[i]
    for mark, (one, other) in shares.items():
        over, whole = end[mark], length[mark]
        start[mark + 1] = start[mark]
        end[mark + 1] = start[mark + 2] = over - whole * other / ((one + other) or 1.0)


def _stuck(graph: Graph, done: bytearray) -> ZbcError:
    """Why an order never finishes, in short; the checks give the details."""
    heads = [next((i for i in graph.mine(rank) if not done[i]), -1) for rank in range(len(graph.first) - 1)]
    found = [(i, _awaited(graph, done, i)) for i in heads if i >= 0]
    for i, other in found:
        if other < 0:
            text = f"program: {graph.ops[i]} on rank {graph.rank(i)} needs an op that no rank runs"
            return ZbcError("E202", text)
    details = [f"rank {graph.rank(i)}: {graph.ops[i]} waits for {graph.ops[other]}" for i, other in found[:8]]
    return ZbcError("E201", "deadlock: the order of ops can never finish", details=details)


def _awaited(graph: Graph, done: bytearray, op: int) -> int:
    """The op that starts, or makes, the awaited value of an op; -1 if there is none."""
    n, cells = len(graph.ops), graph.layout.cells
    nodes = [x for x in graph.pred[graph.ptr[op] : graph.ptr[op + 1]] if not done[x]]
    nodes += [cells[one.cell] for one in graph.unmet if one.op == op and cells[one.cell] >= 0]
    nodes += [behind for early, behind in graph.late if early == op]
    nodes += [graph.party[op]] if not nodes else []
    starts = [x if x < n else graph.met[x][0] if x in graph.met else graph.sender[x - n] for x in nodes]
    return min(starts, default=-1)
