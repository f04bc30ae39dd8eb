"""Storage of a program's values: one column of cells for each value and place, one column of events per message.

A column has one cell for each unit (microbatch x slice), or a single cell. A cell is empty, written (it then holds the
node that wrote it) or freed. The value on an edge of the graph of stages has two ends, its maker's and its user's: on
one rank they are the same column, else a message joins them.

Rows are compiled once for each (rank, kind, pipe, stage, slice) into the numbers of cells, so that a walk over a
program looks nothing up: the cell that an op of microbatch `mb` reads is `column + mb * step`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from copy import copy
from typing import NamedTuple

from zbc.ir import Kind, Op, Program
from zbc.ops import (
    COUNTED,
    EXPERTS,
    MAKER,
    ROWS,
    TIED,
    VALUES,
    WORDS,
    At,
    Lane,
    Ref,
    Row,
    Rows,
    Scope,
    experts_of,
    home_of,
    rows_with,
)

EMPTY, FREED = -1, -2  # of a cell; else the node that wrote it
HERE = 0  # `Key.end` of a value of this rank; of an edge's value at its maker, and at its user on the same rank
FAR = 1  # of a value received, or to be received, by a message
KEPT = 16  # layouts in the cache
Channel = tuple[int, int]  # sending rank, receiving rank
_OF_OWNER = {At.WORDS: WORDS, At.TIED: TIED, At.EXPERTS: EXPERTS}
_GROUPS = frozenset({At.UNITS, At.OWNERS})


class CellKey(NamedTuple):
    """A value and its owner: (pipe, stage) of a unit's, (pipe, edge) of an edge's, (rank, owner) of an owner's, (rank,
    0) of a rank's."""

    what: str
    home: int
    place: int
    end: int = HERE


class EdgeValue(NamedTuple):
    """A value that travels: on an edge, or of a rank (with edge -1)."""

    what: str
    home: int  # pipe, or the rank that makes it
    edge: int = -1


class CellColumns(NamedTuple):
    """A compiled row for one rank, stage and slice. Columns are the numbers of the cells of microbatch 0."""

    lane: Lane
    reads: tuple[int, ...]
    frees: tuple[int, ...]
    writes: tuple[int, ...]
    posts: tuple[int, ...]  # messages (of microbatch 0) that the op sends or, as a RECV, receives
    step: int  # cells from one microbatch to the next
    state: tuple[int, ...]  # cells that it reads for every microbatch
    row: Row
    every: tuple[tuple[int, int], ...]  # (column, number of cells) that must all be written before
    kind: Kind
    rank: int
    stage: int
    pipe: int
    slice: int


class Layout:
    """The columns of one program, and its rows compiled to them."""

    def __init__(self, program: Program, rows: Rows = ROWS) -> None:
        placement = program.placement
        self.program, self.rows = program, rows
        self.pipes, self.stages, self.edges = placement.pipes, placement.stages, placement.edges
        self.ranks = max(placement.ranks, len(program.ranks))
        self.slices, self.width = program.slices, program.microbatches * program.slices
        self.kinds, self.features = program.kinds, program.features
        closing = {rows[kind].closes for kind in self.kinds} - {""}
        self.closed = bool(closing)
        self.ahead = "ahead" in closing
        # Sharded weights begin a step as shards if ops gather them within it, and whole if the previous step gathered
        # them.
        gathers = program.resident > 0 or (MAKER["weights"] in self.kinds and not (self.ahead or program.flushless))
        self.begins = "shard" if gathers else "weights"
        # Whether messages are ops: true if the program has any transfer or step-level op.
        self.explicit = any(kind.is_transfer or kind.stage_wide or kind.rank_wide for kind in self.kinds)
        replicas = program.together
        # Whether other ranks hold the same values of an owner. The sum of tied weights may have one rank alone.
        self.shares = {stage: replicas * len(set(placement.holders(stage))) > 1 for stage in range(self.stages)}
        self.shares[WORDS] = program.vocabulary > 0 and replicas > 1
        self.shares |= {e: program.shared(Op(MAKER["total"], e)) for e in map(experts_of, range(self.stages))}
        self.shares[TIED] = program.tied and (
            replicas > 1
            or len(self.holding(TIED)) > 1
            or any(op[:2] == (MAKER["total"], TIED) for ops in program.ranks for op in ops)
        )
        # Whether these ranks each step a part of it, if weights are sharded; each steps all of tied weights.
        self.deals = {s: there and program.shared(Op(MAKER["weights"], s)) for s, there in self.shares.items()}
        self.deals[TIED] = False
        self.sources: list[list[int]] = [[] for _ in range(self.stages)]  # stage -> the edges that lead to it
        self.sinks: list[list[int]] = [[] for _ in range(self.stages)]
        for edge, (a, b) in enumerate(self.edges):
            self.sinks[a].append(edge)
            self.sources[b].append(edge)
        self.nodes = sum(map(len, program.ranks))
        self.cells: list[int] = []
        self.fresh: list[int] = []  # the cells as they are before the walk
        self.columns: dict[CellKey, int] = {}
        self.widths: dict[CellKey, int] = {}
        self.compiled: dict[tuple[int, Kind, int, int, int, int], CellColumns | str] = {}
        self.messages: dict[EdgeValue, int] = {}  # to its first event
        self.channels: list[tuple[Channel, EdgeValue]] = []  # per message column
        self.firsts: list[int] = []  # first event per message column
        self.events = 0
        for pipe in range(len(self.pipes)):
            for edge, (a, b) in enumerate(self.edges):
                if self.crosses(pipe, edge):
                    self._message(EdgeValue("act", pipe, edge), self.pipes[pipe][a], self.pipes[pipe][b], self.width)
                    self._message(EdgeValue("grad", pipe, edge), self.pipes[pipe][b], self.pipes[pipe][a], self.width)
        for rank in range(self.ranks if self.ahead else 0):
            self._message(EdgeValue("norm", rank), rank, rank + 1, 1)
            self._message(EdgeValue("verdict", rank), rank, rank - 1, 1)

    @classmethod
    def of(cls, program: Program, rows: Rows = ROWS) -> Layout:
        """The layout of a program, with fresh cells; programs of the same shape share compiled rows."""
        shape = program.placement, program.microbatches, program.slices, program.traits
        key = (*shape, program.kinds, id(rows), sum(map(len, program.ranks)), len(program.ranks))
        made = _MADE.get(key)
        if made is None:
            made = _MADE[key] = cls(program, rows)
            if len(_MADE) > KEPT:
                del _MADE[next(iter(_MADE))]
        new = copy(made)
        new.program, new.cells = program, made.fresh[:]
        return new

    @property
    def stops(self) -> list[int]:
        """Per message column, the event after its last."""
        return [*self.firsts[1:], self.events] if self.firsts else []

    def settle(self) -> None:
        """After the walk: detaches the columns, so that another program of the same shape adds none to this one."""
        self.columns, self.widths = dict(self.columns), dict(self.widths)

    def crosses(self, pipe: int, edge: int) -> bool:
        """Whether the ends of an edge are on two ranks."""
        a, b = self.edges[edge]
        return self.pipes[pipe][a] != self.pipes[pipe][b]

    def channel_of(self, message: int) -> Channel:
        """The sending and the receiving rank of a message."""
        return self.channels[bisect_right(self.firsts, message) - 1][0]

    def meaning(self, message: int) -> tuple[EdgeValue, int]:
        """The value of a message, and its unit."""
        k = bisect_right(self.firsts, message) - 1
        return self.channels[k][1], message - self.firsts[k]

    def key_of(self, cell: int) -> tuple[CellKey, int]:
        """The column of a cell, and its index in that column."""
        base, key = max((base, key) for key, base in self.columns.items() if base <= cell)
        return key, cell - base

    def holding(self, owner: int) -> list[int]:
        """The ranks that hold weights of an owner."""
        return sorted(self.program.members(Op(MAKER["total"], owner)))

    def owners(self, rank: int) -> list[int]:
        """The owners of gradients on a rank."""
        mine = list(self.program.owners(rank))
        return [*mine, TIED] if self.program.tied and rank in self.holding(TIED) else mine

    def tracks(self, what: str, owner: int) -> bool:
        """Whether a value exists in this program. Other values exist from the start, stay, and are not checked."""
        if what == "weights":
            return self.program.sharded and self.deals[owner]
        if what == "clean":
            return self.ahead
        if what == "total":
            return self.shares[owner] and (self.closed or MAKER["total"] in self.kinds)
        return what not in ("kv", "dkv") or self.slices > 1

    def column(self, key: CellKey, width: int) -> int:
        """The first cell of a column, which is created on first use with its contents before the walk."""
        base = self.columns.get(key)
        if base is None:
            base = self.columns[key] = len(self.fresh)
            self.widths[key] = width
            message = self._brings(key)
            if message is not None:
                self.fresh += range(self.nodes + message, self.nodes + message + width)
            else:
                there = key.what == self.begins and (self.program.resident > 0 or self.deals[key.place])
                self.fresh += [0 if there else EMPTY] * width
            self.cells += self.fresh[base:]
        return base

    def _brings(self, key: CellKey) -> int | None:
        """The first message that fills a column by itself, without a RECV."""
        if key.end != FAR:
            return None
        if VALUES[key.what].scope == "rank":
            return self.messages[EdgeValue(key.what, key.home)]
        return None if self.explicit else self.messages[EdgeValue(key.what, key.home, key.place)]

    def _message(self, message: EdgeValue, sender: int, receiver: int, width: int) -> None:
        self.messages[message] = self.events
        self.firsts.append(self.events)
        self.channels.append(((sender, receiver), message))
        self.events += width

    # ---- rows --------------------------------------------------------------------------------------------------

    def compile(self, rank: int, kind: Kind, pipe: int, stage: int, part: int, other: int) -> CellColumns | str:
        """The row of an op on a rank; the code of an error if it has no place there."""
        key = rank, kind, pipe, stage, part, other
        found = self.compiled.get(key)
        if found is None:
            found = self.compiled[key] = self._compile(*key)
        return found

    def _compile(self, rank: int, kind: Kind, pipe: int, stage: int, part: int, other: int) -> CellColumns | str:
        row = self.rows[kind]
        if not (0 <= pipe < len(self.pipes) and stage < self.stages and 0 <= part < self.slices):
            return "E202"
        if stage < 0 and not self.owns(kind, stage):
            return "E202"
        if (row.feature and row.feature not in self.features) or (row.dealt and not self.deals[stage]):
            return "E202"
        unit = row.scope is Scope.UNIT or row.scope is Scope.EVERY
        if row.scope is Scope.UNIT and self.pipes[pipe][stage] != rank:
            return "E205"
        if not unit and row.lane is not Lane.MARK and rank not in members(self.program, kind, stage):
            return "E205"
        who = _Who(rank, pipe, stage, part, row, other)

        def cells(refs: Iterable[Ref], *, made: bool = False) -> tuple[int, ...]:
            return tuple(c for ref in refs for c in self._cells(ref, who, made=made))

        posts = self._posts(who)
        if row.lane is Lane.LINK and not posts:
            return "E203"
        alone = [ref for ref in row.reads if ref.at not in _GROUPS]
        held = [ref for ref in alone if unit and VALUES[ref.what].scope in ("stage", "rank")]
        own = (cells(ref for ref in alone if ref not in held), cells(row.frees), cells(row.writes, made=True))
        state, step = cells(held), self.slices if unit else 0
        every = tuple(one for ref in row.reads if ref.at in _GROUPS for one in self._group(ref, rank, stage))
        return CellColumns(row.lane, *own, posts, step, state, row, every, kind, rank, stage, pipe, part)

    def owns(self, kind: Kind, owner: int) -> bool:
        """Whether an owner that is not a stage has ops of a kind: tied weights are stepped with the stages."""
        if owner <= EXPERTS:
            there = experts_of(owner) < self.stages and self.program.has_experts(experts_of(owner))
        else:
            there = (self.program.tied if owner == TIED else self.program.vocabulary > 0) and owner in kind.row.places
        if not there or not (kind.sums or kind in COUNTED):
            return there
        return self.shares[owner] if kind.sums else self.tracks("weights", owner)

    def _cells(self, ref: Ref, who: _Who, *, made: bool = False) -> list[int]:
        """Cells of one reference of a row, of microbatch 0; [] for a value that does not exist, unless it is `made`."""
        (what, at), scope = ref, VALUES[ref.what].scope
        if at in _OF_OWNER:
            owner = experts_of(who.stage) if at is At.EXPERTS else _OF_OWNER[at]
            there = owner != TIED or who.stage in self.program.tying
            return self._cells(Ref(what), who._replace(stage=owner)) if there and self.shares[owner] else []
        if who.stage == TIED and what == "clean":  # tied weights have no step of their own
            mine = [s for s in self.program.tying if any(pipe[s] == who.rank for pipe in self.pipes)]
            return [c for s in mine for c in self._cells(ref, who._replace(stage=s))]
        if not self.tracks(what, who.stage) and not (made and what == "total"):
            return []
        if scope == "edge":
            return [self._end(what, who.pipe, edge, at) + who.part for edge in self._edges(who, at)]
        if scope == "unit":
            if (at is At.EARLIER and who.part == 0) or (at is At.LATER and who.part == self.slices - 1):
                return []
            shift = -1 if at is At.EARLIER else 0
            return [self.column(CellKey(what, who.pipe, who.stage), self.width) + who.part + shift]
        if scope == "share":
            there = self.is_at(at, who.rank, who.stage, who.row)
            return [self.column(CellKey(what, who.rank, 0), self.width) + who.part] if there else []
        if scope == "stage":
            return [self.column(CellKey(what, who.rank, who.stage), 1)]
        if at in (At.RANK_BEFORE, At.RANK_AFTER):
            far = who.rank + (-1 if at is At.RANK_BEFORE else 1)
            return [self.column(CellKey(what, far, 0, FAR), 1)] if 0 <= far < self.ranks else []
        return [self.column(CellKey(what, who.rank, 0), 1)]

    def is_at(self, at: At, rank: int, stage: int, row: Row) -> bool:
        """Whether an op is at the end of the pipeline that a reference names."""
        if at not in (At.FIRST, At.LAST):
            return True
        ends = [s for s in range(self.stages) if not (self.sources if at is At.FIRST else self.sinks)[s]]
        return any(self.pipes[0][s] == rank and (row.scope is not Scope.UNIT or stage == s) for s in ends)

    def _edges(self, who: _Who, at: At) -> list[int]:
        """The edges into or out of an op's stage; for a transfer the edges that lead to another rank."""
        found = self.sinks[who.stage] if at is At.SINKS else self.sources[who.stage]
        if who.row.lane is not Lane.LINK:
            return found
        if who.other >= 0 or len(found) > 1:  # of several edges a transfer names one
            named = {(who.stage, who.other), (who.other, who.stage)}
            found = [e for e in found if len(found) > 1 and self.edges[e] in named]
        return [e for e in found if self.crosses(who.pipe, e)]

    def _end(self, what: str, pipe: int, edge: int, at: At) -> int:
        """The column of an edge's value at its maker's end or at its user's."""
        by_user = (what == "act") == (at is At.SOURCES)
        end = FAR if by_user and self.crosses(pipe, edge) else HERE
        return self.column(CellKey(what, pipe, edge, end), self.width)

    def _posts(self, who: _Who) -> tuple[int, ...]:
        """The messages that an op sends or receives: a transfer's, else messages that no transfer op carries."""
        row = who.row
        if row.lane is Lane.LINK or not self.explicit:
            refs = row.writes + (row.reads if row.lane is Lane.LINK else ())
            return tuple(
                self.messages[EdgeValue(ref.what, who.pipe, edge)] + who.part
                for ref in refs
                if VALUES[ref.what].scope == "edge"
                for edge in self._edges(who, ref.at)
                if self.crosses(who.pipe, edge)
            )
        found = [self.messages.get(EdgeValue(ref.what, who.rank)) for ref in row.writes]
        return tuple(x for x in found if x is not None and 0 <= self.channel_of(x)[1] < self.ranks)

    def _group(self, ref: Ref, rank: int, owner: int) -> list[tuple[int, int]]:
        """The columns of all values that a row of an owner or of a rank reads."""
        mine = [owner] if ref.at is At.UNITS else self.owners(rank)
        if VALUES[ref.what].scope == "stage":
            return [(self.column(CellKey(ref.what, rank, one), 1), 1) for one in mine]
        return [(self.column(key, self.width), self.width) for one in mine for key in self._parts(rank, one)]

    def _parts(self, rank: int, owner: int) -> list[CellKey]:
        """The columns of an owner's gradients on a rank, by unit."""
        if owner == WORDS:
            return [CellKey(what, rank, 0) for what in ("outpart", "inpart")]
        stages = self.program.tying if owner == TIED else (home_of(owner),)
        pipes = range(len(self.pipes))
        return [CellKey("part", pipe, s) for s in stages for pipe in pipes if self.pipes[pipe][s] == rank]


class _Who(NamedTuple):
    """The parts of an op that its row depends on."""

    rank: int
    pipe: int
    stage: int
    part: int
    row: Row
    other: int  # of a transfer: see `Op`


def members(program: Program, kind: Kind, stage: int) -> set[int]:
    """The ranks of one replica of the pipeline that run a step-level op; if rank-wide, all ranks of the program."""
    more = range(len(program.ranks)) if kind.rank_wide else ()
    return {*program.members(Op(kind, stage)), *more}


def rows_of(program: Program) -> Rows:
    """The rows of a program's ops, as changed by its features."""
    return rows_with(program.patches)


_MADE: dict[tuple[object, ...], Layout] = {}
