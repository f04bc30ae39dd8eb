"""What pictures are made of: the ops of each rank with their times, over one step or several in a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import curve
from zbc.compiler.recorded.timeline import Recording
from zbc.compiler.sim.shared import Shared, shared
from zbc.compiler.sim.simulate import Timeline, run
from zbc.compiler.steps import consecutive, in_a_row
from zbc.ir import COPY, Kind, Op, Program
from zbc.viz.words import title

Window = tuple[float, float]  # ms from the first start on


class DrawnOp(NamedTuple):
    """An op that takes time; ms from the first start of the strip. Ids are those of the graph, step after step."""

    id: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Strip:
    """The timelines of consecutive steps of one program, on one axis."""

    steps: tuple[Timeline, ...]

    @property
    def ranks(self) -> int:
        return self.steps[0].ranks

    @property
    def begin(self) -> float:
        """The first start, in the time of the timelines."""
        return min(self.steps[0].first_start(rank) for rank in range(self.ranks))

    @property
    def length(self) -> float:
        """ms from the first start to the last end."""
        return max(self.steps[-1].closes(rank) for rank in range(self.ranks)) - self.begin

    def pieces(self, rank: int) -> Iterator[DrawnOp]:
        """The ops of a rank that take time, in order."""
        begin = self.begin
        for step, timeline in enumerate(self.steps):
            ops = timeline.graph.ops
            base = step * len(ops)
            for i in timeline.ops(rank):
                start, end = timeline.start[i] - begin, timeline.end[i] - begin
                if end > start or ops[i].kind.computes:
                    yield DrawnOp(base + i, ops[i], start, end)

    def sums(self, rank: int) -> Iterator[DrawnOp]:
        """The collectives a rank takes part in, which run beside its compute ops; their ids are -1."""
        begin = self.begin
        for timeline in self.steps:
            for one in timeline.sums:
                if rank in one.ranks:
                    yield DrawnOp(-1, one.op, one.start - begin, one.end - begin)

    def row(self, rank: int) -> Iterator[DrawnOp]:
        """The compute ops of a rank and what it has of collectives while no op of its step is left."""
        begin, row = self.begin, [*self.pieces(rank)]
        for timeline in self.steps:
            last = timeline.last_end(rank) - begin
            for one in timeline.sums:
                start, end = max(last, one.start - begin), one.end - begin
                if rank in one.ranks and end > start:
                    row.append(DrawnOp(-1, one.op, start, end))
                    last = end
        return iter(sorted(row, key=lambda piece: (piece.start, piece.end)))

    def copies(self, rank: int) -> Iterator[DrawnOp]:
        """The copies of a rank to its host and back, in the order in which they begin; their ids are -1."""
        begin, found = self.begin, list[DrawnOp]()
        for timeline in self.steps:
            graph = timeline.graph
            for event, ops in graph.met.items():
                op = graph.ops[ops[0]]
                if op.kind in COPY and graph.rank(ops[0]) == rank and timeline.end[event] > timeline.start[event]:
                    found.append(DrawnOp(-1, op, timeline.start[event] - begin, timeline.end[event] - begin))
        return iter(sorted(found, key=lambda piece: (piece.start, piece.end)))

    @cached_property
    def copying(self) -> bool:
        """Whether any rank copies anything to its host that takes time."""
        return any(True for rank in range(self.ranks) for _ in self.copies(rank))

    def shared(self, rank: int, costs: Costs) -> Iterator[Shared]:
        """The sums of tensor-parallel ranks inside the ops of a rank, in order."""
        for timeline in self.steps:
            for one in shared(timeline, costs, rank):
                yield one._replace(start=one.start - self.begin, end=one.end - self.begin)

    @property
    def collectives(self) -> set[Kind]:
        """The kinds of collectives that take time, but those in the middle of a step: see `meetings`."""
        found = {one.op.kind for timeline in self.steps for one in timeline.sums if one.end > one.start}
        return {kind for kind in found if not kind.unit_wide}

    def meetings(self) -> Iterator[DrawnOp]:
        """Where all ranks tell each other what they found of a microbatch's words; ids are -1."""
        for timeline in self.steps:
            for one in timeline.sums:
                if one.op.kind in (Kind.MEET, Kind.SUM):
                    yield DrawnOp(-1, one.op, one.start - self.begin, one.end - self.begin)

    def sources(self) -> Iterator[int]:
        """By the id of a piece, the id of what feeds it, -1 for nothing."""
        for step, timeline in enumerate(self.steps):
            base = step * len(timeline.graph.ops)
            yield from (base + j if j >= 0 else -1 for j in timeline.graph.sources)

    def memory(self, rank: int, costs: Costs) -> Iterator[tuple[float, float]]:
        """(ms, activation units held from then on)."""
        begin = self.begin
        for timeline in self.steps:
            yield from ((ms - begin, units) for ms, units in curve(timeline, rank, costs))


@dataclass(frozen=True, slots=True)
class Drawn:
    """One plan of a picture: its ops and times, what it is called, and what its ops cost.

    `recorded`: the times are measured ones, and what was waited for is known.
    """

    name: str
    program: Program
    strip: Strip
    costs: Costs
    recorded: Recording | None = None
    groups: str = ""  # whose layers the stages of a graph have
    caption: str = ""  # what a user calls it

    @property
    def braided(self) -> bool:
        """Whether ops meet in groups to hide sums, which are drawn below them then."""
        return self.program.grouped and self.recorded is None and "f_sums" in self.costs.ms

    def heading(self, *, several: bool) -> str:
        """What stands above it, alone or among several."""
        return self.caption or (f"{self.name}: {self.title}" if several else self.title)

    @property
    def title(self) -> str:
        return title(self.program) + (f"; {self.groups}" if self.groups else "")


class Signs(NamedTuple):
    """What a legend has to explain: kinds of ops, a second pipe, the most stages of a rank in one pipe."""

    kinds: set[Kind]
    two: bool
    chunks: int
    other: str  # what the second pipe is


_COPIES = frozenset({Kind.OFFLOAD, Kind.RELOAD})


def signs(drawn: Sequence[Drawn]) -> Signs:
    placements = [one.program.placement for one in drawn]
    kinds = {op.kind for one in drawn for ops in one.program.ranks for op in ops if op.kind.computes}
    kinds |= {kind for one in drawn for kind in one.strip.collectives}
    kinds |= {op.kind for one in drawn for ops in one.program.ranks for op in ops if op.kind in _COPIES}
    stages = (pipe.count(rank) for placed in placements for pipe in placed.pipes for rank in range(placed.ranks))
    replicas = any(placed.replicas for placed in placements)
    other = "pipes through other replicas" if replicas else "pipe that runs upwards"
    return Signs(kinds, any(len(placed.pipes) > 1 for placed in placements), max(stages), other)


def once(timeline: Timeline) -> Strip:
    """One step."""
    return Strip((timeline,))


def repeated(timeline: Timeline, program: Program, costs: Costs, steps: int, *, barrier: bool) -> Strip:
    """`steps` steps: with a barrier each begins when the one before has ended everywhere, else each rank goes on.

    The optimizer's time counts where the program is complete.
    """
    if steps == 1:
        return once(timeline)
    if program.flushless:
        return once(in_a_row(program, costs, steps))
    if barrier or program.ahead:
        return Strip(tuple(islice(consecutive(program, costs), steps)))
    timelines = [timeline]
    for _ in range(steps - 1):
        last = timelines[-1]
        ends = [last.closes(rank) for rank in range(last.ranks)]
        timelines.append(run(last.graph, costs, ends))
    return Strip(tuple(timelines))


def captioned(drawn: Sequence[Drawn], captions: Sequence[str]) -> list[Drawn]:
    """The same with captions, of several with their letters: (a), (b), .."""
    letters = [f"({chr(ord('a') + k)}) " if len(drawn) > 1 else "" for k in range(len(drawn))]
    return [replace(one, caption=f"{letter}{text}") for one, letter, text in zip(drawn, letters, captions, strict=True)]


def windows(strips: Sequence[Strip], zoom: Window | None, *, own: bool) -> list[Window]:
    """What is shown of each: all of it on an axis that they share, or on its `own`, or the `zoom`."""
    most = longest(strips)
    return [zoom or (0.0, longest([strip]) if own else most) for strip in strips]


def longest(strips: Sequence[Strip]) -> float:
    """The length of the longest of several strips, ms; 1 if nothing takes time."""
    return max((strip.length for strip in strips), default=0.0) or 1.0
