"""Gathers the weights of a stage before they are needed, and frees them once others need the room."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, NamedTuple

from zbc.compiler.graph.layout import rows_of
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.passes.insert_comm import sent, with_experts
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Program, groups
from zbc.ops import WORDS, Rows, home_of


@dataclass(frozen=True, slots=True)
class GatherWeights:
    """Put `FREE s` and `GATHER t` where a rank that can hold `resident` of its stages turns from s to t.

        F s0 m3          F s0 m3
        F s4 m0    ->    FREE s0
                         GATHER s4
                         F s4 m0

    The freed stage is the one whose next use is farthest (Belady, IBM Systems Journal 5, 1966: no order of gathers has
    fewer); on a tie, the one used least recently, whose room was free first. Its FREE follows its last use, and the
    stage that takes its room is gathered right after it, ahead of its own use. A rank's vocabulary shard takes no part
    in that: it is gathered once, ahead of all. `resident` None: as many as fit `room` bytes, 2 if that is None, too.
    `with_w`: W needs the weights, too. Raises E110 if there is no room, or more than can be used.
    """

    name: ClassVar[str] = "gather-weights"
    resident: int | None
    with_w: bool = False
    room: float | None = None

    def run(self, program: Program, context: Context) -> Program:
        most = max(len(program.placement.stages_of(rank)) for rank in range(program.placement.ranks))
        words = _Words.of(program, context)
        room = self._auto(program, context, most, words) if self.resident is None else self.resident
        if not 1 <= room <= most:
            text = f"config: memory.resident is {room}, a rank of this schedule has {most} stage{'s' * (most > 1)}"
            raise ZbcError("E110", text, hint=f"set memory.resident to a number from 1 to {most}, or drop it")
        return self._placed(program, room, words)

    def _placed(self, program: Program, room: int, words: _Words) -> Program:
        marked = replace(program, resident=room, with_w=self.with_w)
        rows = rows_of(marked)
        placed = (_place(ops, list(_uses(ops, marked, rows)), room) for ops in program.ranks)
        ranks = [[*_words(marked), *with_experts(ops, marked, Kind.GATHER, Kind.FREE)] for ops in placed]
        return marked.with_ranks(words.after(ranks), by=self.name)

    def _auto(self, program: Program, context: Context, most: int, words: _Words) -> int:
        """The most stages that fit in `room`, 2 if that is unknown; at least those of a group."""
        least = 2 if program.grouped and most > 1 else 1
        if self.room is None or context.costs.bytes is None:
            return min(2, most)
        for count in range(most, least, -1):
            tried = peaks(self._placed(program, count, words), context.costs)
            if max(rank.bytes for rank in tried) <= self.room:
                return count
        return least


@dataclass(frozen=True, slots=True)
class RenewWeights:
    """Put `GATHER s` for each stage of a rank ahead of its first use, if replicas of a stage share out its optimizer
    and weights stay between steps.

        F s0 m0          GATHER s0
        F s4 m0    ->    GATHER s4
        F s8 m0          F s0 m0
                         GATHER s8
                         F s4 m0
                         F s8 m0

    A step takes as long as with `GatherWeights` and room for all stages: its first F waits for one gather, the others
    overlap. One is ahead of the running stage, so messages of at most two exist. With two pipes ranks meet in the
    gathers of several stages: then all gathers come first, in the order in which any holder needs them. A rank's
    vocabulary shard comes first: I and GIVE of later microbatches precede many a stage.
    """

    name: ClassVar[str] = "gather-weights"

    def run(self, program: Program, context: Context) -> Program:
        gathers = [Op(Kind.GATHER, s) for s in range(program.placement.stages) if program.sharded and program.deals(s)]
        if not gathers:
            return program
        first: dict[int, float] = {}
        for span in context.timeline:
            first[span.op.owner] = min(first.get(span.op.owner, math.inf), span.start)
        gathers.sort(key=lambda op: first.get(op.stage, math.inf))
        ranks = []
        for rank, ops in enumerate(program.ranks):
            needed = [op for op in gathers if rank in program.members(op)]
            if len(program.placement.pipes) > 1:
                ranks.append([*with_experts(needed, program, Kind.GATHER), *ops])
            else:
                ranks.append([*_words(program), *with_experts(_ahead(needed, ops), program, Kind.GATHER)])
        return program.with_ranks(_Words.of(program, context).after(ranks), by=self.name)


class _Words(NamedTuple):
    """Times without gathers: the end of each collective of a shared vocabulary, and the start of ops by rank; empty if
    the vocabulary is not shared."""

    over: Mapping[Op, float]
    begins: Sequence[Mapping[Op, float]]

    @classmethod
    def of(cls, program: Program, context: Context) -> _Words:
        if not program.vocabulary:
            return cls({}, [])
        begins: list[dict[Op, float]] = [{} for _ in program.ranks]
        for span in context.timeline:
            begins[span.rank][span.op] = span.start
        return cls({event.op: event.end for event in context.timeline.sums if event.op.kind.unit_wide}, begins)

    def after(self, ranks: Sequence[Sequence[Op]]) -> list[Sequence[Op]]:
        """The ops of ranks with collectives of the vocabulary moved after a GATHER if they end only after its weights
        are used: a rank's collectives run one after another. No earlier op waits for them, since it ends before."""
        pairs = zip(ranks, self.begins, strict=True)
        return [self._after(ops, begins) for ops, begins in pairs] if self.over else [*ranks]

    def _after(self, ops: Sequence[Op], begins: Mapping[Op, float]) -> list[Op]:
        used, first = dict[int, float](), dict[int, float]()
        for i in reversed(range(len(ops))):
            if ops[i].kind.computes:
                first[ops[i].stage] = begins[ops[i]]
            elif ops[i].kind is Kind.GATHER:
                used[i] = first.get(home_of(ops[i].stage), math.inf)
        started, behind = list[Op](), dict[Op, int]()
        for i, op in enumerate(ops):
            if op in self.over:
                started.append(op)
            for late in reversed(started):
                if self.over[late] <= used.get(i, math.inf):
                    break
                behind[late] = i
        moved: dict[int, list[Op]] = {}
        for op in started:
            moved.setdefault(behind.get(op, -1), []).append(op)
        return [item for i, op in enumerate(ops) for item in (*([] if op in behind else [op]), *moved.get(i, ()))]


def _words(program: Program) -> list[Op]:
    """The GATHER of a rank's vocabulary shard, if its replicas step parts of it."""
    gather = Op(Kind.GATHER, WORDS)
    return [gather] if program.vocabulary and program.shared(gather) else []


def _ahead(gathers: Sequence[Op], ops: Sequence[Op]) -> list[Op]:
    """The ops with two gathers at the front, each other one before the first op of the stage gathered before."""
    inside, before = groups(ops), dict[int, list[Op]]()
    for bringing, op in pairwise(gathers[1:]):
        first = next((i for i, use in enumerate(ops) if use.kind.computes and use.stage == bringing.stage), 0)
        before.setdefault(inside.get(first, first), []).append(op)
    return [*gathers[:2], *(one for step, op in enumerate(ops) for one in (*before.get(step, ()), op))]


class _Use(NamedTuple):
    """Ops that run as one, the stages whose weights they need, and the step after which others can be inserted."""

    stages: frozenset[int]
    behind: int


def _uses(ops: Sequence[Op], program: Program, rows: Rows) -> Iterator[_Use]:
    """Yields the ops of a rank that need weights, in order; a group needs all of its weights at once."""
    needs = {kind for kind, row in rows.items() if row.with_weights}
    inside, step = groups(ops), 0
    while step < len(ops):
        last = inside[step] + 2 if step in inside else step
        stages = frozenset(op.stage for op in ops[step : last + 1] if op.kind in needs and not op.kind.unit_wide)
        shared = frozenset(s for s in stages if program.deals(s))
        if shared:
            yield _Use(shared, sent(ops, last))
        step = last + 1


def _place(ops: Sequence[Op], uses: Sequence[_Use], room: int) -> list[Op]:
    """The ops of a rank with its gathers."""
    behind: dict[int, list[Op]] = {}
    count: dict[tuple[Kind, int], int] = {}

    def put(kind: Kind, stage: int, after: int) -> None:
        number = count[kind, stage] = count.get((kind, stage), -1) + 1
        behind.setdefault(after, []).append(Op(kind, stage, number))

    following = _following(uses)
    last: dict[int, int] = {}  # resident stage -> its last use so far
    for now, use in enumerate(uses):
        if len(use.stages) > room:
            text = f"config: memory.resident is {room}, a group of this schedule needs {len(use.stages)} stages at once"
            raise ZbcError("E110", text, hint=f"set memory.resident = {len(use.stages)}")
        for stage in sorted(use.stages - last.keys()):
            after = -1
            if len(last) == room:
                free = [s for s in last if s not in use.stages]
                gone = max(free, key=lambda s: (following[last[s]][s], -last[s]))
                after = uses[last.pop(gone)].behind
                put(Kind.FREE, gone, after)
            put(Kind.GATHER, stage, after)
            last[stage] = now
        for stage in use.stages:
            last[stage] = now
    for stage, now in sorted(last.items(), key=lambda item: item[1]):
        put(Kind.FREE, stage, uses[now].behind)
    return [*behind.get(-1, ()), *(one for step, op in enumerate(ops) for one in (op, *behind.get(step, ())))]


def _following(uses: Sequence[_Use]) -> list[dict[int, float]]:
    """Per use and stage of it, the next use of that stage; infinite if there is none."""
    after: dict[int, float] = {}
    rows: list[dict[int, float]] = []
    for now in range(len(uses) - 1, -1, -1):
        rows.append({stage: after.get(stage, math.inf) for stage in uses[now].stages})
        after.update(dict.fromkeys(uses[now].stages, now))
    return rows[::-1]
