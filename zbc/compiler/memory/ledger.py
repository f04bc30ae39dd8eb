"""One ledger of memory: the bytes each op of a rank allocates and frees, and when. All memory numbers are read from it.

A value lives from the op that writes it to the op that frees it, by the rows of zbc/ops.py. An op that only allocates
activations (F) changes memory as it begins: its incoming edge tensor becomes part of its kept activations, and its
result exists before it ends. All other ops change memory as they end; allocations and frees of one op in one category
count as the difference (B turns `kept` into `left`). A value written by an op of another lane exists when its rank
comes to the op (the buffer of a RECV), and a value freed by one exists until its event is completed (the tensor of a
SEND, until it is posted and received; the input of a vocabulary collective, until all ranks have come to it).

    activations   kept, left: in units and bytes
    transit       act and grad on the edges: tensors (as units) and bytes
    kv            keys, values and their gradients, which the slices of a microbatch share: in units and bytes
    vocabulary    of vocabulary shards: a unit's logits, and the statistics ranks exchange for it
    workspace     temporaries of an op while it runs, from its beginning to its end
    gradients     from the first backward that makes them to the step of their stage; if they are shared out to the
                  next SCATTER or REDUCE, and the rank's part of them from the first of these to the step
    weights       that a rank gathers and frees, from GATHER to FREE
    messages      of a GATHER: from it to the first op that computes with the gathered weights, or to the end of the
                  step; of a SCATTER, and of a REDUCE if gradients are shared out: while it is under way
    host          values that were offloaded to the host

Within a rank ops run one after another, so all but the end of a SEND follows from the order alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from zbc.compiler.cost.cost import CacheKey, Costs, Size
from zbc.compiler.graph import Graph
from zbc.compiler.sim.simulate import Timeline
from zbc.ir import Op
from zbc.ops import TIED, VALUES, WORDS, At, Kind, Lane, Ref, Row, Scope, experts_of

HELD = ("activations", "kv")  # categories of microbatch state between F and W
WIDE = 2**20  # elements of gradients widened to 8 bytes at a time, to sum their squares


class Delta(NamedTuple):
    """Change of a category, in units and bytes; negative for a release."""

    category: str
    units: float
    bytes: float


class Entry(NamedTuple):
    """Changes by one op of a rank, and earlier sends of the rank whose tensors leave by then."""

    op: int  # a node of the graph
    begin: tuple[Delta, ...]
    end: tuple[Delta, ...]
    change: Change | None  # to activations, all of it
    gone: tuple[float, float] = (0.0, 0.0)  # tensors, and their bytes, that have left by the end of the op
    still: tuple[float, float] = (0.0, 0.0)  # of those, weighted by the share of the op's time for which they exist


class Point(NamedTuple):
    """What a rank holds from `ms` on; `op` is the node of the graph that changed it."""

    ms: float
    op: int
    units: float
    activations: float  # bytes
    weights: float  # bytes of those that are gathered and freed


class Change(NamedTuple):
    """Change by an op to its rank's activations, whatever the time."""

    units: float
    bytes: float
    flight: int  # microbatches kept from here on, less those kept no longer
    logits: float  # the part of `bytes` with an entry per word of the vocabulary
    kv: Size  # the part in keys, values and their gradients, which slices share
    begins: bool  # the change counts as the op begins, not as it ends


class Activations:
    """Changes of activations by ops, from rows and costs; computed once per kind and stage."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._known: dict[CacheKey, Change | None] = {}

    def of(self, op: Op) -> Change | None:
        """The change by an op; None if there is none."""
        key = self._costs.key(op)
        if key not in self._known:
            self._known[key] = self._change(op)
        return self._known[key]

    def _change(self, op: Op) -> Change | None:
        made, freed = _held(op.kind.row.writes), _held(op.kind.row.frees)
        if not made and not freed:
            return None
        costs = self._costs
        flight = ("kept" in made) - ("kept" in freed)
        logits = costs.bytes_at(op.stage, costs.part(op.mb, op.slice)).logits
        kv = costs.held_kv(op)
        return Change(costs.held(op), costs.held_bytes(op), flight, flight * logits, kv, begins=not freed)


def _held(refs: Sequence[Ref]) -> list[str]:
    return [ref.what for ref in refs if VALUES[ref.what].memory == "activations"]


def ledger(timeline: Timeline, costs: Costs) -> Iterator[Iterator[Entry]]:
    """Per rank the entries of its ops with a change, in order, of the program with this timeline."""
    clock = _Clock(timeline, costs, range(timeline.ranks))
    return (_RankLedger(timeline.graph, rank, clock, costs).entries() for rank in range(timeline.ranks))


def over_time(timeline: Timeline, rank: int, costs: Costs) -> Iterator[Point]:
    """Yields one rank's activations and gathered weights at each change of them; none depends on other ranks."""
    clock = _Clock(timeline, costs, [rank])
    units = held = weights = 0.0
    for entry in _RankLedger(timeline.graph, rank, clock, costs).entries():
        for deltas, at in ((entry.begin, clock.begin), (entry.end, clock.end)):
            mine = [delta for delta in deltas if delta.category in HELD]
            gathered = [delta.bytes for delta in deltas if delta.category == "weights"]
            if mine or gathered:
                units, held = units + sum(one.units for one in mine), held + sum(one.bytes for one in mine)
                weights += sum(gathered)
                yield Point(at[entry.op], entry.op, units, held, weights)


class _Clock:
    """ms of the beginning and the end of each op of some ranks.

    The barrier ends with the last op of all. Of ops without compute for a microbatch only those that close a step ahead
    of the barrier take time here: earlier sends leave meanwhile.
    """

    def __init__(self, timeline: Timeline, costs: Costs, ranks: Iterable[int]) -> None:
        self._timeline, self._costs = timeline, costs
        self.begin, self.end = ([0.0] * len(timeline.graph.ops) for _ in range(2))
        for rank in ranks:
            self._set(rank)

    def over(self, op: int) -> float:
        """ms when the event of an op is completed."""
        return self._timeline.end[self._timeline.graph.party[op]]

    def _set(self, rank: int) -> None:
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
    """Effects of ops of one kind, stage and pipe that make the first gradients, or do not, whatever the microbatch."""

    lane: Lane
    begin: tuple[Delta, ...]
    end: tuple[Delta, ...]
    change: Change | None = None
    size: float = 0.0  # bytes that leave: of a SEND, and of a collective with its result elsewhere
    link: float | None = None  # ms of a SEND; None if nothing leaves


class _RankLedger:
    """The entries of one rank."""

    def __init__(self, graph: Graph, rank: int, clock: _Clock, costs: Costs) -> None:
        self.graph, self.rank, self.clock, self.costs = graph, rank, clock, costs
        self.activations = Activations(costs)
        self.mine = graph.program.placement.stages_of(rank)
        self.rows = graph.layout.rows
        self.leaving: list[tuple[float, int, float]] = []  # (ms when a SEND is completed, its op, bytes)
        self.coming: dict[int, float] = {}  # stage -> bytes of the messages that bring its weights
        self.scattering: list[tuple[float, _Deltas]] = []  # (ms when a sum of gradients completes, changes then)
        self.parts: dict[int, float] = {}  # stage -> bytes of the rank's part of its gradients
        self.readers = {kind for kind, row in self.rows.items() if row.with_weights}

    def entries(self) -> Iterator[Entry]:
        graph, leaving, row_of, unequal = self.graph, self.leaving, self.graph.row_of, self.costs.unequal
        effects = dict[tuple[int, int, bool], _Effect]()
        start, over = self.clock.begin, self.clock.end
        tying = [stage for stage in self.mine if stage in graph.program.tying]
        gradients = Gradients(tying, self.costs)
        # Names kinds: a row does not say how bytes move between gradients, messages and shares.
        for commit in (graph.ops[i] for i in graph.mine(self.rank) if graph.ops[i][0] is Kind.COMMIT):
            gradients.of_last_step(commit, taken=self._shared(commit))
            if self._shared(commit):
                self.parts[commit.stage] = self._part(commit)
        there = gradients.bytes + self.costs.bytes_owned(WORDS).gradients + sum(self.parts.values())
        if there:
            yield Entry(graph.first[self.rank], (Delta("gradients", 0.0, there),), (), None)
        for i in graph.mine(self.rank):
            op = graph.ops[i]
            first, more = gradients.after(op, taken=self._shared(op)) if op[0] in _GRADS else (False, 0.0)
            alike = row_of[i], op[2] if unequal else 0, first
            effect = effects.get(alike)
            if effect is None:
                effect = effects[alike] = self._effect(op, first=first)
            if effect.lane is Lane.COLLECTIVE and effect.size:  # data for others exists until it completes
                heappush(leaving, (self.clock.over(i), i, effect.size))
            if effect.lane is Lane.LINK:
                if effect.link is not None:
                    self._send(i, effect)
                elif effect.begin:
                    yield Entry(i, effect.begin, (), None)
                continue
            begin, end = effect.begin, effect.end
            if first or more:
                end = (*end, Delta("gradients", 0.0, more))
            if op[0] is Kind.GATHER or op[0] is Kind.FREE:
                begin, end = self._weights(op, begin, end)
            elif self.coming and op[0] in self.readers:
                for owner in (op[1], experts_of(op[1])):
                    begin = self._came(owner, begin) if owner in self.coming else begin
            if graph.program.sharded:
                begin, end = self._shared_out(i, op, begin, end)
            if leaving and leaving[0][0] <= over[i]:
                yield Entry(i, begin, end, effect.change, *self._gone(start[i], over[i]))
            else:
                yield Entry(i, begin, end, effect.change)

    def _shared_out(self, i: int, op: Op, begin: _Deltas, end: _Deltas) -> tuple[_Deltas, _Deltas]:
        """Changes by reductions of sharded gradients: they allocate a message and the rank's part of the result."""
        waits = op.kind in _SETTLES or (op.kind is Kind.STEP and self.graph.program.flushless)
        now = math.inf if waits else self.clock.begin[i]  # for all of them
        over = [delta for ms, deltas in self.scattering if ms <= now for delta in deltas]
        if over:
            self.scattering = [one for one in self.scattering if one[0] > now]
            begin = (*over, *begin)
        if op.kind is Kind.STEP or op.kind is Kind.COMMIT:
            return begin, (*end, Delta("gradients", 0.0, -self.parts.pop(op.stage, 0.0)))
        if op.kind not in (Kind.SCATTER, Kind.REDUCE) or not self._shared(op):
            return begin, end
        message, program = self.costs.bytes_owned(op.stage).summed, self.graph.program
        part, again = self._part(op), op.stage in self.parts
        among = program.holders(op) > program.holders(Op(Kind.GATHER, op.stage))
        self.parts[op.stage] = part
        gone, mine = Delta("messages", 0.0, -message), Delta("messages" if again else "gradients", 0.0, part)
        less = (mine._replace(bytes=-part),) * again  # it is added to the earlier part
        over_at = self.clock.over(i) if program.scatters else math.inf
        self.scattering.append((over_at, (mine, gone, *less) if among else (gone, *less)))
        # The gradients move into the message, and are freed before the rank's part of the sum is allocated. Where more
        # ranks sum them than share out the weights, all get the sum, and copy their part as it completes.
        return (*begin, Delta("messages", 0.0, message)), end if among else (*end, mine)

    def _part(self, op: Op) -> float:
        """Bytes of the gradients of an op's stage that a rank keeps, of those that share out their update."""
        owners = self.graph.program.holders(Op(Kind.GATHER, op.stage))  # ranks that gather the parts they own
        return self.costs.bytes_owned(op.stage).summed / owners

    def _shared(self, op: Op) -> bool:
        """Whether a REDUCE or SCATTER leaves the rank its part of the gradients, in place of all of them."""
        graph = self.graph
        return graph.program.sharded and graph.layout.deals[op.stage] and self.costs.bytes is not None

    def _weights(self, op: Op, begin: _Deltas, end: _Deltas) -> tuple[_Deltas, _Deltas]:
        """Changes by a GATHER before the ops that need it, or after a tentative step until the end; or by a FREE."""
        costs, layout = self.costs, self.graph.layout
        if costs.bytes is None or not layout.deals[op.stage]:
            return begin, end
        size = costs.bytes_owned(op.stage)
        freed = size.freed if layout.program.resident else 0.0
        if op.kind is Kind.FREE:
            return (Delta("messages", 0.0, -self.coming.pop(op.stage, 0.0)),), (Delta("weights", 0.0, -freed),)
        self.coming[op.stage] = size.gathered
        return (Delta("weights", 0.0, freed - self._casts(op.stage)), Delta("messages", 0.0, size.gathered)), ()

    def _came(self, owner: int, begin: _Deltas) -> _Deltas:
        """Changes as an op first reads gathered weights: casts are made while the messages still exist."""
        casts = Delta("weights", 0.0, self._casts(owner))
        return (*([casts] if casts.bytes else []), Delta("messages", 0.0, -self.coming.pop(owner)), *begin)

    def _casts(self, owner: int) -> float:
        """Bytes of the casts of an owner's weights, if they are gathered and freed, and cast only after a GATHER."""
        program = self.graph.program
        known = program.resident > 0 and not program.one_sided
        return self.costs.bytes_owned(owner).casts if known else 0.0

    def _effect(self, op: Op, *, first: bool) -> _Effect:
        row = self.rows[op.kind]
        if row.lane is Lane.LINK:
            return self._transfer(op)
        return _Effect(row.lane, *self._deltas(op, row, first=first), self.activations.of(op), self._given(op, row))

    def _deltas(self, op: Op, row: Row, *, first: bool) -> tuple[tuple[Delta, ...], tuple[Delta, ...]]:
        """Changes by an op as it begins and as it ends; `first`: it makes the first gradients."""
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
        if row.lane is Lane.COLLECTIVE and row.scope is Scope.EVERY:  # its buffer exists from its start
            return tuple(deltas), ()
        if row.lane is Lane.OUT or row.lane is Lane.BACK:  # a copy's result is allocated as it begins
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
            return self.costs.need_bytes(op) + looked
        return self.costs.need_bytes(op, first=first)

    def _words(self, op: Op, row: Row) -> float:
        """Bytes of vocabulary-shard values that an op makes, less the bytes it frees."""
        layout, sizes = self.graph.layout, 0.0
        for refs, sign in ((row.writes, 1), (row.frees, -1)):
            for ref in refs:
                if VALUES[ref.what].scope == "share" and layout.is_at(ref.at, self.rank, op.stage, row):
                    sizes += sign * self.costs.share_of(ref.what, self.costs.part(op.mb, op.slice))
        return sizes

    def _given(self, op: Op, row: Row) -> float:
        """The bytes of these that a collective frees beyond the size of its result: other ranks receive them."""
        return max(0.0, -self._words(op, row)) if row.lane is Lane.COLLECTIVE and row.scope is Scope.EVERY else 0.0

    # ---- transfers ---------------------------------------------------------------------------------------------

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
                    continue  # without transfers its lifetime is unknown
                by_maker = (ref.what == "act") == out
                if not (ref.what == "act" and (by_maker or not crosses) and self._keeps_result(edge[0])):
                    found.append(self._size(edge[0], op))
        return found

    def _size(self, source: int, op: Op) -> float:
        """Bytes of the tensor that an op has on an edge from a stage."""
        return self.costs.bytes_at(source, self.costs.part(op.mb, op.slice)).behind

    def _keeps_result(self, stage: int) -> bool:
        """Whether a stage's output is an activation that its own backward needs as well, not a tensor in flight."""
        return self.costs.bytes_owned(stage).sent > 0

    def _transfer(self, op: Op) -> _Effect:
        """The effect of a transfer; none for a message within a rank, or one that stays for a backward."""
        nothing = _Effect(Lane.LINK, (), ())
        message = self.graph.program.placement.message(op)
        if message is None:
            return nothing
        size = self._size(message.edge[0], op)
        if op.kind.is_recv:
            return nothing._replace(begin=(Delta("transit", 1.0, size),))
        if message.forward and self._keeps_result(message.source):
            return nothing
        return nothing._replace(size=size, link=self.costs.link(op.pipe, message.source, message.sink, op.mb))

    def _send(self, i: int, effect: _Effect) -> None:
        """Queues the end of a SEND: its receiver has posted a buffer, and the transfer has arrived there."""
        graph, begin = self.graph, self.clock.begin
        receiver = graph.receiver[graph.party[i] - len(graph.ops)]
        posted = begin[receiver] if receiver >= 0 else 0.0
        heappush(self.leaving, (max(begin[i], posted) + (effect.link or 0.0), i, effect.size))

    def _gone(self, begin: float, end: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """Tensors and bytes that have left by the end of an op; both weighted by their share of the op's time."""
        tensors = size = units = still = 0.0
        while self.leaving and self.leaving[0][0] <= end:
            ms, _, each = heappop(self.leaving)
            share = (ms - begin) / (end - begin) if ms > begin else 0.0
            tensors, size, units, still = tensors + 1, size + each, units + share, still + share * each
        return (tensors, size), (units, still)


_MAKE_PART, _MAKE_LEFT = (
    frozenset(kind for kind in Kind if any(ref.what == what for ref in kind.row.writes)) for what in ("part", "left")
)
_GRADS = _MAKE_PART | _MAKE_LEFT | {Kind.STEP, Kind.COMMIT, Kind.SCATTER, Kind.REDUCE}


class Gradients:
    """Bytes of gradients on a rank before and after its ops; B makes a few, BW or W all others.

    They exist until the step of their stage, which without a barrier comes after the next step's first forwards. Those
    of a weight that stages share, `tying` on this rank, are one tensor: any of these makes it, and no sum of a stage
    takes it.
    """

    def __init__(self, tying: Sequence[int], costs: Costs) -> None:
        self._costs = costs
        self._there: dict[int, float] = {}  # bytes by owner
        self._whole: set[int] = set()  # stages with all of their gradients
        self._tying = tying
        self.bytes = 0.0

    def of_last_step(self, commit: Op, *, taken: bool) -> None:
        """Adds those that a COMMIT uses, of the step before; `taken`: but for a part, by a reduction."""
        if commit.stage >= 0:
            self._have(commit.stage, whole=True)
        if taken:
            self.after(commit._replace(kind=Kind.REDUCE), taken=True)

    def after(self, op: Op, *, taken: bool = False) -> tuple[bool, float]:
        """Advances past an op; returns whether it makes the first gradients, and the change in bytes. `taken`: a
        reduction takes them, and leaves a part."""
        kind, stage, before = op[0], op[1], self.bytes
        if kind in _MAKE_PART or (kind in _MAKE_LEFT and stage not in self._there):
            if stage in self._whole:
                return False, 0.0
            self._have(stage, whole=kind in _MAKE_PART)
            return True, self.bytes - before
        steps = kind is Kind.STEP or kind is Kind.COMMIT
        if steps or (taken and kind in (Kind.SCATTER, Kind.REDUCE)):
            self._whole.discard(stage)
            owners = (stage, TIED) if steps and [stage] == self._tying[:1] else (stage,)
            self.bytes -= sum(self._there.pop(owner, 0.0) for owner in owners)
        return False, self.bytes - before

    def _have(self, stage: int, *, whole: bool) -> None:
        size = self._costs.bytes_owned(stage)
        self._put(stage, size.gradients - size.tied if whole else size.early)
        if whole:
            self._whole.add(stage)
            more = (experts_of(stage), TIED) if stage in self._tying else (experts_of(stage),)
            for owner in self._costs.owners.keys() & more:
                self._put(owner, self._costs.owners[owner].gradients)

    def _put(self, owner: int, size: float) -> None:
        self.bytes += size - self._there.get(owner, 0.0)
        self._there[owner] = size


def _own(op: Op, costs: Costs, mine: Sequence[int]) -> float:
    """Temporary bytes of an op without compute for a microbatch; `mine` are the stages of its rank."""
    if op.kind in _SQUARES:
        return 8 * min(max((costs.bytes_owned(s).largest for s in mine), default=0.0), WIDE)
    size = costs.bytes_owned(op.stage)
    return float(sum(getattr(size, name) for name in op.kind.row.needs.split()))


_SQUARES = frozenset({Kind.VALIDATE, Kind.NORM})  # of gradients, summed for their norm
_SETTLES = frozenset({Kind.VALIDATE, Kind.TENTATIVE})  # wait for all reductions of gradients
