"""A program as integers: one walk over the rows of its ops yields all dependencies, for the proof and the simulator.

Node i is op i, ranks one after the other; after the ops come the messages, then the other events (collectives, copies).
Per node: `before`, the node before it on the compute lane of its rank (for a message, the node it starts after), and
`pred[ptr[i]:ptr[i+1]]`, its other dependencies. Dependencies implied by a rank's own order take no edge. The first node
of rank r has `start_of(r)` before it, a number below `NOTHING`; a node with no predecessor has `NOTHING`.

The walk keeps the cells of a rank as the runtime will keep its stores: empty, written (by which node) or freed. Errors
on the way (read too early, written twice, no place here) are recorded for the checks, which write the messages.

An op of the compute lane waits for its cells. An op of another lane only starts an event: the event waits for the op's
reads, and its writes exist when the event is completed. Events of one lane of a rank happen in the order of their
starts. A message also waits for the one before it in its channel, but that takes no edge: both ends of the one before
precede its own ends, or else the two ends disagree and nothing moves from there on (`mixed`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import filterfalse
from typing import NamedTuple

from zbc.compiler.graph.layout import EMPTY, CellColumns, Channel, Layout
from zbc.ir import WHOLE, Op, Program
from zbc.ops import VALUES, Lane

NOTHING = -1  # in `before`: the beginning of the program
MESSAGE = -1  # in `again`: a message that is sent or received a second time
_OF_UNITS = frozenset({"unit", "edge"})  # scopes of values that belong to a microbatch


def start_of(rank: int) -> int:
    """The entry in `before` of the first node of a rank."""
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
    """The dependencies of one program, and its errors."""

    layout: Layout
    ops: list[Op]
    first: list[int] = field(default_factory=lambda: [0])  # rank r runs ops first[r] .. first[r+1]-1
    before: list[int] = field(default_factory=list)
    ptr: array[int] = field(default_factory=lambda: array("q", [0]))  # a third of the memory of a list of ints
    pred: list[int] = field(default_factory=list)
    party: list[int] = field(default_factory=list)  # the event that an op starts or takes part in, -1 for none
    more: dict[int, tuple[int, ...]] = field(default_factory=dict)  # further events of an op
    parties: list[int] = field(default_factory=list)  # per event: the number of participants
    behind: dict[int, list[int]] = field(default_factory=dict)  # event -> events that wait for it
    rows: list[CellColumns] = field(default_factory=list)
    row_of: list[int] = field(default_factory=list)  # per op; -1 for an op without a place here
    sender: list[int] = field(default_factory=list)  # per message the op that sends it, -1 for none
    receiver: list[int] = field(default_factory=list)
    posted: list[int] = field(default_factory=list)  # per message the node before its RECV, as in `before`
    met: dict[int, list[int]] = field(default_factory=dict)  # event that is no message -> its ops
    marks: list[int] = field(default_factory=list)  # OVERLAPs
    waits: dict[int, list[int]] = field(default_factory=dict)  # message -> events that bring its data
    cyclic: Program | None = None  # the program without a flush of which this is one step alone
    # ---- errors
    lost: list[tuple[int, str]] = field(default_factory=list)  # op, code: an op without a place here
    unmet: list[Unmet] = field(default_factory=list)
    again: list[tuple[int, int, int]] = field(default_factory=list)  # op, cell (or MESSAGE), the first writer's node
    late: list[tuple[int, int]] = field(default_factory=list)  # op, a later op that makes a value it closes
    mixed: list[Mixed] = field(default_factory=list)
    spare: dict[int, int] = field(default_factory=dict)  # event of a duplicate transfer -> its op

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

    def row(self, op: int) -> CellColumns | None:
        return self.rows[self.row_of[op]] if self.row_of[op] >= 0 else None

    def mine(self, rank: int) -> range:
        """The ops of a rank."""
        return range(self.first[rank], self.first[rank + 1])

    @cached_property
    def computing(self) -> list[list[int]]:
        """Per rank its ops that compute for a microbatch."""
        return self._by_rank([row.kind.computes for row in self.rows])

    @cached_property
    def timed(self) -> list[list[int]]:
        """Per rank its ops that take its time before a barrier: compute, and ops that close a step ahead of the
        barrier."""
        return self._by_rank([row.lane is Lane.COMPUTE and row.row.closes != "barrier" for row in self.rows])

    def _by_rank(self, of_rows: list[bool]) -> list[list[int]]:
        counts, row_of = [*of_rows, False], self.row_of  # the last is for ops without a row
        return [[i for i in self.mine(rank) if counts[row_of[i]]] for rank in range(len(self.first) - 1)]

    @cached_property
    def frozen(self) -> list[int]:
        """The ops with some frozen layers."""
        return [i for i, op in enumerate(self.ops) if op[5] != WHOLE]

    @cached_property
    def ran(self) -> tuple[list[int], bytearray]:
        """See `run`."""
        return run(self)

    @cached_property
    def finishes(self) -> bool:
        """Whether all ops happen."""
        return happens(self, self.ran[1])

    @cached_property
    def sources(self) -> list[int]:
        """Per op the compute op that made its input tensor, -1 for none: of a value from another rank, else of the last
        value its row reads."""
        n, found = len(self.ops), [-1] * len(self.ops)
        maker = {n + x: op for x, op in enumerate(self.sender)}  # the maker of a message's tensor; its SEND reads it
        maker |= {event: ops[0] for event, ops in self.met.items()}
        for op, what, node in reads(self):
            kind = self.ops[op].kind
            if kind.is_send:
                maker[self.party[op]] = node
            elif kind.computes and VALUES[what].scope in _OF_UNITS and (node >= n or found[op] < n):
                found[op] = node
        return [maker[node] if node >= n else node for node in found]

    @cached_property
    def line_of(self) -> list[int]:
        """Per message the number of its channel."""
        layout, numbers = self.layout, dict[Channel, int]()
        found: list[int] = []
        for (channel, _), base, stop in zip(layout.channels, layout.firsts, layout.stops, strict=True):
            found += [numbers.setdefault(channel, len(numbers))] * (stop - base)
        return found

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The mark of each op in a group."""
        return {op: mark for mark in self.marks for op in (mark + 1, mark + 2)}

    def arrivals(self, op: int) -> Iterator[int]:
        """The messages that an op waits for; for an op in a group, the messages of the group."""
        n, op = len(self.ops), self.group_of.get(op, op)
        return (x for x in self.pred[self.ptr[op] : self.ptr[op + 1]] if n <= x < n + len(self.sender))

    @property
    def messages(self) -> Iterator[int]:
        """All messages that ops wait for, in the order of these ops."""
        n = len(self.ops)
        return (x for x in self.pred[: self.ptr[n]] if n <= x < n + len(self.sender))


# ---- progress ------------------------------------------------------------------------------------------------------


def run(
    g: Graph, *, blocking_sends: bool = False, behind: Mapping[int, Sequence[int]] | None = None
) -> tuple[list[int], bytearray]:
    """Advances every rank as far as possible; returns the nodes that take time, in a possible order, and 1 for each
    node that happens. `behind` names, for some ops, further nodes that they wait for. Kahn's algorithm with the chain
    of ops of a rank walked instead of stored. The outcome is the same for every order of progress: nothing that happens
    disables another node."""
    n, ptr, pred, party, more, later, row_of = len(g.ops), g.ptr, g.pred, g.party, g.more, g.behind, g.row_of
    left, done = g.parties[:], bytearray(n + len(g.parties))
    blocks = _blocking(g, sends=blocking_sends)
    stuck = {one.op for one in g.unmet} | {i for i, _ in (*g.late, *g.lost)}  # they lack a value, for good
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
            if behind and i in behind:
                held = next(filterfalse(done.__getitem__, behind[i]), None)
                if held is not None:
                    sleeping.setdefault(held, []).append(r)
                    break
            if not done[i]:
                done[i] = 1
                if timed[row_of[i]]:
                    order.append(i)
                e = party[i]
                coming = [*more[i]] if i in more else []
                while e >= 0:
                    left[e - n] -= 1
                    if not left[e - n]:
                        done[e] = 1
                        order.append(e)
                        if e in sleeping:
                            ready += sleeping.pop(e)
                        if e in later:
                            coming += later[e]
                    e = coming.pop() if coming else -1
            if blocks and i in blocks and not done[party[i]]:
                sleeping.setdefault(party[i], []).append(r)
                break
            i += 1
        at[r] = i
    return order, done


def _blocking(g: Graph, *, sends: bool) -> frozenset[int]:
    """The ops that block their rank until their event is completed."""
    found = [i for ops in g.met.values() for i in ops if (row := g.row(i)) is not None and row.row.blocks]
    if sends:
        found += [i for i, e in enumerate(g.party) if e >= 0 and g.ops[i][0].is_send]
    return frozenset(found)


def happens(g: Graph, done: bytearray) -> bool:
    """Whether all ops, and the events they take part in, happen."""
    return 0 not in done or (0 not in done[: len(g.ops)] and all(done[e] for e in g.party if e >= 0))


class Read(NamedTuple):
    """A value that an op reads, and the node that wrote it."""

    op: int
    what: str
    node: int


def reads(g: Graph) -> Iterator[Read]:
    """Yields all reads of values that a node of the graph wrote, in the order of ops, by a second walk. A RECV writes
    the value of its message, so the value is read from the message."""
    cells = [w or EMPTY for w in g.layout.fresh]  # 0: exists before the step
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
    """The reads of each row: the value, its first cell, and its width; 0 for the cell of the op's microbatch."""
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
