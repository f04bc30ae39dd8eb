"""Checks that every microbatch goes through every stage once, on the right ranks, in an order each rank can run.

Read off the cells of the graph: every value an op reads is written before, on its rank; written values are written once
and used; every unit's `part` of the gradients exists once, over all pipes; step-level ops are on all their ranks. If
the graph has no fault this takes no walk of its own; else the ops are examined once more for the problem texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from zbc.compiler.check import names
from zbc.compiler.check.copies import copy_problems
from zbc.compiler.check.found import raise_found
from zbc.compiler.check.redo import redo_problems
from zbc.compiler.check.resident import number_problems, resident_problems, scatter_problems
from zbc.compiler.check.vocabulary import vocabulary_problems
from zbc.compiler.graph import EMPTY, FAR, FREED, MESSAGE, CellKey, Graph, build, members
from zbc.errors import ZbcError
from zbc.ir import Op, Program
from zbc.ops import COUNTED, EXPERTS, TIED, VALUES, WORDS, Kind, Lane, Scope, experts_of, home_of


def check_complete(program: Program) -> None:
    """Raise the problems of a program before any message moves: E202, E205, E206, E208.

    E202: ops missing, repeated or out of range. E205: ops on a rank that does not hold their stage. E206: ops that come
    before their dependencies on their own rank. E208: gathered weights are missing, or too many are resident. Transfers
    are checked for range, rank and order only.
    """
    raise_found(complete_problems(build(program)))


def complete_problems(g: Graph) -> Iterator[ZbcError]:
    """The problems of `check_complete`, one by one."""
    yield from _outside(g)
    if problems := [*copy_problems(g), *vocabulary_problems(g)]:
        yield from problems
        return
    if not _units_are_whole(g):
        units = _Units(g)
        yield from units.repeated()
        yield from units.missing()
        yield from units.values()
    yield from _groups(g)
    yield from _step_ops(g)
    yield from _misplaced(g)
    yield from resident_problems(g) or number_problems(g)
    yield from scatter_problems(g)
    yield from _out_of_order(g)
    yield from _averaged(g)
    yield from redo_problems(g)


# ---- E202 ----------------------------------------------------------------------------------------------------


def _outside(g: Graph) -> Iterator[ZbcError]:
    placement, program = g.program.placement, g.program
    for i, code in g.lost:
        op = g.ops[i]
        if code != "E202":
            continue
        why = op.kind.row.idle if op.stage >= 0 else _NOBODYS.get(max(op.stage, EXPERTS))
        if op.kind.unit_wide and not program.vocabulary:
            why = "the first and the last stage hold the vocabulary"
        if why and op.stage < placement.stages and op.mb < program.microbatches:
            text = f"program: {op} has nothing to work on: {why}"
        else:
            size = f"{placement.stages} stages, {program.microbatches} microbatches"
            size += f", {len(placement.pipes)} pipes" if op.pipe else ""
            size += f", {program.slices} slices" if op.slice else ""
            text = f"program: {op} is outside the program, which has {size}"
        yield ZbcError("E202", text, where=g.where(i), hint="drop it")


_NOBODYS = {  # owners other than stages
    TIED: "no weight is shared by two stages, or the stages step it",
    WORDS: "there is one replica, or stages hold the vocabulary",
    EXPERTS: "no experts of this stage are shared out, or nobody else has these",
}


def _twice(g: Graph, again: int, first: int) -> ZbcError:
    text = f"program: {g.ops[again]} runs a second time"
    return ZbcError("E202", text, where=g.where(again), hint="drop one", details=[f"first at {g.text(first)}"])


def _units_are_whole(g: Graph) -> bool:
    """Whether every microbatch went through all stages of one pipe and left nothing, by the cells alone."""
    if g.lost or g.unmet or any(cell != MESSAGE for _, cell, _ in g.again):
        return False
    layout, parts = g.layout, dict[int, list[int]]()  # stage -> how often each unit's gradients were made
    for key, base in layout.columns.items():
        cells = layout.cells[base : base + layout.widths[key]]
        if key.what == "part":
            made = [int(w >= 0) for w in cells]
            parts[key.place] = list(map(int.__add__, parts[key.place], made)) if key.place in parts else made
        elif _may_not_stay(g, key) and max(cells, default=EMPTY) >= 0:
            return False
    if layout.width and (len(parts) < layout.stages or any(set(made) != {1} for made in parts.values())):
        return False
    return len(layout.pipes) == 1 or not _scattered(g)


def _may_not_stay(g: Graph, key: CellKey) -> bool:
    """Whether a value has to be freed by the end of the step. The pairing check handles values that are sent."""
    if VALUES[key.what].stays or key.end == FAR:
        return False
    return VALUES[key.what].scope != "edge" or not g.layout.crosses(key.home, key.place)


def _scattered(g: Graph) -> bool:
    """Whether a microbatch has ops in several pipes."""
    homes: list[int] = [-1] * g.program.microbatches
    for key, base in g.layout.columns.items():
        if key.what in ("kept", "part", "left"):
            for unit, w in enumerate(g.layout.cells[base : base + g.layout.width]):
                mb = unit // g.layout.slices
                if w != EMPTY:
                    if homes[mb] not in (-1, key.home):
                        return True
                    homes[mb] = key.home
    return False


class _Unit(NamedTuple):
    """A stage of a pipe for one slice of a microbatch."""

    pipe: int
    stage: int
    mb: int
    slice: int

    def op(self, kind: Kind) -> Op:
        return Op(kind, self.stage, self.mb, self.pipe, self.slice)


class _Units:
    """The ops of each unit, for problem texts: repeated ops, missing ops, unused values."""

    def __init__(self, g: Graph) -> None:
        self.g = g
        self.kinds = [kind for kind, row in g.layout.rows.items() if kind.computes and row.scope is Scope.UNIT]
        self.at: dict[Op, int] = {}
        self.again: list[tuple[int, int]] = []
        outside = {i for i, code in g.lost if code == "E202"}
        for i, op in enumerate(g.ops):
            if op.kind.computes and not op.kind.unit_wide and i not in outside:
                first = self.at.setdefault(op, i)
                if first != i:
                    self.again.append((i, first))

    def repeated(self) -> Iterator[ZbcError]:
        yield from (_twice(self.g, again, first) for again, first in self.again)

    def missing(self) -> Iterator[ZbcError]:
        """Each microbatch has one pipe, and all its ops there."""
        program = self.g.program
        homes: list[set[int]] = [set() for _ in range(program.microbatches)]
        for op in self.at:
            homes[op.mb].add(op.pipe)
        for mb, pipes in enumerate(homes):
            if not pipes:
                hint = f"add F s0 m{mb} and what follows it"
                yield ZbcError("E202", f"program: microbatch {mb} never runs", hint=hint)
            elif len(pipes) > 1:
                text = f"program: microbatch {mb} runs in {len(pipes)} pipes"
                ops = [f"pipe {pipe}: {self.g.text(self._first(pipe, mb))}" for pipe in sorted(pipes)]
                yield ZbcError("E202", text, details=ops, hint="drop its ops in all pipes but one")
        for pipe in range(len(program.placement.pipes)):
            for stage in range(program.placement.stages):
                for mb in range(program.microbatches):
                    for part in range(program.slices if pipe in homes[mb] else 0):
                        yield from self._missing_at(_Unit(pipe, stage, mb, part))

    def _first(self, pipe: int, mb: int) -> int:
        return min(i for op, i in self.at.items() if (op.pipe, op.mb) == (pipe, mb))

    def _missing_at(self, unit: _Unit) -> Iterator[ZbcError]:
        g = self.g
        there = {kind: self.at[unit.op(kind)] for kind in self.kinds if unit.op(kind) in self.at}
        twice = [(first, second) for first in there for second in there if self._repeats(first, second)]
        for first, second in twice:
            text = f"program: {unit.op(first)} repeats a part of {unit.op(second)}"
            details = [f"also {g.text(there[second])}"]
            yield ZbcError("E202", text, where=g.where(there[first]), hint="drop one", details=details)
        for kind, note in [] if twice else self._lacking(set(there)):
            text = f"program: no rank runs {unit.op(kind)}{note}"
            yield ZbcError("E202", text, hint=f"add it on rank {names.rank_of(g, unit.op(kind))}")

    def _repeats(self, one: Kind, other: Kind) -> bool:
        """Whether `one` makes or frees a value that `other` does, too; the smaller, else the first, reports it."""
        a, b = self.g.layout.rows[one], self.g.layout.rows[other]
        if one is other or not ({*a.writes} & {*b.writes} or {*a.frees} & {*b.frees}):
            return False
        size_a, size_b = len(a.writes + a.frees), len(b.writes + b.frees)
        return size_a < size_b or (size_a == size_b and self.kinds.index(one) < self.kinds.index(other))

    def _lacking(self, there: set[Kind]) -> list[tuple[Kind, str]]:
        """The kinds without which a unit is incomplete, with their alternatives as text."""
        rows, lacking = self.g.layout.rows, dict[Kind, str]()
        while True:
            present = [rows[kind] for kind in self.kinds if kind in there or kind in lacking]
            made = {ref.what for row in present for ref in row.writes if VALUES[ref.what].scope == "unit"}
            used = {ref.what for row in present for ref in row.frees if VALUES[ref.what].scope == "unit"}
            wanted = used - made - {"kv", "dkv"}
            if wanted:
                kinds = [kind for kind in self.kinds if any(ref.what in wanted for ref in rows[kind].writes)]
                lacking[kinds[0]] = ""
                continue
            idle = {what for what in made - used if not VALUES[what].stays and what not in ("kv", "dkv")}
            if not idle and "part" in made:
                return sorted(lacking.items(), key=lambda item: self.kinds.index(item[0]))
            kinds = [
                kind
                for kind in self.kinds
                if any(ref.what in idle for ref in rows[kind].frees)
                or (not idle and any(ref.what == "part" for ref in rows[kind].writes))
            ]
            lacking[kinds[-1]] = " (or its B and W)" if len(kinds) > 1 else ""

    def values(self) -> Iterator[ZbcError]:
        """Yields values of unit ops that are missing, made twice or left over: ops of passes, by their rows alone."""
        g, cells = self.g, self.g.layout.cells
        late = late_writers(g)
        too_late = {cell for _, cell in late}
        for i, cell, was in g.unmet:
            if not self._explains_itself(i) and (i, cell) not in late and not self._travels(cell):
                what = f"{VALUES[g.layout.key_of(cell)[0].what].text}"
                why = "which is used up before" if was == FREED else "which nothing makes"
                yield ZbcError("E202", f"program: {g.ops[i]} lacks {what}, {why}", where=g.where(i), hint="drop it")
        for i, cell, first in g.again:
            if cell != MESSAGE and not self._explains_itself(i):
                what = VALUES[g.layout.key_of(cell)[0].what].text
                text = f"program: {g.ops[i]} makes {what}, which is there already"
                details = [f"made by {g.text(first)}"] if first < len(g.ops) else []
                yield ZbcError("E202", text, where=g.where(i), hint="drop one", details=details)
        for key, base in g.layout.columns.items():
            if _may_not_stay(g, key) and not self._by_computing(key):
                for unit, w in enumerate(cells[base : base + g.layout.widths[key]]):
                    if w >= 0 and base + unit not in too_late:
                        use = names.user(g, base + unit)
                        yield ZbcError(
                            "E202", f"program: no rank runs {use}, for {VALUES[key.what].text}", hint="add it"
                        )

    def _explains_itself(self, op: int) -> bool:
        """Whether `repeated` and `missing` cover an op, or it closes a step."""
        return self.g.ops[op].kind.computes or self.g.layout.rows[self.g.ops[op].kind].scope in _WIDE

    def _travels(self, cell: int) -> bool:
        """Whether a cell is of an edge, which the pairing check covers."""
        return VALUES[self.g.layout.key_of(cell)[0].what].scope == "edge"

    def _by_computing(self, key: CellKey) -> bool:
        """Whether all ops that make and use a value compute, so that `missing` has covered it."""
        rows = {kind: row for kind, row in self.g.layout.rows.items() if kind in self.g.layout.kinds}
        kinds = [kind for kind, row in rows.items() if any(ref.what == key.what for ref in (*row.writes, *row.frees))]
        return all(kind.computes or rows[kind].lane is Lane.LINK for kind in kinds)


_WIDE = (Scope.STAGE, Scope.RANK)


def _groups(g: Graph) -> Iterator[ZbcError]:
    """After every OVERLAP come an F and another op, in either order, of different microbatches: neither needs the
    other."""
    for mark in g.marks:
        pair = g.ops[mark + 1 : min(mark + 3, g.first[g.rank(mark) + 1])]
        forward = [g.layout.rows[op.kind].family for op in pair].count("forward")
        whole = len(pair) == 2 and all(op.kind.computes and g.layout.rows[op.kind].scope is Scope.UNIT for op in pair)
        if not whole or not forward or pair[0].mb == pair[1].mb:
            behind = " and ".join(map(str, pair)) or "nothing"
            text = f"program: OVERLAP is not followed by an F and an op that does not need it, but by {behind}"
            yield ZbcError("E202", text, where=g.where(mark), hint="drop it, or put the two ops right after it")


def _step_ops(g: Graph) -> Iterator[ZbcError]:
    """Ops that close a step come together and everywhere; collectives on all ranks that share an owner or on none.

    A step is closed either by a barrier or ahead of it.
    """
    program = g.program
    seen: dict[tuple[int, Kind, int, int], int] = {}
    wide = {kind for kind in g.layout.kinds if kind.stage_wide or kind.rank_wide}
    outside = {i for i, code in g.lost if code == "E202"}
    for i, op in enumerate(g.ops) if wide else ():
        if op.kind in wide and i not in outside:
            first = seen.setdefault((g.rank(i), op.kind, op.stage, op.mb), i)
            if first != i:
                yield _twice(g, i, first)
    closing: set[str] = set()
    for family in ("barrier", "ahead"):
        used = [i for (_, kind, *_), i in seen.items() if kind.row.closes == family]
        if used and closing:
            text = f"program: {g.ops[used[0]]} belongs to a step without a barrier, which this one has"
            yield ZbcError("E202", text, where=g.where(used[0]), hint="drop the ops of one kind of step or the other")
        closing |= {family} if used else set()
    for op in _wide_ops(g) if wide else ():
        ranks = sorted(members(program, op.kind, op.stage))
        missing = [rank for rank in ranks if (rank, op.kind, op.stage, 0) not in seen]
        if _always(program, op, closing) or len(missing) < len(ranks):
            for rank in missing:
                hint = op.kind.row.places.get(op.stage) or op.kind.row.place
                yield ZbcError("E202", f"program: rank {rank} never runs {op}", hint=hint)


def _always(program: Program, op: Op, closing: set[str]) -> bool:
    """Whether a step with these closing ops must have an op."""
    if op.kind.row.closes:
        return op.kind.row.closes in closing
    return bool(closing) and program.shared(op)


def _wide_ops(g: Graph) -> Iterator[Op]:
    """Yields the step-level ops a program may have: of ranks, of owners other than stages, then stage by stage."""
    program = g.program
    renews = program.sharded and not program.resident
    yield from (Op(kind, 0) for kind in Kind if kind.rank_wide)
    for owner in (TIED, WORDS):
        yield from (Op(kind, owner) for kind in Kind if kind.stage_wide and g.layout.owns(kind, owner))
    kinds = [kind for kind in Kind if kind.stage_wide and (kind not in COUNTED or (kind.row.writes and renews))]
    for owner in map(experts_of, range(program.placement.stages)):
        yield from (Op(kind, owner) for kind in kinds if g.layout.owns(kind, owner))
    for stage in range(program.placement.stages):
        yield from (Op(kind, stage) for kind in kinds)


# ---- E205, E206 ----------------------------------------------------------------------------------------------


def _misplaced(g: Graph) -> Iterator[ZbcError]:
    for i, code in g.lost:
        if code == "E205":
            op = g.ops[i]
            wide = op.kind.stage_wide or op.kind.rank_wide
            owners: Iterable[int] = g.program.members(op) if wide else (names.rank_of(g, op),)
            ranks = " and ".join(map(str, sorted(set(owners))))
            text = f"program: {op} is on rank {g.rank(i)}, its stage is on rank {ranks}"
            yield ZbcError("E205", text, where=g.where(i), hint=f"move it to rank {ranks}")


def _out_of_order(g: Graph) -> Iterator[ZbcError]:
    pairs = sorted({*g.late, *late_reads(g)})
    seen: set[int] = set()
    for early, late in pairs:
        if g.ops[late].kind.stage_wide and late in seen:
            continue  # ops that wait for a stage's op: the first problem is enough
        seen.add(late)
        text = f"program: {g.ops[early]} comes before {g.ops[late]}, which it needs"
        hint = f"move step {g.place(late)[1]} before step {g.place(early)[1]}"
        yield ZbcError("E206", text, details=[g.text(early), g.text(late)], hint=hint)


def _averaged(g: Graph) -> Iterator[ZbcError]:
    """An AVERAGE changes weights, so all ops of a step that use them come after it."""
    began: dict[int, int] = {}
    rank = -1
    for i, op in enumerate(g.ops) if g.program.averages else ():
        if g.rank(i) != rank:
            rank, began = g.rank(i), {}
        of = g.program.tying if op.stage == TIED else (home_of(op.owner),)
        if op.kind.computes or op.kind.steps:
            began.setdefault(home_of(op.owner), i)
        elif op.kind.row.feature == "averages" and not began.keys().isdisjoint(of):
            first = min(began[home] for home in of if home in began)
            text = f"program: {op} comes after {g.ops[first]}, whose weights it changes"
            hint = f"move step {g.place(i)[1]} before step {g.place(first)[1]}"
            yield ZbcError("E206", text, details=[g.text(first), g.text(i)], hint=hint)


def late_reads(g: Graph) -> Iterator[tuple[int, int]]:
    """Yields (op, a later op on its rank that writes the cell it finds empty). E208 covers weights."""
    writers = late_writers(g)
    for unmet in g.unmet:
        key = g.layout.key_of(unmet.cell)[0]
        if g.program.resident and key.what == "weights" and key.place >= 0:
            continue
        if (unmet.op, unmet.cell) in writers:
            yield unmet.op, writers[unmet.op, unmet.cell]


def late_writers(g: Graph) -> dict[tuple[int, int], int]:
    """(op, cell it finds empty) -> the first later op on its rank that writes the cell, if any."""
    wanted: dict[int, list[int]] = {}
    for unmet in g.unmet:
        wanted.setdefault(unmet.cell, []).append(unmet.op)
    writers: dict[tuple[int, int], int] = {}
    for i, r in enumerate(g.row_of) if wanted else ():
        if r < 0:
            continue
        row = g.rows[r]
        for c in row.writes:
            for op in wanted.get(c + g.ops[i][2] * row.step, ()):
                if op < i and g.rank(op) == row.rank:
                    writers.setdefault((op, c + g.ops[i][2] * row.step), i)
    return writers
