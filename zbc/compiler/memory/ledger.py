"""One ledger of memory: what each op of a rank takes and gives back, and when. All numbers of memory are reads of it.

A value lives from the op that writes it to the op that frees it, by the rows of zbc/ops.py. An op that only takes
activations (F) changes what is there as it begins: what it takes from an edge becomes part of what it keeps, and its
result is there before it ends. All other ops change it as they end; what one takes and gives in one category counts as
the difference (B turns `kept` into `left`). What an op of another lane writes is there when its rank comes to it (the
buffer of a RECV), and what it frees is there until its event is over (the tensor of a SEND: until the receiver has
posted a buffer and the transfer is over).

    activations   kept, left: in units and bytes
    transit       act and grad on the edges: tensors (as units) and bytes
    workspace     what an op needs while it runs, from its beginning to its end
    gradients     from the first backward that makes them to the step of their stage
    host          values that were copied to the host

Within a rank ops run one after another, so all but the end of a SEND follows from the order alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from heapq import heappop, heappush
from typing import NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.cost.stage_bytes import StageBytes
from zbc.compiler.graph import Graph
from zbc.compiler.sim.simulate import Timeline
from zbc.ir import Op
from zbc.ops import VALUES, At, Kind, Lane, Ref, Row

WIDE = 2**20  # gradients are widened to 8 bytes in pieces of so many elements, to sum their squares


class Moment(IntEnum):
    """When an event counts, seen from the op beside it in the ledger."""

    BEGIN = 0  # as the op begins
    WITHIN = 1  # while it runs, at its own time: a tensor that leaves
    END = 2  # as it ends


class Event(NamedTuple):
    """A rank takes, or gives back, something; `op` is a node of the graph."""

    ms: float
    op: int
    phase: Moment
    category: str
    units: float
    bytes: float


class RankEvents(NamedTuple):
    """The events of one rank, and when each of its ops begins and ends, in ms."""

    times: list[tuple[float, float]]
    events: list[Event]


class Change(NamedTuple):
    """What an op does to the activations its rank holds, whatever the time."""

    units: float
    bytes: float
    flight: int  # microbatches that begin or cease to be kept
    logits: float  # bytes, of those, of what there is for every word of the vocabulary
    begins: bool  # it counts as the op begins


class Activations:
    """What ops do to activations, by rows and costs; asked once per kind and stage."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._known: dict[tuple[Kind, int], Change | None] = {}

    def of(self, op: Op) -> Change | None:
        """None for an op that changes nothing."""
        key = op[0], op[1]
        if key not in self._known:
            self._known[key] = self._change(op)
        return self._known[key]

    def _change(self, op: Op) -> Change | None:
        made, freed = _held(op.kind.row.writes), _held(op.kind.row.frees)
        if not made and not freed:
            return None
        costs = self._costs
        flight = ("kept" in made) - ("kept" in freed)
        logits = costs.bytes[op.stage].logits if costs.bytes else 0.0
        return Change(costs.held(op), costs.held_bytes(op), flight, flight * logits, begins=not freed)


def _held(refs: Sequence[Ref]) -> list[str]:
    return [ref.what for ref in refs if VALUES[ref.what].memory == "activations"]


def ledger(timeline: Timeline, costs: Costs) -> Iterator[RankEvents]:
    """The events of each rank, in the order in which they happen, of a program whose timeline this is.

    One rank at a time: those of all ranks together are several times as large as the program.
    """
    graph = timeline.graph
    times = [_times(timeline, rank, costs) for rank in range(timeline.ranks)]
    posted = {
        graph.party[i]: times[rank][i - graph.first[rank]][0]
        for rank in range(timeline.ranks)
        for i in graph.mine(rank)
        if graph.ops[i].kind.is_recv
    }
    for rank in range(timeline.ranks):
        yield RankEvents(times[rank], _RankLedger(graph, rank, times[rank], posted, costs).events())


def activations(timeline: Timeline, rank: int, costs: Costs) -> Iterator[Event]:
    """Of one rank what it takes and gives of activations; nothing of them depends on other ranks."""
    events = _RankLedger(timeline.graph, rank, _times(timeline, rank, costs), {}, costs).events()
    return (event for event in events if event.category == "activations")


def _times(timeline: Timeline, rank: int, costs: Costs) -> list[tuple[float, float]]:
    """When each op of a rank begins and ends, in ms.

    The barrier ends with the last op of all. Of ops that compute nothing for a microbatch only those that close a step
    ahead of it take time here: what is sent before them leaves meanwhile.
    """
    graph, now, result = timeline.graph, 0.0, []
    for i in graph.mine(rank):
        kind = graph.ops[i].kind
        if kind.computes:
            begin, now = timeline.start[i], timeline.end[i]
        elif kind.is_barrier:
            begin, now = now, max(now, timeline.makespan)
        elif kind.row.closes == "ahead":
            begin, now = now, now + costs.duration(graph.ops[i])
        else:
            begin = now
        result.append((begin, now))
    return result


class _Effect(NamedTuple):
    """What ops of one kind, stage and pipe do, whatever the microbatch."""

    lane: Lane
    change: Change | None
    tensors: float  # that it adds to what is on its way at its rank, and their bytes
    size: float
    need: float  # bytes while it runs, beyond what there is before it (a backward: and is there as it ends)
    need_first: float  # where it makes the first gradients


class _RankLedger:
    """The events of one rank."""

    def __init__(
        self, graph: Graph, rank: int, times: Sequence[tuple[float, float]], posted: dict[int, float], costs: Costs
    ) -> None:
        self.graph, self.rank, self.times, self.posted, self.costs = graph, rank, times, posted, costs
        self.activations = Activations(costs)
        self.mine = graph.program.placement.stages_of(rank)
        self.leaving: list[tuple[float, int, float]] = []  # (when a SEND is over, its op, bytes)
        self.effects: dict[tuple[Kind, int, int], _Effect] = {}
        self.out: list[Event] = []
        self.ways: dict[tuple[Kind, int, int], tuple[float, float | None] | None] = {}

    def events(self) -> list[Event]:
        graph, first = self.graph, self.graph.first[self.rank]
        gradients = Gradients([graph.ops[i] for i in graph.mine(self.rank)], self.costs)
        if gradients.bytes:
            self.out.append(Event(0.0, first, Moment.BEGIN, "gradients", 0.0, gradients.bytes))
        for i in graph.mine(self.rank):
            op, (begin, end) = graph.ops[i], self.times[i - first]
            effect = self.effects.get((op[0], op[1], op[3])) or self._effect(op)
            if effect.lane is Lane.LINK:
                self._transfer(i, op, begin)
                continue
            if effect.lane is Lane.OUT or effect.lane is Lane.BACK:
                self._copy(i, op, begin)
                continue
            if self.leaving and self.leaving[0][0] <= begin:
                self._gone(i, begin, Moment.BEGIN)
            self._op(i, op, effect, begin, end, gradients)
        return self.out

    def _op(self, i: int, op: Op, effect: _Effect, begin: float, end: float, gradients: Gradients) -> None:
        change, before, makes = effect.change, gradients.bytes, gradients.makes(op)
        need = effect.need_first if makes else effect.need
        at_once = change is not None and change.begins
        ms, phase = (begin, Moment.BEGIN) if at_once else (end, Moment.END)
        changes = list[Event]()
        if effect.tensors or effect.size:
            changes.append(Event(ms, i, phase, "transit", effect.tensors, effect.size))
        if change is not None:
            changes.append(Event(ms, i, phase, "activations", change.units, change.bytes))
        if need:
            self.out.append(Event(begin, i, Moment.BEGIN, "workspace", 0.0, need))
        if at_once:
            self.out += changes
        if self.leaving and self.leaving[0][0] <= end:
            self._gone(i, end, Moment.WITHIN)
        if need:
            self.out.append(Event(end, i, Moment.END, "workspace", 0.0, -need))
        if not at_once:
            self.out += changes
        gradients.after(op)
        if makes or gradients.bytes != before:
            self.out.append(Event(end, i, Moment.END, "gradients", 0.0, gradients.bytes - before))

    def _effect(self, op: Op) -> _Effect:
        row, change = op.kind.row, self.activations.of(op)
        made, taken = self._tensors(op, row.writes, row), self._tensors(op, row.frees, row)
        need = [self._need(op, first=first) for first in (False, True)]
        found = _Effect(row.lane, change, float(len(made) - len(taken)), sum(made) - sum(taken), *need)
        self.effects[op.kind, op.stage, op.pipe] = found
        return found

    def _need(self, op: Op, *, first: bool) -> float:
        if not op.kind.computes:
            return _own(op, self.costs, self.mine)
        change = self.activations.of(op)
        if change is not None and change.begins:
            return self.costs.more_bytes(op, first=first)
        return self.costs.rise_bytes(op, first=first)

    # ---- what travels ------------------------------------------------------------------------------------------

    def _tensors(self, op: Op, refs: Sequence[Ref], row: Row) -> list[float]:
        """The bytes of each tensor on an edge that an op writes or frees."""
        placement, found = self.graph.program.placement, list[float]()
        for ref in refs:
            if VALUES[ref.what].scope != "edge":
                continue
            out = ref.at is At.SINKS
            others = placement.sinks(op.stage) if out else placement.sources(op.stage)
            for other in others:
                edge = (op.stage, other) if out else (other, op.stage)
                crosses = placement.crosses(*edge, op.pipe)
                if crosses and not self.graph.layout.explicit:
                    continue  # no transfer says how long it stays
                by_maker = (ref.what == "act") == out
                if not (ref.what == "act" and (by_maker or not crosses) and self._keeps_result(edge[0])):
                    found.append(self._size(edge[0]))
        return found

    def _size(self, source: int) -> float:
        """Bytes of the tensor on an edge from a stage."""
        return self.costs.bytes[source].behind if self.costs.bytes else 0.0

    def _keeps_result(self, stage: int) -> bool:
        """Whether a stage's output is an activation, which its own backward needs as well, and not on its way."""
        return self.costs.bytes is not None and self.costs.bytes[stage].sent > 0

    def _transfer(self, i: int, op: Op, begin: float) -> None:
        kind, stage, _, pipe, _ = op
        if (kind, stage, pipe) not in self.ways:
            self.ways[kind, stage, pipe] = self._way(op)
        way = self.ways[kind, stage, pipe]
        if way is None:
            return
        size, link = way
        if link is None:
            self.out.append(Event(begin, i, Moment.BEGIN, "transit", 1.0, size))
        else:
            over = max(begin, self.posted.get(self.graph.party[i], begin)) + link
            heappush(self.leaving, (over, i, size))

    def _way(self, op: Op) -> tuple[float, float | None] | None:
        """Bytes of the message of a transfer, and the ms it takes to leave, None where it comes; None for a message
        that is not on its way: there is none, or it stays for a backward."""
        message = self.graph.program.placement.message(op)
        if message is None:
            return None
        size = self._size(message.edge[0])
        if op.kind.is_recv:
            return size, None
        if message.forward and self._keeps_result(message.source):
            return None
        return size, self.costs.link(op.pipe, message.source, message.sink)

    def _gone(self, i: int, until: float, phase: Moment) -> None:
        """What has left by a time."""
        while self.leaving and self.leaving[0][0] <= until:
            ms, _, size = heappop(self.leaving)
            self.out.append(Event(ms, i, phase, "transit", -1.0, -size))

    def _copy(self, i: int, op: Op, begin: float) -> None:
        """A copy to the host, or back: what it writes is there from its beginning."""
        change = self.activations.of(op)
        if change is not None:
            self.out.append(Event(begin, i, Moment.BEGIN, "activations", change.units, change.bytes))


_MAKE_PART, _MAKE_LEFT = (
    frozenset(kind for kind in Kind if any(ref.what == what for ref in kind.row.writes)) for what in ("part", "left")
)


class Gradients:
    """Bytes of gradients that a rank has before and after its ops; B makes a few, BW or W all others.

    They are there until the step of their stage, which without a barrier comes after the next step's first forwards.
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
        if op.kind in _MAKE_PART:
            return op.stage not in self._whole
        return op.kind in _MAKE_LEFT and op.stage not in self._there

    def after(self, op: Op) -> None:
        """Go on after an op."""
        if op.kind in (Kind.STEP, Kind.COMMIT):
            self.bytes -= self._there.pop(op.stage, 0.0)
            self._whole.discard(op.stage)
        elif op.kind.computes and self.makes(op):
            self._have(op.stage, whole=op.kind in _MAKE_PART)

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
    if costs.bytes is None:
        return 0.0
    if op.kind in _SQUARES:
        return 8 * min(max((costs.bytes[s].largest for s in mine), default=0.0), WIDE)
    return costs.tied if op.kind is Kind.TIE else _WORK.get(op.kind, _no_work)(costs.bytes[op.stage])


def lasting(op: Op, costs: Costs) -> float:
    """Of that, what is still there after the op: what it has begun goes on beside the ops that follow."""
    if costs.bytes is None or op.kind not in (Kind.REDUCE, Kind.GATHER):
        return 0.0
    return costs.bytes[op.stage].pending if op.kind is Kind.REDUCE else costs.bytes[op.stage].gathered


def _no_work(size: StageBytes) -> float:
    return 0.0


_SQUARES = frozenset({Kind.VALIDATE, Kind.NORM})  # of gradients, summed for their norm
_WORK: dict[Kind, Callable[[StageBytes], float]] = {
    Kind.REDUCE: lambda size: size.summed,  # gradients move into one message
    Kind.GATHER: lambda size: max(0.0, size.gathered - size.gradients),  # as a rule less than those that are gone
    Kind.STEP: lambda size: size.step,
    Kind.COMMIT: lambda size: size.step,
    Kind.TENTATIVE: lambda size: size.tentative + size.step,
}


def within(timeline: Timeline, rank: int, own: RankEvents) -> Iterator[tuple[int, list[Event], tuple[float, float]]]:
    """Every op of a rank with its events, and of what leaves while it runs the (units, bytes) that still count: each
    for the share of the op's time that it is there."""
    (times, events), first = own, timeline.graph.first[rank]
    k = 0
    for i in timeline.graph.mine(rank):
        start, units, size = k, 0.0, 0.0
        while k < len(events) and events[k].op == i:
            k += 1
        mine = events[start:k]
        for event in mine:
            if event.phase is Moment.WITHIN:
                begin, end = times[i - first]
                if event.ms > begin:
                    share = (event.ms - begin) / (end - begin)
                    units, size = units - share * event.units, size - share * event.bytes
        yield i, mine, (units, size)
