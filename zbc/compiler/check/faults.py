"""Every fault of a program, read off the cells of its graph and worded by the rows of its kinds.

The walk that built the graph has seen each value made, read and freed. What it cannot see are five rules: numbers of
counted ops, room for gathered weights, sums after the one that completes them, averages after a use of weights, and
what REDO repeats. Faults of ops come first, in the order in which their answers are meaningful; those of messages
between them mean something only if there are none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from zbc.compiler.check import names
from zbc.compiler.graph.graph import MESSAGE, Graph
from zbc.compiler.graph.layout import EMPTY, FAR, FREED, CellKey, Channel, EdgeValue, members
from zbc.errors import ZbcError
from zbc.ir import Message, Op
from zbc.ops import COUNTED, EXPERTS, TIED, VALUES, WORDS, At, Kind, Scope, experts_of, home_of, owner_text, round_trip

# Names a kind: REDO alone runs ops again, which no value says.


def op_faults(g: Graph) -> Iterator[ZbcError]:
    """Yields the faults of a program before any message moves. E202: ops missing, repeated or out of range. E205: ops
    on a rank that does not hold their stage. E206: ops that come before their dependencies on their own rank. E208:
    gathered weights are missing, or too many are resident. Transfers are checked for range, rank and order only."""
    found = _Missing(g)
    yield from (_place(g, i, code) for i, code in g.lost if code == "E202")
    yield from found.faults()
    yield from _groups(g)
    yield from (_place(g, i, code) for i, code in g.lost if code == "E205")
    yield from [*_weights(g)] or _numbers(g)
    late = ((op, j) for (op, cell), j in found.late.items() if not _comes_and_goes(g, cell))  # E208 covers weights
    yield from _order(g, sorted({*g.late, *late, *found.early}))
    yield from _averaged(g)
    yield from _redone(g)


def message_faults(g: Graph) -> Iterator[ZbcError]:
    """Yields E203 for transfers that miss an end or have one too many, E204 for the first message of each channel on
    which its ends disagree. None for a schedule, which has neither transfers nor step-level ops yet."""
    if not g.layout.explicit:
        return
    lost, unpaired = [i for i, _ in g.lost], _unpaired(g)  # of transfers that carry nothing; others were faults of ops
    broken = {g.layout.channel_of(x) for x in unpaired} | {_channel(g, i) for i in (*g.spare.values(), *lost)}
    yield from (_lacks(g, x) for x in unpaired)
    yield from (_twice(g, i, first) for i, cell, first in g.again if cell == MESSAGE and g.ops[i].kind.is_transfer)
    yield from (_place(g, i, "E203") for i in lost)
    for channel, k, send, recv in g.mixed:
        if channel not in broken:  # the numbers of its messages would be guesses
            (a, b), sent, taken = channel, names.named(g, g.ops[send]), names.named(g, g.ops[recv])
            text = f"program: channel r{a} -> r{b} message {k}: rank {a} sends {sent}, rank {b} receives {taken}"
            details = [g.text(send), g.text(recv)]
            yield ZbcError("E204", text, details=details, hint="order the receives of a channel as its sends")


# ---- ops without a place -------------------------------------------------------------------------------------


def _place(g: Graph, i: int, code: str) -> ZbcError:
    """The fault of an op that is not of this program, on a foreign rank (E205), or carries nothing (E203)."""
    op, program = g.ops[i], g.program
    hint = "drop it"
    if code == "E205":
        ranks = program.members(op) if op.kind.row.scope is not Scope.UNIT else (names.rank_of(g, op),)
        home = " and ".join(map(str, sorted({*ranks})))
        text = f"{names.named(g, op)} is on rank {g.rank(i)}, its stage is on rank {home}"
        hint = f"move it to rank {home}"
    elif code == "E203":
        text = f"{op} carries nothing: {_nothing(g, op)}"
    else:
        idle = op.kind.row.idle if op.stage >= 0 else _NOBODYS.get(max(op.stage, EXPERTS), "")
        if op.kind.unit_wide and not program.vocabulary:
            idle = "the first and the last stage hold the vocabulary"
        if idle and op.stage < program.placement.stages and op.mb < program.microbatches:
            text = f"{op} has nothing to work on: {idle}"
        else:
            size = f"{program.placement.stages} stages, {program.microbatches} microbatches"
            size += f", {len(program.placement.pipes)} pipes" if op.pipe else ""
            size += f", {program.slices} slices" if op.slice else ""
            text = f"{op} is outside the program, which has {size}"
    return ZbcError(code, f"program: {text}", where=g.where(i), hint=hint)


_NOBODYS = {  # owners other than stages
    TIED: "no weight is shared by two stages, or the stages step it",
    WORDS: "there is one replica, or stages hold the vocabulary",
    EXPERTS: "no experts of this stage are shared out, or nobody else has these",
}


def _nothing(g: Graph, op: Op) -> str:
    message = g.program.placement.message(op)
    if message is None:
        does = "reads the output" if At.SINKS in (op.kind.takes, op.kind.gives) else "makes the input"
        return f"no stage {does} of stage {op.stage}"
    end = message.sink if op.stage == message.source else message.source
    return f"stages {op.stage} and {end} are both on rank {names.rank_of(g, op)}"


def _groups(g: Graph) -> Iterator[ZbcError]:
    """After every OVERLAP come an F and another op, in either order, of different microbatches: neither needs the
    other."""
    for mark in g.marks:
        pair = g.ops[mark + 1 : min(mark + 3, g.first[g.rank(mark) + 1])]
        forward = [op.kind.is_forward for op in pair].count(True)
        whole = len(pair) == 2 and all(op.kind.computes and op.kind.row.scope is Scope.UNIT for op in pair)
        if not whole or not forward or pair[0].mb == pair[1].mb:
            behind = " and ".join(map(str, pair)) or "nothing"
            text = f"program: OVERLAP is not followed by an F and an op that does not need it, but by {behind}"
            yield ZbcError("E202", text, where=g.where(mark), hint="drop it, or put the two ops right after it")


# ---- ops that are missing, and those too many ----------------------------------------------------------------


class _Need(NamedTuple):
    """A value of one unit that no op makes (or uses up), and the op that shows it; -1: the end of the step does."""

    key: CellKey
    unit: int
    made: bool
    seen: int


class _Missing:
    """The ops that would make what others read, use what others leave, or stand on all ranks of their owner. Of several
    that could, the one is missing that explains most of what is open."""

    def __init__(self, g: Graph) -> None:
        self.g, self.late = g, _late_writers(g)
        self.once = {kind for kind in g.layout.kinds if kind.row.scope is Scope.UNIT}
        self.few = {kind for kind in g.layout.kinds if not kind.is_mark} - self.once
        self.out = {i for i, code in g.lost if code == "E202"}
        self.spare: set[int] = set()  # ops to drop: what they lack or leave is no fault of its own
        self.found: list[ZbcError] = []
        self.early: list[tuple[int, int]] = []  # op, a later op that makes room for what it makes
        self.open: list[_Need] = []
        self.bare: list[_Need] = []  # that no missing op explains
        self.gone: dict[names.Home, list[int]] = {}  # missing op -> what shows it

    def faults(self) -> Iterator[ZbcError]:
        g = self.g
        self._twice()
        self._made_again()
        self._used_up()
        self._read()
        self._left()
        while self.open:
            self._choose()
        self._wide()
        yield from self.found
        units = sorted((home for home in self.gone if home.rank < 0), key=names.place)
        yield from (_never(g, home, self.gone[home]) for home in units)
        yield from (_never(g, home, self.gone[home]) for home in self.gone if home.rank >= 0)
        if not (self.found or self.gone or self.early or self.late or g.lost or g.late):
            yield from (_bare(g, need) for need in self.bare)

    # ---- too many

    @cached_property
    def there(self) -> dict[names.Home, int]:
        """The first place of each op that has one."""
        return self._first(range(len(self.g.ops)))

    @cached_property
    def wide(self) -> dict[names.Home, int]:
        """Of these the ops that are of no unit."""
        return self._first(i for i, op in enumerate(self.g.ops) if op[0] in self.few)

    def _first(self, ops: Iterable[int]) -> dict[names.Home, int]:
        g, found = self.g, dict[names.Home, int]()
        for i in ops:
            if i not in self.out:
                found.setdefault(names.home(g.rank(i), g.ops[i]), i)
        return found

    def _twice(self) -> None:
        g = self.g
        units, few = [op for op in g.ops if op[0] in self.once], sum(op[0] in self.few for op in g.ops)
        if not self.out and len({*units}) == len(units) and len(self.wide) == few:
            return  # as nearly always, and a large dictionary less
        for i, op in enumerate(g.ops):
            first = i if i in self.out else self.there[names.home(g.rank(i), op)]
            if first != i and not op.kind.is_mark:
                self.spare.add(i)
                self.found += [] if op.kind.is_transfer else [_twice(g, i, first)]

    def _made_again(self) -> None:
        """Of two ops that make one value one is too many, or the op between that makes room is missing or late."""
        g = self.g
        for i, cell, node in g.again:
            if i in self.spare or g.ops[i].kind.is_transfer or _comes_and_goes(g, cell):
                continue
            first = names.op_of(g, node, cell)
            users = () if cell == MESSAGE else names.users(g, *g.layout.key_of(cell))
            between = [home for home in users if first < 0 or not g.layout.rows[home.op.kind].writes]
            room = min((self.there.get(home, -1) for home in between), default=i)
            if room < 0:
                self.open.append(_Need(*g.layout.key_of(cell), made=False, seen=i))
            elif room > i:
                self.early.append((i, room))
                self.spare.add(room)
            else:
                self._repeats(i, first)

    def _used_up(self) -> None:
        """Of two ops that use up one value one is too many, unless one of them only makes room for a while."""
        g = self.g
        for i, cell, was in g.unmet:
            if was == FREED and (i, cell) not in self.late and not _comes_and_goes(g, cell):
                users = [home for home in names.users(g, *g.layout.key_of(cell)) if home in self.there]
                others = [self.there[home] for home in users if g.layout.rows[home.op.kind].writes]
                if any(self.there[home] == i for home in users):
                    for other in others:
                        self._repeats(i, other)

    def _repeats(self, one: int, other: int) -> None:
        """Of two ops the smaller is too many, else the first kind: a half beside the whole."""
        g = self.g
        if one == other or {one, other} & self.spare:
            return
        if other >= 0:
            one, other = sorted((one, other), key=lambda i: (_size(g, i), names.number(g.ops[i].kind)))
        self.spare.add(one)
        text = f"repeats a part of {g.ops[other]}" if other >= 0 else "makes a value that is there already"
        details = [f"also {g.text(other)}"] if other >= 0 else []
        self.found.append(
            ZbcError("E202", f"program: {g.ops[one]} {text}", where=g.where(one), hint="drop one", details=details)
        )

    # ---- missing

    def _read(self) -> None:
        """Values that ops read and nothing on their rank makes."""
        g = self.g
        for i, cell, _ in g.unmet:
            if (i, cell) in self.late or i in self.spare or _comes_and_goes(g, cell):
                continue
            key, unit = g.layout.key_of(cell)
            if not (g.layout.explicit and names.travels(g, key) and (key.end == FAR or g.ops[i].kind.is_transfer)):
                self.open.append(_Need(key, unit, made=True, seen=i))

    def _left(self) -> None:
        """Values that ops leave at the end of the step, and gradients that no op makes: each unit's exist once, in one
        pipe."""
        g, layout = self.g, self.g.layout
        later = {cell for _, cell in self.late}
        pipes, made = len(layout.pipes), [[0] * layout.width for _ in range(layout.stages)]
        for key, base in layout.columns.items():
            cells = layout.cells[base : base + layout.widths[key]]
            if key.what == "part":
                made[key.place] = [count + (w >= 0) for count, w in zip(made[key.place], cells, strict=True)]
            elif not (VALUES[key.what].stays or key.end == FAR or names.travels(g, key)):
                for unit, w in enumerate(cells) if max(cells, default=-1) >= 0 else ():
                    if w >= 0 and base + unit not in later and (i := names.op_of(g, w)) not in self.spare:
                        self.open.append(_Need(key, unit, made=False, seen=i))
        if pipes == 1 and all(0 not in counts for counts in made):
            return
        homes: list[dict[int, int]] = [{} for _ in range(g.program.microbatches)]  # pipe -> its first op
        for (rank, op), i in self.there.items():
            if rank < 0 and op.kind.computes:
                homes[op.mb].setdefault(op.pipe, i)
        for mb, found in enumerate(homes):
            if len(found) != 1:
                self.found.append(_divided(g, mb, found))
        for stage, counts in enumerate(made):
            for unit in (unit for unit, count in enumerate(counts) if not count):
                for pipe in homes[unit // layout.slices]:
                    self.open.append(_Need(CellKey("part", pipe, stage), unit, made=True, seen=-1))

    def _choose(self) -> None:
        """Settles what is open: of the ops that could, the one that explains most; then what these lack themselves."""
        g = self.g
        needs, ops, lost, self.open = self.open, list[list[names.Home]](), {i for i, _ in g.lost}, []
        for need in needs:
            homes = (names.makers if need.made else names.users)(g, need.key, need.unit)
            away = any(self.there.get(home) in lost for home in homes)  # on a rank where it does nothing
            ops.append([] if away else [home for home in homes if home not in self.there])
        explained = Counter(home for homes in ops for home in homes)
        for need, homes in zip(needs, ops, strict=True):
            if not homes:
                self.bare.append(need)
                continue
            worth = {home: (explained[home], *self._fits(home.op), k) for k, home in enumerate(homes)}
            best = max(homes, key=worth.__getitem__)
            if best not in self.gone:
                self.gone[best] = []
                self.open += [] if best.rank >= 0 else self._lacks(best.op)
            self.gone[best] += [need.seen] if need.seen >= 0 else []

    def _fits(self, op: Op) -> tuple[int, int, bool]:
        """How well an op fits in: not beside ops that make the same, with what it reads, of a kind that is used."""
        rows, made = self.g.layout.rows, {*self.g.layout.rows[op.kind].writes}
        rivals = [kind for kind, row in rows.items() if kind is not op.kind and made & {*row.writes}]
        beside = sum(names.Home(-1, op._replace(kind=kind)) in self.there for kind in rivals)
        lacks = len(self._lacks(op)) if op.kind.row.scope is Scope.UNIT else 0
        return -beside, -lacks, op.kind in self.g.layout.kinds

    def _lacks(self, op: Op) -> list[_Need]:
        """What an op of a unit would read of its own unit, and nothing makes."""
        layout, unit = self.g.layout, op.mb * self.g.layout.slices + op.slice
        refs = [ref for ref in layout.rows[op.kind].reads if VALUES[ref.what].scope == "unit" and ref.at is At.OWN]
        keys = [CellKey(ref.what, op.pipe, op.stage) for ref in refs if layout.tracks(ref.what, op.stage)]
        empty = [key for key in keys if key not in layout.columns or layout.cells[layout.columns[key] + unit] == EMPTY]
        return [_Need(key, unit, made=True, seen=-1) for key in empty]

    def _wide(self) -> None:
        """Ops of ranks and owners: those that close a step come together and everywhere, either with a barrier or ahead
        of it; collectives on all ranks of an owner or on none; ops of all ranks for each unit."""
        g, program = self.g, self.g.program
        wide = {kind for kind in g.layout.kinds if kind.stage_wide or kind.rank_wide}
        closing = {kind.row.closes for kind in wide} - {""}
        if len(closing) > 1:
            i = min(i for (_, op), i in self.wide.items() if op.kind.row.closes == "ahead")
            text = f"program: {g.ops[i]} belongs to a step without a barrier, which this one has"
            hint = "drop the ops of one kind of step or the other"
            self.found.append(ZbcError("E202", text, where=g.where(i), hint=hint))
        for op in _wide_ops(g) if wide else ():
            ranks = sorted(members(program, op.kind, op.stage))
            missing = [home for home in (names.Home(rank, op) for rank in ranks) if home not in self.wide]
            always = op.kind.row.closes in closing if op.kind.row.closes else bool(closing) and program.shared(op)
            if always or len(missing) < len(ranks):
                for home in missing:
                    self.gone.setdefault(home, [])
        each = [kind for kind in Kind if kind.unit_wide and kind.row.feature in program.features]
        for rank in range(program.placement.ranks) if each else ():
            units = ((mb, part) for mb in range(program.microbatches) for part in range(program.slices))
            for op in (Op(kind, 0, mb, 0, part) for mb, part in units for kind in each):
                if names.Home(rank, op) not in self.wide:
                    self.gone.setdefault(names.Home(rank, op), [])


def _wide_ops(g: Graph) -> Iterator[Op]:
    """Yields the step-level ops a program may have: of ranks, of owners other than stages, then stage by stage."""
    program, layout = g.program, g.layout
    renews = program.sharded and not program.resident
    yield from (Op(kind, 0) for kind in Kind if kind.rank_wide)
    for owner in (TIED, WORDS):
        yield from (Op(kind, owner) for kind in Kind if kind.stage_wide and layout.owns(kind, owner))
    kinds = [kind for kind in Kind if kind.stage_wide and (kind not in COUNTED or (kind.row.writes and renews))]
    for owner in map(experts_of, range(layout.stages)):
        yield from (Op(kind, owner) for kind in kinds if layout.owns(kind, owner))
    for stage in range(layout.stages):
        yield from (Op(kind, stage) for kind in kinds)


def _size(g: Graph, i: int) -> int:
    row = g.layout.rows[g.ops[i].kind]
    return len(row.writes + row.frees)


def _twice(g: Graph, again: int, first: int) -> ZbcError:
    op = g.ops[again]
    text = f"program: {names.named(g, op)} runs a second time"
    details = [f"first at {g.text(first)}"]
    return ZbcError(op.kind.row.fault, text, where=g.where(again), hint="drop one", details=details)


def _never(g: Graph, home: names.Home, shown: list[int]) -> ZbcError:
    op, row = home.op, home.op.kind.row
    details = [g.text(i) for i in sorted(shown)[:1]]
    if home.rank < 0:
        note = " (or its {} and {})".format(*_HALVES) if op.kind in _WHOLE else ""
        hint = f"add it on rank {names.rank_of(g, op)}"
        return ZbcError(row.fault, f"program: no rank runs {op}{note}", details=details, hint=hint)
    text = f"program: rank {home.rank} never runs {op}"
    return ZbcError(row.fault, text, details=details, hint=row.places.get(op.stage) or row.place)


_WHOLE, _HALVES = round_trip(split=False)[1:], round_trip(split=True)[1:]


def _bare(g: Graph, need: _Need) -> ZbcError:
    what, who = VALUES[need.key.what].text, g.ops[need.seen] if need.seen >= 0 else "a step"
    text = f"lacks {what}, which is used up before" if need.made else f"leaves {what}"
    return ZbcError("E202", f"program: {who} {text}", where=g.where(max(need.seen, 0)), hint="drop it, or plan again")


def _divided(g: Graph, mb: int, pipes: dict[int, int]) -> ZbcError:
    if not pipes:
        text = f"program: microbatch {mb} never runs"
        return ZbcError("E202", text, hint=f"add F s0 m{mb} and what follows it")
    text = f"program: microbatch {mb} runs in {len(pipes)} pipes"
    ops = [f"pipe {pipe}: {g.text(i)}" for pipe, i in sorted(pipes.items())]
    return ZbcError("E202", text, details=ops, hint="drop its ops in all pipes but one")


# ---- order within a rank -------------------------------------------------------------------------------------


def _order(g: Graph, pairs: Iterable[tuple[int, int]]) -> Iterator[ZbcError]:
    seen: set[int] = set()
    for early, late in pairs:
        if g.ops[late].kind.stage_wide and late in seen:
            continue  # ops that wait for a stage's op: the first fault is enough
        seen.add(late)
        yield _before(g, early, late)


def _before(g: Graph, early: int, late: int) -> ZbcError:
    text = f"program: {g.ops[early]} comes before {g.ops[late]}, which it needs"
    hint = f"move step {g.place(late)[1]} before step {g.place(early)[1]}"
    return ZbcError("E206", text, details=[g.text(early), g.text(late)], hint=hint)


def _late_writers(g: Graph) -> dict[tuple[int, int], int]:
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


# ---- what cells do not show ----------------------------------------------------------------------------------


def _comes_and_goes(g: Graph, cell: int) -> bool:
    """Whether a cell is of weights that are gathered and freed within a step (E208)."""
    if cell == MESSAGE or not g.program.resident:
        return False
    key, _ = g.layout.key_of(cell)
    return key.what == "weights" and key.place not in (WORDS, TIED)


def _weights(g: Graph) -> Iterator[ZbcError]:
    """Weights that come and go are there when they are needed, used before they go, and fit into their room."""
    if not g.program.resident:
        return
    wrong: dict[int, tuple[str, str]] = {}
    for i, cell, _ in g.unmet:
        if _comes_and_goes(g, cell):
            owner = g.layout.key_of(cell)[0].place
            whose = f"stage {owner}" if owner >= 0 else f"the experts of stage {experts_of(owner)}"
            hint = f"put a {Kind.GATHER} {owner_text(owner)} before it"
            wrong[i] = f"{g.ops[i]} needs the weights of {whose}, which are not there", hint
    for i, cell, _ in g.again:
        if cell != MESSAGE and g.layout.key_of(cell)[0].what == "weights":
            wrong[i] = f"{g.ops[i]} gathers weights that are there", "drop it, or free them before"
    room, lost = g.program.resident, {i for i, _ in g.lost}
    for rank in range(len(g.first) - 1):
        used: dict[int, bool] = {}  # gathered owners -> whether an op has used their weights
        for i in g.mine(rank):
            op, row = g.ops[i], g.layout.rows[g.ops[i].kind]
            owners = (op.stage, experts_of(op.stage)) if row.scope is Scope.UNIT else (op.stage,)
            dealt = [o for o in owners if o != WORDS and g.layout.deals.get(o)]
            makes, reads, frees = (any(ref.what == "weights" for ref in x) for x in (row.writes, row.reads, row.frees))
            for owner in dealt if i not in lost and row.scope in (Scope.UNIT, Scope.STAGE) else ():
                full = [place for place in used if place >= 0]
                if makes and owner not in used and owner >= 0 and len(full) >= room:
                    stages = ", ".join(f"s{s}" for s in sorted(full))
                    text = f"{op} finds no room: {stages} fill the {room} that memory.resident allows"
                    wrong[i] = text, "put a FREE before it"
                elif frees and used.get(owner) is False:
                    wrong[i] = f"{op} frees weights that nothing has used", "drop it and its GATHER"
                elif op.kind.steps and owner in used:
                    text = f"{op} leaves gathered weights of before the step behind"
                    wrong[i] = text, f"put FREE {owner_text(owner)} before it"
                if makes:
                    used[owner] = False
                elif frees:
                    used.pop(owner, None)
                elif reads and owner in used:
                    used[owner] = True
    for i, (text, hint) in sorted(wrong.items()):
        yield ZbcError("E208", f"program: {text}", where=g.where(i), hint=hint)


def _numbers(g: Graph) -> Iterator[ZbcError]:
    """Ops that may come several times in a step are numbered as they come; none sums after the sum of all."""
    if not COUNTED & g.layout.kinds:
        return
    count, complete, lost = dict[tuple[int, Kind, int], int](), dict[tuple[int, int], int](), {i for i, _ in g.lost}
    after: list[ZbcError] = []
    for i, op in enumerate(g.ops):
        rank = g.rank(i)
        if op.kind.sums:
            complete[rank, op.stage] = i
        elif op.kind.row.cost == "reduce" and (rank, op.stage) in complete:
            text = f"program: {op} comes after {g.ops[complete[rank, op.stage]]}, which completes its stage's gradients"
            after.append(ZbcError("E206", text, where=g.where(i), hint="put it before, or drop it"))
        if op.kind in COUNTED and i not in lost:
            number = count.get((rank, op.kind, op.stage), 0)
            if op.mb != number:
                text = f"program: {op} is number {number} of its kind and stage on its rank, counted from 0"
                yield ZbcError("E202", text, where=g.where(i), hint=f"write {op._replace(mb=number)}")
            count[rank, op.kind, op.stage] = max(number, op.mb) + 1
    yield from after


def _averaged(g: Graph) -> Iterator[ZbcError]:
    """An AVERAGE changes weights, so all ops of a step that use them come after it."""
    for rank in range(len(g.first) - 1) if g.program.averages else ():
        began: dict[int, int] = {}
        for i in g.mine(rank):
            op = g.ops[i]
            of = g.program.tying if op.stage == TIED else (home_of(op.owner),)
            if op.kind.computes or op.kind.steps:
                began.setdefault(home_of(op.owner), i)
            elif op.kind.row.feature == "averages" and not began.keys().isdisjoint(of):
                first = min(began[home] for home in of if home in began)
                text = f"program: {op} comes after {g.ops[first]}, whose weights it changes"
                hint = f"move step {g.place(i)[1]} before step {g.place(first)[1]}"
                yield ZbcError("E206", text, details=[g.text(first), g.text(i)], hint=hint)


def _redone(g: Graph) -> Iterator[ZbcError]:
    """Before REDO come only kinds that may run twice, and both ends of their messages or none. If the verdict differs
    from the assumed one, every rank drops the results of the ops before its REDO, waits for their messages, and runs
    them again, messages and all. So the second run cannot deadlock where the first would not."""
    if Kind.REDO not in g.layout.kinds:
        return
    redo = {g.rank(i): i for i, op in reversed([*enumerate(g.ops)]) if op.kind is Kind.REDO}
    for rank, at in redo.items():
        wrong = next((i for i in range(g.first[rank], at) if not g.layout.rows[g.ops[i].kind].repeats), -1)
        if wrong >= 0:
            yield _before(g, wrong, at)
    for ends in zip(g.sender, g.receiver, strict=True) if redo else ():
        if min(ends) >= 0 and all(g.ops[i].kind.is_transfer and g.rank(i) in redo for i in ends):
            early, late = sorted(ends, key=lambda i: i > redo[g.rank(i)])
            if early < redo[g.rank(early)] and late > redo[g.rank(late)]:
                text = f"{names.named(g, g.ops[early])} comes before REDO and {names.named(g, g.ops[late])} after it"
                hint = f"move REDO after it on rank {g.rank(late)}, or before the other on rank {g.rank(early)}"
                yield ZbcError("E206", f"program: {text}", details=[g.text(early), g.text(late)], hint=hint)


# ---- messages ------------------------------------------------------------------------------------------------


def _unpaired(g: Graph) -> list[int]:
    """The messages that lack an end although an op makes, sends, receives or uses them."""
    layout, found = g.layout, set[int]()
    for x, (send, recv) in enumerate(zip(g.sender, g.receiver, strict=True)):
        if (send < 0) is not (recv < 0) and layout.meaning(x)[0].edge >= 0:
            found.add(x)
    cells = [(*layout.key_of(cell), EMPTY) for _, cell, _ in g.unmet]
    for key, base in layout.columns.items():
        if key.end != FAR and names.travels(g, key):
            cells += [(key, unit, w) for unit, w in enumerate(layout.cells[base : base + layout.width]) if w >= 0]
    for key, unit, w in cells:
        if names.travels(g, key) and (key.end == FAR or w >= 0):
            x = layout.messages[EdgeValue(*key[:3])] + unit
            found |= {x} if g.sender[x] < 0 and g.receiver[x] < 0 else set()
    return sorted(found, key=lambda x: (layout.meaning(x)[0].home, layout.meaning(x)[0].edge, x))


def _lacks(g: Graph, message: int) -> ZbcError:
    here, (a, b) = max(g.sender[message], g.receiver[message]), g.layout.channel_of(message)
    (what, home, edge), unit = g.layout.meaning(message)
    source, sink = g.layout.edges[edge] if what == "act" else reversed(g.layout.edges[edge])
    mb, part = divmod(unit, g.layout.slices)
    carried, placement = Message(source, sink, mb, home, part), g.program.placement
    sender, receiver = (names.named(g, op) for op in (placement.send(carried), placement.recv(carried)))
    if here < 0:
        text, hint = f"{sender} and {receiver} are missing", f"add the first on rank {a} and the second on rank {b}"
        return ZbcError("E203", f"program: {text}", hint=hint)
    sent = g.sender[message] >= 0
    text = f"program: {names.named(g, g.ops[here])} has no {receiver if sent else sender}"
    place = f"{b}, before what uses" if sent else f"{a}, after what makes"
    hint = f"add it on rank {place} the tensor"
    return ZbcError("E203", text, where=g.where(here), hint=hint)


def _channel(g: Graph, i: int) -> Channel:
    op, placement = g.ops[i], g.program.placement
    known = 0 <= op.stage < placement.stages and op.pipe < len(placement.pipes)
    here = names.rank_of(g, op) if known else g.rank(i)
    there = here if (peer := placement.peer(op)) is None else peer
    return (here, there) if op.kind.is_send else (there, here)
