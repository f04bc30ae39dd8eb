"""The walk over the rows of a program's ops that builds its graph, and records errors on the way."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from zbc.compiler.graph.graph import MESSAGE, NOTHING, Graph, Mixed, Unmet, start_of
from zbc.compiler.graph.layout import FREED, Channel, Layout, members, rows_of
from zbc.errors import ZbcError
from zbc.ir import Op, Program, repeated
from zbc.ops import Kind, Lane, Rows

SPARSE = 2  # units per op above which a program is rejected as incomplete
SMALL = 1 << 17  # units that are always accepted


def build(program: Program, rows: Rows | None = None) -> Graph:
    """The graph of any program, including one with mistakes. Raises E202 if the program claims far more microbatches
    than it has ops for. For steps without a flush: the graph of one step alone, with a flush."""
    cyclic = program if program.cyclic else None
    program = program if cyclic is None else repeated(program, 1)
    placement = program.placement
    units = len(placement.pipes) * placement.stages * program.microbatches * program.slices
    if units > max(SMALL, SPARSE * len(placement.pipes) * program.size):
        claims = f"{placement.stages} stages and {program.microbatches * program.slices} microbatches"
        hint = "give every stage an F and a BW (or B and W) for every microbatch"
        raise ZbcError("E202", f"program: {program.size} ops are too few for {claims}", hint=hint)
    layout = Layout.of(program, rows_of(program) if rows is None else rows)
    g = Graph(layout, [*chain.from_iterable(program.ranks)], cyclic=cyclic)
    _Walk(g).run()
    return g


def of_steps(program: Program, steps: int) -> Graph:
    """The graph of `steps` consecutive steps of a cycle, without the ops that close each of them."""
    ops = [[op for op in ops if not op.kind.stage_wide] for ops in program.ranks]
    return build(repeated(replace(program, ranks=tuple(map(tuple, ops))), steps))


_Where = tuple[int, int, int, int]  # pipe, stage, slice, the other stage
_Known = tuple[int, Lane, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]
_NO_ROW: _Known = (-1, Lane.MARK, (), (), (), (), 0, ())


@dataclass(slots=True)
class _Lanes:
    """Collectives and copies of one rank: the last event of each lane, and how often each collective has started."""

    queue: dict[Lane, int] = field(default_factory=dict)
    count: dict[Op, int] = field(default_factory=dict)


class _Walk:
    """The walk over all ops, once, and its state that is complete only at the end."""

    def __init__(self, g: Graph) -> None:
        self.g, self.layout = g, g.layout
        self.n, self.messages = len(g.ops), g.layout.events
        g.sender = [-1] * self.messages
        g.receiver = [-1] * self.messages
        g.posted = [NOTHING] * self.messages
        g.parties = [1 + g.layout.explicit] * self.messages
        self.origin = [NOTHING] * self.messages  # the node on its sender's compute lane that a message starts after
        self.meetings: dict[tuple[Op, int], int] = {}
        self.opening: dict[int, int] = {}  # first event of a rank -> its start
        self.edges: dict[int, list[int]] = {}  # event -> nodes it waits for; by -1 - op before the event is known
        self.sent: dict[int, list[int]] = {}  # first message of a column -> the ops that send messages of it
        self.taken: dict[int, list[int]] = {}

    def run(self) -> None:
        g = self.g
        for rank, ops in enumerate(g.program.ranks):
            self._rank(rank, ops)
        self._groups()
        for known in [e for e in self.edges if e < 0]:  # the event of an op of another lane waits for the op's reads
            for node in self.edges.pop(known):
                if g.party[-1 - known] >= 0:
                    self._after(node, g.party[-1 - known])
        for message, x in self.layout.messages.items():
            if message.edge < 0:
                g.parties[x] = 1  # no transfer op carries it
        self.layout.settle()
        g.mixed = list(self._disorder())
        for event, met in g.met.items():  # collectives that a member never comes to wait forever
            op = g.ops[met[0]]
            if op.kind.is_collective and not g.program.apart(op):
                g.parties[event - self.n] += not members(g.program, *op[:2]) <= {g.rank(i) for i in met}
        if self.layout.explicit:
            every = {r: row.every for r, row in enumerate(g.rows) if row.every}
            found = [(i, every[r]) for i, r in enumerate(g.row_of) if r in every] if every else []
            g.late = [(i, j) for i, columns in found for j in self._late(i, columns)]
        self._close()

    def _close(self) -> None:
        """Fills the lists over all nodes, events included."""
        g = self.g
        g.before += self.origin
        g.ptr.extend([g.ptr[self.n]] * self.messages)
        for event in range(self.n + self.messages, self.n + len(g.parties)):
            g.before.append(self.opening.get(event, NOTHING))
            g.pred += self.edges.get(event, ())
            g.ptr.append(len(g.pred))
        g.waits = {event: nodes for event, nodes in self.edges.items() if event < self.n + self.messages}

    # ---- the walk: all the time goes here, so it is one function over local names --------------------------------

    def _rank(self, rank: int, ops: Sequence[Op]) -> None:
        g, layout, n, microbatches = self.g, self.layout, self.n, self.g.program.microbatches
        cell, sender, receiver, origin, edges = layout.cells, g.sender, g.receiver, self.origin, self.edges
        before, ptr, pred, party, row_of, posted = g.before, g.ptr, g.pred, g.party, g.row_of, g.posted
        compute, link, mark = Lane.COMPUTE, Lane.LINK, Lane.MARK
        table: dict[Kind, dict[_Where, _Known]] = {kind: {} for kind in layout.kinds}
        lanes, last = _Lanes(), start_of(rank)
        for i, (kind, stage, mb, pipe, part, _, other) in enumerate(ops, g.first[-1]):
            where = pipe, stage, part, other
            known = table[kind].get(where) or self._known(table[kind], rank, kind, where)
            number, lane, reads, frees, writes, posts, step, state = known
            if number < 0 or (step and not 0 <= mb < microbatches):
                g.lost.append((i, self._loss(kind, mb, number, lane)))
                number, lane, reads, frees, writes, posts, step, state = _NO_ROW
            before.append(last)
            row_of.append(number)
            j = mb * step
            for c in reads:
                w = cell[c + j]
                if w < 0:
                    g.unmet.append(Unmet(i, c + j, w))
                elif w >= n and lane is compute:  # the rank's own order covers values made on it
                    pred.append(w)
                elif w >= n:
                    edges.setdefault(-1 - i, []).append(w)
            if state:
                self._states(i, state)
            e = own = -1
            if lane is compute:
                e = last = i
                if posts:
                    own = self._posted(i, posts, j)
            elif lane is link:
                x = posts[0] + j
                found, line = (sender, self.sent) if reads else (receiver, self.taken)
                if found[x] >= 0:
                    e, frees, writes = self._spare(i, found[x]), (), ()
                else:
                    found[x], e = i, n + x
                    line.setdefault(posts[0] - part, []).append(i)
                    (origin if reads else posted)[x] = last
                own = e
            elif lane is mark:
                if number >= 0:
                    g.marks.append(i)
                    last = i
            else:  # a collective or a copy
                row = g.rows[number].row
                waits = [cell[c + j] for c in reads] if row.early else [last]
                e = own = self._started(lanes, lane, ops[i - g.first[-1]], i, waits)
                last = e if row.blocks else last
            party.append(own)
            for c in frees:
                cell[c + j] = FREED
            for c in writes:
                if cell[c + j] >= 0:
                    g.again.append((i, c + j, cell[c + j]))
                cell[c + j] = e
            ptr.append(len(pred))
        g.first.append(len(before))

    def _loss(self, kind: Kind, mb: int, number: int, lane: Lane) -> str:
        """The error code of an op without a place in the program; an unknown row has it in place of its lane."""
        known = 0 <= mb < self.g.program.microbatches or kind.stage_wide or kind.rank_wide
        return str(lane) if number < 0 and known else "E202"

    def _states(self, i: int, columns: Iterable[int]) -> None:
        """Op i reads values that exist once, not per microbatch."""
        for c in columns:
            w = self.layout.cells[c]
            if w < 0:
                self.g.unmet.append(Unmet(i, c, w))
            elif w >= self.n:
                self.g.pred.append(w)

    def _posted(self, i: int, posts: Sequence[int], j: int) -> int:
        """The first of the messages that op i starts, if no transfer op carries them."""
        g, n = self.g, self.n
        for x in posts:
            if g.sender[x + j] >= 0:
                g.again.append((i, MESSAGE, g.sender[x + j]))
            g.sender[x + j] = self.origin[x + j] = i
        if len(posts) > 1:
            g.more[i] = tuple(n + x + j for x in posts[1:])
        return n + posts[0] + j

    def _started(self, lanes: _Lanes, lane: Lane, op: Op, i: int, waits: Iterable[int]) -> int:
        """The event of a collective or a copy: it follows earlier events of its lane and rank, and `waits`."""
        g, e = self.g, self.n + len(self.g.parties)
        if op[0].is_collective and not g.program.apart(op):  # replicas are not in the graph
            count = lanes.count[op] = lanes.count.get(op, -1) + 1
            e = self.meetings.setdefault((op, count), e)
        if e not in g.met:
            g.parties.append(0)
            self.edges[e], g.met[e] = [], []
        g.parties[e - self.n] += 1
        g.met[e].append(i)
        for w in waits:
            if w >= 0:
                self.edges[e].append(w)
            elif w != NOTHING:  # the rank's first event
                self.opening[e] = w
        queue = Lane.OUT if lane is Lane.BACK and not g.program.duplex else lane
        earlier = lanes.queue.get(queue)
        if earlier is not None:
            self._after(earlier, e)
        lanes.queue[queue] = e
        return e

    def _known(self, table: dict[_Where, _Known], rank: int, kind: Kind, where: _Where) -> _Known:
        """A compiled row as the walk unpacks it; for an op without a place here the code of the error as its lane."""
        row = self.layout.compile(rank, kind, *where)
        found: _Known
        if isinstance(row, str):
            found = -1, row, *_NO_ROW[2:]  # type: ignore[assignment]
        else:
            self.g.rows.append(row)
            found = len(self.g.rows) - 1, *row[:7]
        table[where] = found
        return found

    def _spare(self, op: int, earlier: int) -> int:
        """An event of its own, which never happens, for a transfer of a tensor that is transferred already."""
        g = self.g
        g.again.append((op, MESSAGE, earlier))
        event = self.n + len(g.parties)
        g.parties.append(2)
        self.edges[event], g.spare[event] = [], op
        if g.unmet and g.unmet[-1].op == op:
            g.unmet.pop()
        return event

    # ---- after the walk -------------------------------------------------------------------------------------------

    def _after(self, earlier: int, event: int) -> None:
        """Makes an event wait for another one."""
        self.edges.setdefault(event, []).append(earlier)
        self.g.behind.setdefault(earlier, []).append(event)
        self.g.parties[event - self.n] += 1

    def _groups(self) -> None:
        """Makes the mark of a group wait for all dependencies of the group's ops."""
        g = self.g
        for mark in g.marks:
            end = min(mark + 3, g.first[g.rank(mark) + 1])
            g.ptr[mark + 1 : end] = array("q", [g.ptr[end]] * (end - mark - 1))

    def _late(self, i: int, columns: Iterable[tuple[int, int]]) -> Iterator[int]:
        """The ops after op i on its rank that write values which op i should find written."""
        g, cells = self.g, self.layout.cells
        for c, width in columns:
            top = max(cells[c : c + width])
            if top >= self.n:
                top = min((j for j in g.met.get(top, ()) if g.rank(j) == g.rank(i)), default=-1)
            if top > i:
                yield top

    def _disorder(self) -> Iterator[Mixed]:
        """Blocks a channel from its first message on whose send and receive orders differ, and yields that message."""
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
