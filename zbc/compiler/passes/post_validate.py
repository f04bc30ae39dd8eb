"""Closes the step without a barrier: step tentatively, agree while the next step warms up (arXiv 2401.10241, 4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from zbc.compiler.cost.cost import Costs
from zbc.compiler.graph import Graph
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import SAME, Timeline, lengths, replay
from zbc.ir import COPY, Kind, Op, Program

SETTLES = 4  # steps until the ranks are in steady state, at most
SLACK = 0.25  # of a forward: slack for a message before its op


@dataclass(frozen=True, slots=True)
class PostValidate:
    """Replace the barrier at the end of a step by ops in the warm-up of the next one.

    A step ends with TENTATIVE, which waits for no rank. The forwards of the next step run on the tentative weights; in
    parallel the gradient norm of the previous step goes from rank to rank (NORM) and the verdict back (VERDICT). REDO
    repeats these forwards if the verdict differs from the assumed one, and COMMIT makes the step final before the first
    backward adds to its gradients.

                          NORM
        F s0 m0           F s0 m0
        F s0 m1           VERDICT
        F s0 m2     ->    REDO
        BW s0 m0          F s0 m1
        ...               F s0 m2
                          COMMIT s0
                          BW s0 m0
                          ...
                          TENTATIVE s0

    The places of NORM and VERDICT depend on the arrival of their messages, by costs: after the last forward that need
    not wait for them. REDO comes as early as its forwards can be run again by themselves, so that little is lost when
    they are; all messages between them are received before it.

    If the replicas of a stage share out its step, GATHER collects the tentative weights after TENTATIVE.
    """

    name: ClassVar[str] = "post-validate"

    def run(self, program: Program, context: Context) -> Program:
        norm, verdict, redo, commit = _places(context.graph, program, _positive(context.costs))
        twice = _repeated(program, redo)
        ranks = []
        for rank, ops in enumerate(program.ranks):
            owners = program.owners(rank)
            inserted: dict[int, list[Op]] = {}
            for kind, place in ((Kind.NORM, norm), (Kind.VERDICT, verdict), (Kind.REDO, redo)):
                inserted.setdefault(place[rank], []).append(Op(kind, 0))
            inserted.setdefault(commit[rank], []).extend(Op(Kind.COMMIT, owner) for owner in owners)
            woven = _receive_in_time(_sum_in_time(_weave(ops, inserted)), twice)
            ranks.append([*woven, *(op for owner in owners for op in _tentative(program, owner))])
        return program.with_ranks(ranks, by=self.name)


def _tentative(program: Program, owner: int) -> list[Op]:
    gather = Op(Kind.GATHER, owner)
    return [Op(Kind.TENTATIVE, owner), *([gather] if program.sharded and program.shared(gather) else [])]


# ---- places --------------------------------------------------------------------------------------------------


def _places(graph: Graph, program: Program, costs: Costs) -> tuple[list[int], ...]:
    """Per rank the compute ops before which NORM, VERDICT, REDO and COMMIT are inserted; their number means the end."""
    ranks = len(program.ranks)
    reach = forwards(graph)
    closing = [[op for owner in program.owners(r) for op in _tentative(program, owner)] for r in range(ranks)]
    tentative = [sum(map(costs.duration, ops)) for ops in closing]
    ends = [0.0] * ranks
    length = lengths(graph, costs)
    for _ in range(SETTLES):
        timeline, last = replay(graph, costs, length, ends), ends  # `last`: when each rank ended the previous step
        ends = [timeline.closes(r) + tentative[r] for r in range(ranks)]
        periods = [b - a for a, b in zip(last, ends, strict=True)]
        if max(periods) - min(periods) <= SAME * max(periods):
            break
    hop = costs.of("hop")
    hops = _Hops(timeline, last, reach, costs)
    norm, down = [0] * ranks, 0.0
    for r in range(ranks):
        norm[r], down = hops.place(r, last[r] if r == 0 else down + hop, 0, hops.late_norm[r])
    verdict, up = [0] * ranks, 0.0
    for r in reversed(range(ranks)):
        arrival = down if r == ranks - 1 else up + hop
        verdict[r], up = hops.place(r, arrival, norm[r], hops.late_verdict[r], own=r == ranks - 1)
    return norm, verdict, closed(graph, verdict), [leading(graph, r) for r in range(ranks)]


def _positive(costs: Costs) -> Costs:
    """The costs with a minimum time for all ops: then an op's dependencies begin, and so come, before it."""
    names = [name for name in ("f", "b", "w", "bw") if name in costs.ms]
    least = 1e-6 * (max(ms for name in ("f", "b", "w") for ms in costs.column(name)) or 1.0)
    return costs.with_ms(**{name: costs.each(lambda ms: max(ms, least), name) for name in names})


class _Hops:
    """The forwards of a step in steady state, and the latest arrival of norm and verdict at each rank."""

    def __init__(self, timeline: Timeline, last: Sequence[float], reach: Sequence[int], costs: Costs) -> None:
        self.mine, self.last, self.reach = timeline.graph.computing, last, reach
        self.start, self.end = timeline.start, timeline.end
        ranks, hop = len(reach), costs.of("hop")
        self.late_verdict = [self._begin(r, reach[r]) for r in range(ranks)]
        for r in range(1, ranks):
            self.late_verdict[r] = min(self.late_verdict[r], self.late_verdict[r - 1] - hop)
        self.late_norm = [self.late_verdict[-1] - (ranks - 1 - r) * hop for r in range(ranks)]

    def place(self, rank: int, arrival: float, least: int, latest: float, *, own: bool = False) -> tuple[int, float]:
        """(the op after the insertion, its time) for a message that arrives at `arrival`: with slack, if there is time.
        `own`: it is from this very rank, and needs no slack."""
        slack = 0.0 if own or (rank == 0 and least == 0) else SLACK * self._forward(rank)
        position = self._first(rank, arrival + slack, least)
        time = max(arrival, self._free(rank, position))
        if time > latest:
            position = self._first(rank, arrival, least)
            time = max(arrival, self._free(rank, position))
        return position, time

    def _first(self, rank: int, time: float, least: int) -> int:
        """The first op of the warm-up that starts no earlier than `time`."""
        for k in range(least, self.reach[rank]):
            if self._begin(rank, k) >= time:
                return k
        return max(least, self.reach[rank])

    def _begin(self, rank: int, k: int) -> float:
        nodes = self.mine[rank]
        return self.start[nodes[k]] if k < len(nodes) else self._free(rank, k)

    def _free(self, rank: int, k: int) -> float:
        """The end of the op before the k-th."""
        return self.last[rank] if k == 0 else self.end[self.mine[rank][k - 1]]

    def _forward(self, rank: int) -> float:
        lengths = [self.end[i] - self.start[i] for i in self.mine[rank][: self.reach[rank]]]
        return sum(lengths) / len(lengths) if lengths else 0.0


# ---- insertion ----------------------------------------------------------------------------------------------


def _weave(ops: Sequence[Op], inserted: dict[int, list[Op]]) -> list[Op]:
    """The ops with `inserted[k]` right after the k-th compute op and its sends; 0 is the beginning."""
    listed: list[Op] = []
    count, done = 0, -1
    for op in ops:
        kind = op[0]
        if done < count and not kind.is_send:
            done = count
            listed += inserted.get(count, ())
        listed.append(op)
        count += kind.computes
    if done < count:
        listed += inserted.get(count, ())
    return listed


def _sum_in_time(ops: Sequence[Op]) -> list[Op]:
    """Moves reductions after COMMIT: a replica of a stage without a microbatch would reduce at once."""
    commit = max(i for i, op in enumerate(ops) if op[0] is Kind.COMMIT) + 1
    head, tail = ops[:commit], ops[commit:]
    return [*(op for op in head if not op.kind.sums), *(op for op in head if op.kind.sums), *tail]


def _repeated(program: Program, reach: Sequence[int]) -> set[Op]:
    """The RECVs of the sends of the first `reach[r]` compute ops of each rank."""
    receives = set[Op]()
    for rank, ops in enumerate(program.ranks):
        made = {op.key for op in islice((op for op in ops if op[0].computes), reach[rank])}
        for op in ops:
            if op[0] is Kind.SEND_F and op.key in made:
                message = program.placement.message(op)
                receives |= {program.placement.recv(message)} if message is not None else set()
    return receives


def _receive_in_time(ops: Sequence[Op], twice: set[Op]) -> list[Op]:
    """Receives messages that may come twice before REDO, and all others after it; nothing is offloaded before the
    forwards that made it are known to be valid."""
    redo = next(i for i, op in enumerate(ops) if op[0] is Kind.REDO)
    head, tail = ops[:redo], ops[redo + 1 :]
    late = [op for op in head if op[0] in COPY or (op[0].is_recv and op not in twice)]
    early = [op for op in tail if op[0].is_recv and op in twice]
    if late:
        head = [op for op in head if op[0] not in COPY and (not op[0].is_recv or op in twice)]
    if early:
        tail = [op for op in tail if not op[0].is_recv or op not in twice]
    return [*head, *early, ops[redo], *late, *tail]


# ---- the warm-up: forwards that ranks can run before they know whether the previous step is valid ----------------
# A *reach* is, per rank, a number of its first compute ops; closed if all that these depend on are among them.


def forwards(graph: Graph) -> list[int]:
    """The largest closed reach of forwards alone: no backward precedes them, on any rank, directly or not."""
    reach, place = [leading(graph, rank) for rank in range(len(graph.computing))], _ranked(graph)
    for op in graph.ran[0]:  # after all that it depends on
        rank, k = place.get(op, (0, reach[0]))
        if k < reach[rank] and any(at >= reach[peer] for peer, at in _needs(graph, place, op)):
            reach[rank] = k
    return reach


def leading(graph: Graph, rank: int) -> int:
    """The number of forwards, none overlapping a backward, at the start of a rank's ops."""
    nodes = graph.computing[rank]
    return next((k for k, i in enumerate(nodes) if not graph.ops[i].kind.is_forward or i in graph.group_of), len(nodes))


def closed(graph: Graph, reach: Sequence[int]) -> list[int]:
    """The smallest closed reach that covers `reach`."""
    covered, place = list(reach), _ranked(graph)
    for op in reversed(graph.ran[0]):  # after all that depends on it
        rank, k = place.get(op, (0, covered[0]))
        for peer, at in _needs(graph, place, op) if k < covered[rank] else ():
            covered[peer] = max(covered[peer], at + 1)
    return covered


_Ranked = dict[int, tuple[int, int]]  # op -> its rank, and its place among the compute ops there


def _ranked(graph: Graph) -> _Ranked:
    return {i: (rank, k) for rank, nodes in enumerate(graph.computing) for k, i in enumerate(nodes)}


def _needs(graph: Graph, place: _Ranked, op: int) -> Iterator[tuple[int, int]]:
    """Yields the places of an op's dependencies on other ranks."""
    for message in graph.arrivals(op):
        sender = graph.before[message]
        if sender in place:
            yield place[sender]
