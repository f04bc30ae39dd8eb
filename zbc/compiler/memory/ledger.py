"""One ledger of memory: what each op of a rank takes and gives back, and when. All numbers of memory are reads of it.

A value lives from the op that writes it to the op that frees it, by the rows of zbc/ops.py. An op that only takes
activations (F) changes what is there as it begins: what it takes from an edge becomes part of what it keeps, and its
result is there before it ends. All other ops change it as they end; what one takes and gives in one category counts as
the difference (B turns `kept` into `left`). What an op of another lane writes is there when its rank comes to it (the
buffer of a RECV), and what it frees is there until its event is over (the tensor of a SEND: until the receiver has
posted a buffer and the transfer is over; what a collective of words takes from a rank: until all have come to it).

    activations   kept, left: in units and bytes
    transit       act and grad on the edges: tensors (as units) and bytes
    kv            keys, values and their gradients, which the slices of a microbatch share: the same
    vocabulary    of words that all ranks share: a unit's logits, and what ranks tell each other for it
    workspace     what an op needs while it runs, from its beginning to its end
    gradients     from the first backward that makes them to the step of their stage; where they are shared out to the
                  next SCATTER or REDUCE, and the rank's part of them from the first of these to the step
    weights       that a rank gathers and frees, from GATHER to FREE
    messages      of a GATHER: from it to the first op that reads what it brings; of a SCATTER, and of a REDUCE where
                  gradients are shared out: while it is under way
    host          values that were copied to the host

Within a rank ops run one after another, so all but the end of a SEND follows from the order alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from zbc.compiler.cost.cost import CacheKey, Costs, Size, key_of
from zbc.compiler.graph import Graph
from zbc.compiler.sim.simulate import Timeline
from zbc.ir import Op
from zbc.ops import VALUES, At, Kind, Lane, Ref, Row, Scope, experts_of

HELD = ("activations", "kv")  # categories of what is held of microbatches between F and W
WIDE = 2**20  # gradients are widened to 8 bytes in pieces of so many elements, to sum their squares


class Delta(NamedTuple):
    """What there is more of a category, or less."""

    category: str
    units: float
    bytes: float


class Entry(NamedTuple):
    """What one op of a rank changes, and which of the tensors that the rank sent before leave by then."""

    op: int  # a node of the graph
    begin: tuple[Delta, ...]
    end: tuple[Delta, ...]
    gone: tuple[float, float] = (0.0, 0.0)  # tensors, and their bytes, that have left by the end of the op
    still: tuple[float, float] = (
        0.0,
        0.0,
    )  # of those, what counts while it runs: the shares of its time they are there


class Event(NamedTuple):
    """A rank takes, or gives back, activations; `op` is a node of the graph."""

    ms: float
    op: int
    units: float
    bytes: float


class Change(NamedTuple):
    """What an op does to the activations its rank holds, whatever the time."""

    units: float
    bytes: float
    flight: int  # microbatches that begin or cease to be kept
    logits: float  # bytes, of those, of what there is for every word of the vocabulary
    kv: Size  # units and bytes, of those, of keys, values and their gradients that slices share
    begins: bool  # it counts as the op begins


class Activations:
    """What ops do to activations, by rows and costs; asked once per kind and stage."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._known: dict[CacheKey, Change | None] = {}

    def of(self, op: Op) -> Change | None:
        """None for an op that changes nothing."""
        key = key_of(op)
        if key not in self._known:
            self._known[key] = self._change(op)
        return self._known[key]

    def _change(self, op: Op) -> Change | None:
        made, freed = _held(op.kind.row.writes), _held(op.kind.row.frees)
        if not made and not freed:
            return None
        costs = self._costs
        flight = ("kept" in made) - ("kept" in freed)
        size = costs.bytes_at(op.stage, op.slice)
        logits = size.logits if size else 0.0
        kv = costs.held_kv(op)
        return Change(costs.held(op), costs.held_bytes(op), flight, flight * logits, kv, begins=not freed)


def _held(refs: Sequence[Ref]) -> list[str]:
    return [ref.what for ref in refs if VALUES[ref.what].memory == "activations"]


def ledger(timeline: Timeline, costs: Costs) -> Iterator[Iterator[Entry]]:
    """Per rank the entries of its ops that change something, in order, of a program whose timeline this is."""
    clock = _Clock(timeline, costs)
    for rank in range(timeline.ranks):
        clock.set(rank)
    return (_RankLedger(timeline.graph, rank, clock, costs).entries() for rank in range(timeline.ranks))


def activations(timeline: Timeline, rank: int, costs: Costs) -> Iterator[Event]:
    """Of one rank what it takes and gives of activations, and when; nothing of them depends on other ranks."""
    for entry, deltas, ms in _timed(timeline, rank, costs):
        found = [delta for delta in deltas if delta.category in HELD]
        if found:
            units, size = sum(delta.units for delta in found), sum(delta.bytes for delta in found)
            yield Event(ms, entry.op, units, size)


def changes(timeline: Timeline, rank: int, costs: Costs) -> Iterator[tuple[float, str, float]]:
    """(ms, category, bytes) of what one rank takes and gives of activations and of weights that come and go."""
    for _, deltas, ms in _timed(timeline, rank, costs):
        for name, among in (("activations", HELD), ("weights", ("weights",))):
            found = [delta.bytes for delta in deltas if delta.category in among]
            if found:
                yield ms, name, sum(found)


def _timed(timeline: Timeline, rank: int, costs: Costs) -> Iterator[tuple[Entry, tuple[Delta, ...], float]]:
    """The entries of one rank, their beginnings and their ends with the times of both."""
    clock = _Clock(timeline, costs)
    clock.set(rank)
    for entry in _RankLedger(timeline.graph, rank, clock, costs).entries():
        yield entry, entry.begin, clock.begin[entry.op]
        yield entry, entry.end, clock.end[entry.op]


class _Clock:
    """When each op begins and ends, in ms.

    The barrier ends with the last op of all. Of ops that compute nothing for a microbatch only those that close a step
    ahead of it take time here: what is sent before them leaves meanwhile.
    """

    def __init__(self, timeline: Timeline, costs: Costs) -> None:
        self._timeline, self._costs = timeline, costs
        self.begin, self.end = ([0.0] * len(timeline.graph.ops) for _ in range(2))

    def over(self, op: int) -> float:
        """When the event of an op is over."""
        return self._timeline.end[self._timeline.graph.party[op]]

    def set(self, rank: int) -> None:
        """Read the clock of one rank."""
        timeline, graph, now = self._timeline, self._timeline.graph, 0.0
        begin, end = self.begin, self.end
        for i in graph.mine(rank):
            kind = graph.ops[i][0]
            if kind.computes:
                begin[i], now = timeline.start[i], timeline.end[i]
            else:
                begin[i] = now
                if kind.is_barrier:
                    now = max(now, timeline.makespan)
                elif kind.row.closes == "ahead":
                    now += self._costs.duration(graph.ops[i])
            end[i] = now


_Deltas = tuple[Delta, ...]


class _Effect(NamedTuple):
    """What ops of one kind, stage and pipe do, whatever the microbatch."""

    lane: Lane
    begin: tuple[Delta, ...]
    end: tuple[Delta, ...]
    begin_first: tuple[Delta, ...]  # where they make the first gradients
    end_first: tuple[Delta, ...]
    size: float = 0.0  # bytes of what leaves: of a SEND, and of a collective whose result is not here
    link: float | None = None  # of a SEND, the ms it takes; None where nothing leaves


class _RankLedger:
    """The entries of one rank."""

    def __init__(self, graph: Graph, rank: int, clock: _Clock, costs: Costs) -> None:
        self.graph, self.rank, self.clock, self.costs = graph, rank, clock, costs
        self.activations = Activations(costs)
        self.mine = graph.program.placement.stages_of(rank)
        self.rows = graph.layout.rows
        self.leaving: list[tuple[float, int, float]] = []  # (when a SEND is over, its op, bytes)
        self.coming: dict[int, float] = {}  # stage -> bytes of the messages that bring its weights
        self.scattering: list[tuple[float, float]] = []  # (when a sum of shared gradients is over, bytes)
        self.parts: dict[int, float] = {}  # stage -> bytes of the rank's part of its gradients
        self.readers = {kind for kind, row in self.rows.items() if any(ref.what == "weights" for ref in row.reads)}
        self.effects: dict[tuple[CacheKey, int], _Effect] = {}

    def entries(self) -> Iterator[Entry]:
        graph, effects, leaving, start, over = self.graph, self.effects, self.leaving, self.clock.begin, self.clock.end
        shared = graph.program.sharded and not graph.layout.ahead and self.costs.bytes is not None
        gradients = Gradients([graph.ops[i] for i in graph.mine(self.rank)], self.costs)
        there = gradients.bytes + sum(one.state.gradients for one in self.costs.shares[:1])
        if there:
            yield Entry(graph.first[self.rank], (Delta("gradients", 0.0, there),), ())
        for i in graph.mine(self.rank):
            op = graph.ops[i]
            effect = effects.get((key_of(op), op[3])) or self._effect(op)
            if effect.lane is Lane.COLLECTIVE and effect.size:  # what others take is there until they have
                heappush(leaving, (self.clock.over(i), i, effect.size))
            if effect.lane is Lane.LINK:
                if effect.link is not None:
                    self._send(i, effect)
                elif effect.begin:
                    yield Entry(i, effect.begin, ())
                continue
            first, more = gradients.after(op, taken=shared and graph.layout.deals[op[1]])
            begin, end = (effect.begin_first, effect.end_first) if first else (effect.begin, effect.end)
            if first or more:
                end = (*end, Delta("gradients", 0.0, more))
            if op[0] is Kind.GATHER or op[0] is Kind.FREE:
                begin, end = self._weights(op, begin, end)
            elif self.coming and op[0] in self.readers:
                for owner in (op[1], experts_of(op[1])):
                    begin = self._came(owner, begin) if owner in self.coming else begin
            if shared:
                begin, end = self._shared_out(i, op, begin, end)
            if leaving and leaving[0][0] <= over[i]:
                yield Entry(i, begin, end, *self._gone(start[i], over[i]))
            else:
                yield Entry(i, begin, end)

    def _shared_out(self, i: int, op: Op, begin: _Deltas, end: _Deltas) -> tuple[_Deltas, _Deltas]:
        """What sums of gradients that are shared out change: they take a message and the rank's part of the result."""
        waits = op.kind is Kind.VALIDATE or (op.kind is Kind.STEP and self.graph.program.flushless)
        now = math.inf if waits else self.clock.begin[i]  # for all of them
        over = [size for ms, size in self.scattering if ms <= now]
        if over:
            self.scattering = [one for one in self.scattering if one[0] > now]
            begin = (Delta("messages", 0.0, -sum(over)), *begin)
        if op.kind is Kind.STEP:
            return begin, (*end, Delta("gradients", 0.0, -self.parts.pop(op.stage, 0.0)))
        if op.kind not in (Kind.SCATTER, Kind.REDUCE) or not self._shared(op):
            return begin, end
        assert self.costs.bytes is not None
        message = self.costs.bytes_owned(op.stage).summed
        part = message / self.graph.program.holders(op)
        again = op.stage in self.parts
        self.parts[op.stage] = part
        over_at = self.clock.over(i) if self.graph.program.scatters else math.inf
        self.scattering.append((over_at, message + part * again))
        # The gradients move into the message, and are gone before the rank's part of the sum has its room.
        mine = Delta("messages" if again else "gradients", 0.0, part)
        return (*begin, Delta("messages", 0.0, message)), (*end, mine)

    def _shared(self, op: Op) -> bool:
        """Whether a REDUCE or SCATTER leaves the rank its part of the gradients, in place of all of them."""
        program, layout = self.graph.program, self.graph.layout
        return program.sharded and not layout.ahead and layout.deals[op.stage] and self.costs.bytes is not None

    def _weights(self, op: Op, begin: _Deltas, end: _Deltas) -> tuple[_Deltas, _Deltas]:
        """What a GATHER before the ops that need it, or a FREE, changes. Those that come behind the tentative steps of
        ranks are over with them."""
        costs, layout = self.costs, self.graph.layout
        if costs.bytes is None or layout.ahead or not layout.deals[op.stage]:
            return begin, end
        size = costs.bytes_owned(op.stage)
        freed = size.freed if layout.program.resident else 0.0
        if op.kind is Kind.FREE:
            return (Delta("messages", 0.0, -self.coming.pop(op.stage, 0.0)),), (Delta("weights", 0.0, -freed),)
        self.coming[op.stage] = size.gathered
        return (Delta("weights", 0.0, freed - self._casts(op.stage)), Delta("messages", 0.0, size.gathered)), ()

    def _came(self, owner: int, begin: _Deltas) -> _Deltas:
        """What changes as an op first reads what a GATHER brings: casts are made while the messages are still there."""
        casts = Delta("weights", 0.0, self._casts(owner))
        return (*([casts] if casts.bytes else []), Delta("messages", 0.0, -self.coming.pop(owner)), *begin)

    def _casts(self, owner: int) -> float:
        """Bytes of the casts of an owner's weights, where these come and go and the casts only once they are there."""
        program = self.graph.program
        known = program.resident > 0 and not program.one_sided
        return self.costs.bytes_owned(owner).casts if known else 0.0

    def _effect(self, op: Op) -> _Effect:
        row = self.rows[op.kind]
        if row.lane is Lane.LINK:
            found = self._transfer(op)
        else:
            both = (*self._deltas(op, row, first=False), *self._deltas(op, row, first=True))
            found = _Effect(row.lane, *both, size=self._given(op, row))
        self.effects[key_of(op), op.pipe] = found
        return found

    def _deltas(self, op: Op, row: Row, *, first: bool) -> tuple[tuple[Delta, ...], tuple[Delta, ...]]:
        """What an op changes as it begins and as it ends; `first`: where it makes the first gradients."""
        change, deltas = self.activations.of(op), list[Delta]()
        made, freed = self._tensors(op, row.writes, row), self._tensors(op, row.frees, row)
        if made or freed:
            deltas.append(Delta("transit", float(len(made) - len(freed)), sum(made) - sum(freed)))
        if change is not None:
            kv = change.kv
            deltas.append(Delta("activations", change.units - kv.units, change.bytes - kv.bytes))
            if kv.units or kv.bytes:
                deltas.append(Delta("kv", *kv))
        if self.costs.shares and (words := self._words(op, row)):
            given = self._given(op, row)
            deltas.append(Delta("vocabulary", 0.0, words))
            deltas += [Delta("transit", 1.0, given)] if given else []
        if row.lane is Lane.COLLECTIVE and row.scope is Scope.EVERY:  # its buffer is there once it is started
            return tuple(deltas), ()
        if row.lane is Lane.OUT or row.lane is Lane.BACK:  # what a copy writes is there from its beginning
            return tuple(deltas), ()
        need = self._need(op, first=first)
        begin = [Delta("workspace", 0.0, need)] if need else []
        end = [Delta("workspace", 0.0, -need)] if need else []
        side = begin if change is not None and change.begins else end
        side += deltas
        return tuple(begin), tuple(end)

    def _need(self, op: Op, *, first: bool) -> float:
        if op.kind is Kind.REDUCE and self._shared(op):
            return 0.0  # see `_shared_out`
        if not op.kind.computes:
            return _own(op, self.costs, self.mine)
        if op.kind.row.scope is Scope.EVERY:
            return self.costs.share_need(op)
        change = self.activations.of(op)
        if change is not None and change.begins:
            looked = 0.0 if self.graph.program.placement.sources(op.stage) else self.costs.share_need(op)
            return self.costs.more_bytes(op, first=first) + looked
        return self.costs.rise_bytes(op, first=first)

    def _words(self, op: Op, row: Row) -> float:
        """Bytes that an op makes, less those it frees, of the words that all ranks share."""
        layout, sizes = self.graph.layout, 0.0
        for refs, sign in ((row.writes, 1), (row.frees, -1)):
            for ref in refs:
                if VALUES[ref.what].scope == "share" and layout.is_at(ref.at, self.rank, op.stage, row):
                    sizes += sign * self.costs.share_of(ref.what, op.slice)
        return sizes

    def _given(self, op: Op, row: Row) -> float:
        """Of what a collective frees of these, what its result does not take the room of: others take it."""
        return max(0.0, -self._words(op, row)) if row.lane is Lane.COLLECTIVE and row.scope is Scope.EVERY else 0.0

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
                    found.append(self._size(edge[0], op.slice))
        return found

    def _size(self, source: int, part: int) -> float:
        """Bytes of the tensor of a slice on an edge from a stage."""
        size = self.costs.bytes_at(source, part)
        return size.behind if size else 0.0

    def _keeps_result(self, stage: int) -> bool:
        """Whether a stage's output is an activation, which its own backward needs as well, and not on its way."""
        return self.costs.bytes is not None and self.costs.bytes[stage].sent > 0

    def _transfer(self, op: Op) -> _Effect:
        """Nothing for a message that is not on its way: there is none, or it stays for a backward."""
        nothing = _Effect(Lane.LINK, (), (), (), ())
        message = self.graph.program.placement.message(op)
        if message is None:
            return nothing
        size = self._size(message.edge[0], op.slice)
        if op.kind.is_recv:
            return nothing._replace(begin=(Delta("transit", 1.0, size),))
        if message.forward and self._keeps_result(message.source):
            return nothing
        return nothing._replace(size=size, link=self.costs.link(op.pipe, message.source, message.sink))

    def _send(self, i: int, effect: _Effect) -> None:
        """It is over when its receiver has posted a buffer, and the transfer has come there."""
        graph, begin = self.graph, self.clock.begin
        receiver = graph.receiver[graph.party[i] - len(graph.ops)]
        posted = begin[receiver] if receiver >= 0 else 0.0
        heappush(self.leaving, (max(begin[i], posted) + (effect.link or 0.0), i, effect.size))

    def _gone(self, begin: float, end: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """What has left by the end of an op, and the shares of it that count while the op runs."""
        tensors = size = units = still = 0.0
        while self.leaving and self.leaving[0][0] <= end:
            ms, _, each = heappop(self.leaving)
            share = (ms - begin) / (end - begin) if ms > begin else 0.0
            tensors, size, units, still = tensors + 1, size + each, units + share, still + share * each
        return (tensors, size), (units, still)


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
        self._there: dict[int, float] = {}  # bytes by owner
        self._whole: set[int] = set()  # stages that have all
        self._lent = 0.0  # what the last stage has made of the first one's
        self.bytes = 0.0
        for op in ops:
            if op.kind is Kind.COMMIT and op.stage >= 0:
                self._have(op.stage, whole=True)

    def after(self, op: Op, *, taken: bool = False) -> tuple[bool, float]:
        """Go on after an op: whether it makes gradients where there are none, and how many bytes more there are.
        `taken`: a sum takes them, and leaves a part."""
        kind, stage, before = op[0], op[1], self.bytes
        if kind in _MAKE_PART or (kind in _MAKE_LEFT and stage not in self._there):
            if stage in self._whole:
                return False, 0.0
            self._have(stage, whole=kind in _MAKE_PART)
            return True, self.bytes - before
        if kind is Kind.STEP or kind is Kind.COMMIT or (taken and kind in (Kind.SCATTER, Kind.REDUCE)):
            self.bytes -= self._there.pop(stage, 0.0)
            self._whole.discard(stage)
        return False, self.bytes - before

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
        if whole and self._costs.experts:
            own, experts = self._costs.experts[stage].gradients, experts_of(stage)
            self.bytes += own - self._there.get(experts, 0.0)
            self._there[experts] = own


def _own(op: Op, costs: Costs, mine: Sequence[int]) -> float:
    """What an op that computes nothing for a microbatch needs while it runs; `mine` are the stages of its rank."""
    if costs.bytes is None:
        return 0.0
    if op.kind in _SQUARES:
        return 8 * min(max((costs.bytes[s].largest for s in mine), default=0.0), WIDE)
    return _bytes_of(op, costs, op.kind.row.needs)


def lasting(op: Op, costs: Costs) -> float:
    """Of that, what is still there after the op: what it has begun goes on beside the ops that follow."""
    return 0.0 if costs.bytes is None else _bytes_of(op, costs, op.kind.row.goes_on)


def _bytes_of(op: Op, costs: Costs, names: str) -> float:
    """Of the owner's bytes, the sum of those with these names."""
    if not names:
        return 0.0
    size = costs.bytes_owned(op.stage)
    return float(sum(getattr(size, name) for name in names.split()))


_SQUARES = frozenset({Kind.VALIDATE, Kind.NORM})  # of gradients, summed for their norm
