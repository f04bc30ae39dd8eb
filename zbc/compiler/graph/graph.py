"""A program as integers: one walk over the rows of its ops tells what waits for what, for the proof and the clock.

Node i is op i, ranks one after the other; behind the ops come the messages, then the other events (collectives,
copies). Per node: `before`, the node before it on the compute lane of its rank (of a message, the one it starts
behind), and `pred[ptr[i]:ptr[i+1]]`, whatever else it waits for. What a rank's own order covers takes no edge. The
first node of rank r has `start_of(r)` before it, a number below `NOTHING`; a node behind which nothing stands, that.

The walk keeps the cells of a rank as the runtime will keep its stores: empty, written (by which node) or freed. What it
finds wrong on the way (read too early, written twice, no place here) is noted for the checks, which put it into words.

An op of the compute lane waits for its cells. An op of another lane only starts an event: what it reads, its event
waits for; what it writes is there when the event is over. Events of one lane of a rank happen in the order in which
they are started. A message also waits for the one before it in its channel, but that takes no edge: both ends of the
one before stand before its own ends, or else the two ends disagree and nothing moves from there on (`mixed`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from zbc.compiler.graph.layout import EMPTY, FREED, Channel, Compiled, Layout, members
from zbc.errors import ZbcError
from zbc.ir import Op, Program
from zbc.ops import ROWS, VALUES, Kind, Lane, Rows

SPARSE = 2  # units per op beyond which a program is hopelessly incomplete
SMALL = 1 << 17  # units that are never too many
NOTHING = -1  # in `before`: the beginning of all
MESSAGE = -1  # in `again`: a message that is sent or taken a second time
_OF_UNITS = frozenset({"unit", "edge"})  # scopes of values that belong to a microbatch


def start_of(rank: int) -> int:
    """What `before` says of the first node of a rank."""
    return -2 - rank


class Unmet(NamedTuple):
    """An op that finds a cell empty or freed."""

    op: int
    cell: int
    was: int


class Mixed(NamedTuple):
    """A channel in disorder: its k-th message, as sent and as received."""

    channel: Channel
    k: int
    send: int
    recv: int


@dataclass
class Graph:
    """What waits for what in one program, and what is wrong with it."""

    layout: Layout
    ops: list[Op]
    first: list[int] = field(default_factory=lambda: [0])  # rank r runs ops first[r] .. first[r+1]-1
    before: list[int] = field(default_factory=list)
    ptr: list[int] = field(default_factory=lambda: [0])
    pred: list[int] = field(default_factory=list)
    party: list[int] = field(default_factory=list)  # the event that an op starts or takes part in, -1 for none
    more: dict[int, tuple[int, ...]] = field(default_factory=dict)  # further events of an op
    parties: list[int] = field(default_factory=list)  # per event: how many have to come
    behind: dict[int, list[int]] = field(default_factory=dict)  # event -> events that wait for it
    rows: list[Compiled] = field(default_factory=list)
    row_of: list[int] = field(default_factory=list)  # per op; -1 for one that has no place here
    sender: list[int] = field(default_factory=list)  # per message the op that sends it, -1 for none
    receiver: list[int] = field(default_factory=list)
    met: dict[int, list[int]] = field(default_factory=dict)  # event that is no message -> its ops
    marks: list[int] = field(default_factory=list)  # OVERLAPs
    waits: dict[int, list[int]] = field(default_factory=dict)  # message -> events that bring what it carries
    # ---- what is wrong
    lost: list[tuple[int, str]] = field(default_factory=list)  # op, code: it has no place here
    unmet: list[Unmet] = field(default_factory=list)
    again: list[tuple[int, int, int]] = field(default_factory=list)  # op, cell (or MESSAGE), the node that was first
    late: list[tuple[int, int]] = field(default_factory=list)  # op, an op behind it that makes what it closes
    mixed: list[Mixed] = field(default_factory=list)
    absent: dict[int, list[int]] = field(default_factory=dict)  # collective's event -> ranks that never come to it
    spare: dict[int, int] = field(default_factory=dict)  # event of a transfer that is there already -> its op

    @property
    def program(self) -> Program:
        return self.layout.program

    def rank(self, op: int) -> int:
        """The rank of an op."""
        return bisect_right(self.first, op) - 1

    def place(self, op: int) -> tuple[int, int]:
        """(rank, step) of an op."""
        rank = self.rank(op)
        return rank, op - self.first[rank]

    def text(self, op: int) -> str:
        """`rank 0 step 3: SEND_F s0 m1 >r1`."""
        return self.program.text(*self.place(op))

    def where(self, op: int) -> str:
        rank, step = self.place(op)
        return f"rank {rank} step {step}"

    def row(self, op: int) -> Compiled | None:
        return self.rows[self.row_of[op]] if self.row_of[op] >= 0 else None

    def mine(self, rank: int) -> range:
        """The ops of a rank."""
        return range(self.first[rank], self.first[rank + 1])

    @cached_property
    def computing(self) -> list[list[int]]:
        """Per rank its ops that work on a microbatch."""
        computes = [row.kind.computes for row in self.rows] + [False]
        row_of = self.row_of
        return [[i for i in self.mine(rank) if computes[row_of[i]]] for rank in range(len(self.first) - 1)]

    @cached_property
    def timed(self) -> list[list[int]]:
        """Per rank its ops that take its time before a barrier: those that compute, and those that close a step ahead
        of the barrier."""
        takes = [row.lane is Lane.COMPUTE and row.row.closes != "barrier" for row in self.rows] + [False]
        row_of = self.row_of
        return [[i for i in self.mine(rank) if takes[row_of[i]]] for rank in range(len(self.first) - 1)]

    @cached_property
    def ran(self) -> tuple[list[int], bytearray]:
        """See `run`."""
        return run(self)

    @cached_property
    def sources(self) -> list[int]:
        """Per op the compute op that made the tensor it works on, -1 for none."""
        return _sources(self)

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The mark of each op in a group."""
        return {op: mark for mark in self.marks for op in (mark + 1, mark + 2)}

    def arrivals(self, op: int) -> Iterator[int]:
        """The messages that an op waits for; of an op in a group, those of the group."""
        n, op = len(self.ops), self.group_of.get(op, op)
        return (x for x in self.pred[self.ptr[op] : self.ptr[op + 1]] if n <= x < n + len(self.sender))

    @property
    def messages(self) -> Iterator[int]:
        """All messages that an op waits for, in the order of these ops."""
        n = len(self.ops)
        return (x for x in self.pred[: self.ptr[n]] if n <= x < n + len(self.sender))


def build(program: Program, rows: Rows = ROWS) -> Graph:
    """The graph of any program, also of one with mistakes. Raises E202 when it claims far more microbatches than it has
    ops for."""
    placement = program.placement
    units = len(placement.pipes) * placement.stages * program.microbatches * program.slices
    if units > max(SMALL, SPARSE * len(placement.pipes) * program.size):
        claims = f"{placement.stages} stages and {program.microbatches * program.slices} microbatches"
        hint = "give every stage an F and a BW (or B and W) for every microbatch"
        raise ZbcError("E202", f"program: {program.size} ops are too few for {claims}", hint=hint)
    layout = Layout.of(program, rows)
    g = Graph(layout, [op for ops in program.ranks for op in ops])
    _Walk(g).run()
    return g


_Known = tuple[int, Lane, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]
_NO_ROW: _Known = (-1, Lane.MARK, (), (), (), (), 0, ())


class _Walk:
    """The walk over all ops, once, and what is known only when it is over."""

    def __init__(self, g: Graph) -> None:
        self.g, self.layout = g, g.layout
        self.n, self.messages = len(g.ops), g.layout.events
        g.sender = [-1] * self.messages
        g.receiver = [-1] * self.messages
        g.parties = [1 + g.layout.explicit] * self.messages
        self.origin = [NOTHING] * self.messages  # the node on its sender's compute lane that a message starts behind
        self.meetings: dict[tuple[object, ...], int] = {}
        self.edges: dict[int, list[int]] = {}  # event -> nodes it waits for; before it is known, by -1 - op
        self.sent: dict[int, list[int]] = {}  # first message of a column -> the ops that send messages of it
        self.taken: dict[int, list[int]] = {}

    def run(self) -> None:
        g = self.g
        for rank, ops in enumerate(g.program.ranks):
            self._rank(rank, ops)
        self._groups()
        for op in [e for e in self.edges if e < 0]:  # what an op of another lane reads, its event waits for
            for node in self.edges.pop(op):
                if g.party[-1 - op] >= 0:
                    self._after(node, g.party[-1 - op])
        for message, x in self.layout.messages.items():
            if message.edge < 0:
                g.parties[x] = 1  # no transfer stands for it
        self.layout.settle()
        g.mixed = list(self._disorder())
        self._absent()
        if self.layout.explicit:
            every = [(i, g.rows[r].every) for i, r in enumerate(g.row_of) if r >= 0 and g.rows[r].every]
            g.late = [(i, j) for i, columns in every for j in self._late(i, columns)]
        self._close()

    def _close(self) -> None:
        """The lists over all nodes, events included."""
        g = self.g
        g.before += self.origin
        g.ptr += [g.ptr[self.n]] * self.messages
        for event in range(self.n + self.messages, self.n + len(g.parties)):
            g.before.append(NOTHING)
            g.pred += self.edges.get(event, ())
            g.ptr.append(len(g.pred))
        g.waits = {event: nodes for event, nodes in self.edges.items() if event < self.n + self.messages}

    # ---- the walk: all the time goes here, so it is one function over local names --------------------------------

    def _rank(self, rank: int, ops: Iterable[Op]) -> None:
        g, layout, n = self.g, self.layout, self.n
        microbatches = g.program.microbatches
        cell, sender, receiver, origin, edges = layout.cells, g.sender, g.receiver, self.origin, self.edges
        before, ptr, pred, party, row_of = g.before, g.ptr, g.pred, g.party, g.row_of
        compute, link, mark = Lane.COMPUTE, Lane.LINK, Lane.MARK
        table: dict[Kind, dict[tuple[int, int, int], _Known]] = {kind: {} for kind in layout.kinds}
        queue: dict[Lane, int] = {}  # the last event of each lane
        count: dict[tuple[object, ...], int] = {}
        last = start_of(rank)
        for i, (kind, stage, mb, pipe, part) in enumerate(ops, g.first[-1]):
            where = (pipe, stage, part)
            known = table[kind].get(where)
            if known is None:
                known = table[kind][where] = self._known(rank, kind, pipe, stage, part)
            number, lane, reads, frees, writes, posts, step, state = known
            if number < 0 or (step and not 0 <= mb < microbatches):
                inside = number < 0 and (0 <= mb < microbatches or kind.stage_wide or kind.rank_wide)
                g.lost.append((i, str(lane) if inside else "E202"))
                number, lane, reads, frees, writes, posts, step, state = _NO_ROW
            before.append(last)
            row_of.append(number)
            j = mb * step
            for c in reads:
                w = cell[c + j]
                if w < 0:
                    g.unmet.append(Unmet(i, c + j, w))
                elif w < n:
                    pass  # the rank's own order covers it
                elif lane is compute:
                    pred.append(w)
                else:
                    edges.setdefault(-1 - i, []).append(w)
            for c in state:
                w = cell[c]
                if w < 0:
                    g.unmet.append(Unmet(i, c, w))
                elif w >= n:
                    pred.append(w)
            e = -1
            if lane is compute:
                e = last = i
                if posts:  # no transfer stands for these messages
                    for x in posts:
                        if sender[x + j] >= 0:
                            g.again.append((i, MESSAGE, sender[x + j]))
                        sender[x + j] = origin[x + j] = i
                    if len(posts) > 1:
                        g.more[i] = tuple(n + x + j for x in posts[1:])
                    party.append(n + posts[0] + j)
                else:
                    party.append(-1)
            elif lane is link:
                x = posts[0] + j
                found, line = (sender, self.sent) if reads else (receiver, self.taken)
                if found[x] >= 0:
                    g.again.append((i, MESSAGE, found[x]))
                    e, frees, writes = self._spare(i), (), ()
                else:
                    found[x], e = i, n + x
                    line.setdefault(posts[0] - part, []).append(i)
                    if reads:
                        origin[x] = last
                party.append(e)
            elif lane is mark:
                party.append(-1)
                if number >= 0:
                    g.marks.append(i)
                    last = i
            else:  # a collective or a copy
                same = (rank, kind, stage, mb, pipe, part)
                count[same] = count.get(same, -1) + 1
                e = self._meet((*(same[1:] if kind.is_collective else same), count[same]), i)
                party.append(e)
                row = g.rows[number].row
                starts = [cell[c + j] for c in reads] if row.early else [last]
                self.edges[e] += [w for w in starts if w >= 0]
                if lane in queue:
                    self._after(queue[lane], e)
                queue[lane] = e
                if row.blocks:
                    last = e
            for c in frees:
                cell[c + j] = FREED
            for c in writes:
                if cell[c + j] >= 0:
                    g.again.append((i, c + j, cell[c + j]))
                cell[c + j] = e
            ptr.append(len(pred))
        g.first.append(len(before))

    def _known(self, rank: int, kind: Kind, pipe: int, stage: int, part: int) -> _Known:
        """A compiled row as the walk unpacks it; for an op without a place here the code of the error as its lane."""
        row = self.layout.compile(rank, kind, pipe, stage, part)
        if isinstance(row, str):
            return -1, row, *_NO_ROW[2:]  # type: ignore[return-value]
        self.g.rows.append(row)
        return len(self.g.rows) - 1, *row[:7]

    def _spare(self, op: int) -> int:
        """An event of its own, which never happens, for a transfer of what travels already."""
        g = self.g
        event = self.n + len(g.parties)
        g.parties.append(2)
        self.edges[event], g.spare[event] = [], op
        if g.unmet and g.unmet[-1].op == op:
            g.unmet.pop()
        return event

    def _meet(self, key: tuple[object, ...], op: int) -> int:
        """The event of a collective or a copy, with one party more."""
        g = self.g
        event = self.meetings.get(key)
        if event is None:
            event = self.meetings[key] = self.n + len(g.parties)
            g.parties.append(0)
            self.edges[event], g.met[event] = [], []
        g.parties[event - self.n] += 1
        g.met[event].append(op)
        return event

    # ---- behind the walk ------------------------------------------------------------------------------------------

    def _after(self, earlier: int, event: int) -> None:
        """An event waits for another one."""
        self.edges.setdefault(event, []).append(earlier)
        self.g.behind.setdefault(earlier, []).append(event)
        self.g.parties[event - self.n] += 1

    def _groups(self) -> None:
        """What the ops of a group wait for, its mark waits for."""
        g = self.g
        for mark in g.marks:
            end = min(mark + 3, g.first[g.rank(mark) + 1])
            g.ptr[mark + 1 : end] = [g.ptr[end]] * (end - mark - 1)

    def _late(self, i: int, columns: Iterable[tuple[int, int]]) -> Iterator[int]:
        """The ops behind op i on its rank that write what it should find written."""
        g, cells = self.g, self.layout.cells
        for c, width in columns:
            top = max(cells[c : c + width])
            if top >= self.n:
                top = min((j for j in g.met.get(top, ()) if g.rank(j) == g.rank(i)), default=-1)
            if top > i:
                yield top

    def _disorder(self) -> Iterator[Mixed]:
        """From the first message on that is not received where it is sent, nothing of a channel moves."""
        g, n, layout = self.g, self.n, self.layout
        lines: dict[Channel, tuple[list[int], list[int]]] = {}
        for (channel, _), base in zip(layout.channels, layout.firsts, strict=True):
            if base in self.sent or base in self.taken:
                line = lines.setdefault(channel, ([], []))
                for ops, ends, others, own in (
                    (self.sent, g.receiver, g.sender, line[0]),
                    (self.taken, g.sender, g.receiver, line[1]),
                ):
                    own += [i for i in ops.get(base, ()) if ends[g.party[i] - n] >= 0 and others[g.party[i] - n] == i]
        for channel, (sends, receives) in sorted(lines.items()):
            sends.sort()
            receives.sort()
            a, b = [g.party[i] for i in sends], [g.party[i] for i in receives]
            if a != b:
                k = next(k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
                yield Mixed(channel, k, sends[k], receives[k])
                for event in a[k:]:
                    g.parties[event - n] += 1

    def _absent(self) -> None:
        """A collective that a member never comes to is never over."""
        g = self.g
        for event, ops in g.met.items():
            kind, stage = g.ops[ops[0]][:2]
            if kind.is_collective:
                there = {g.rank(i) for i in ops}
                away = sorted(members(g.program, kind, stage) - there)
                if away:
                    g.absent[event] = away
                    g.parties[event - self.n] += 1


# ---- what ever happens --------------------------------------------------------------------------------------------


def run(g: Graph, *, blocking_sends: bool = False) -> tuple[list[int], bytearray]:
    """Let every rank go as far as it can: the nodes that take time, in an order in which they can happen, and 1 for
    each node that happens.

    Kahn's algorithm with the chain of ops of a rank walked instead of stored. The outcome is the same for every order
    of progress: nothing that happens takes away what something else waits for.
    """
    n, ptr, pred, party, more, behind, row_of = len(g.ops), g.ptr, g.pred, g.party, g.more, g.behind, g.row_of
    left, done = g.parties[:], bytearray(n + len(g.parties))
    blocks, stuck = _blocking(g, sends=blocking_sends), stuck_ops(g)
    timed = bytearray(row.lane is Lane.COMPUTE or row.lane is Lane.MARK for row in g.rows) + b"\0"
    order: list[int] = []
    sleeping: dict[int, list[int]] = {}  # node -> ranks that wait for it
    at = g.first[:-1]
    ready = list(range(len(at)))
    while ready:
        r = ready.pop()
        i, stop = at[r], g.first[r + 1]
        while i < stop:
            a, b = ptr[i], ptr[i + 1]
            while a < b and done[pred[a]]:
                a += 1
            if a < b:
                sleeping.setdefault(pred[a], []).append(r)
                break
            if stuck and i in stuck:
                break
            if not done[i]:
                done[i] = 1
                if timed[row_of[i]]:
                    order.append(i)
                coming = [] if party[i] < 0 else [party[i], *more[i]] if i in more else [party[i]]
                while coming:
                    e = coming.pop()
                    left[e - n] -= 1
                    if not left[e - n]:
                        done[e] = 1
                        order.append(e)
                        if e in sleeping:
                            ready += sleeping.pop(e)
                        if e in behind:
                            coming += behind[e]
            if blocks and i in blocks and not done[party[i]]:
                sleeping.setdefault(party[i], []).append(r)
                break
            i += 1
        at[r] = i
    return order, done


def stuck_ops(g: Graph) -> set[int]:
    """The ops that find something missing when their rank comes to them: they never run."""
    return {one.op for one in g.unmet} | {i for i, _ in g.late} | {i for i, _ in g.lost}


def _blocking(g: Graph, *, sends: bool) -> frozenset[int]:
    """The ops that end with their event."""
    found = [i for ops in g.met.values() for i in ops if (row := g.row(i)) is not None and row.row.blocks]
    if sends:
        found += [i for i, e in enumerate(g.party) if e >= 0 and g.ops[i][0].is_send]
    return frozenset(found)


def happens(g: Graph, done: bytearray) -> bool:
    """Whether all ops, and the events they take part in, happen."""
    n = len(g.ops)
    return 0 not in done[:n] and all(done[e] for e in g.party if e >= 0)


class Read(NamedTuple):
    """A value that an op reads, and the node that wrote it."""

    op: int
    what: str
    node: int


def reads(g: Graph) -> Iterator[Read]:
    """Whatever ops read that a node of the graph wrote, in the order of ops: the walk once more, for those who explain.

    A RECV writes what its message brings, so what it brought is read from the message.
    """
    cells = [w or EMPTY for w in g.layout.fresh]  # 0: there before the step
    refs = _refs(g)
    for i, r in enumerate(g.row_of):
        if r >= 0:
            row = g.rows[r]
            j = g.ops[i][2] * row.step
            for what, c, width in refs[r]:
                for w in cells[c : c + width] if width else cells[c + j : c + j + 1]:
                    if w >= 0:
                        yield Read(i, what, w)
            for c in row.writes:
                cells[c + j] = i if row.lane is Lane.COMPUTE else g.party[i]


def _refs(g: Graph) -> list[list[tuple[str, int, int]]]:
    """Per row what it reads: the value, its first cell, and how many; 0 for the one of the op's microbatch."""
    named = sorted((base, key.what) for key, base in g.layout.columns.items())
    bases = [base for base, _ in named]

    def what(cell: int) -> str:
        return named[bisect_right(bases, cell) - 1][1]

    return [
        [(what(c), c, 0) for c in row.reads]
        + [(what(c), c, 1) for c in row.state]
        + [(what(c), c, width) for c, width in row.every]
        for row in g.rows
    ]


def _sources(g: Graph) -> list[int]:
    """The maker of what each op works on: of what came from another rank, else of what its row names last."""
    n, found = len(g.ops), [-1] * len(g.ops)
    maker = {n + x: op for x, op in enumerate(g.sender)}  # of what a message carries; a SEND reads it
    for op, what, node in reads(g):
        kind = g.ops[op].kind
        if kind.is_send:
            maker[g.party[op]] = node
        elif kind.computes and VALUES[what].scope in _OF_UNITS and (node >= n or found[op] < n):
            found[op] = node
    return [maker[node] if node >= n else node for node in found]
