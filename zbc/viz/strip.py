"""Data of pictures: the ops of each rank with their times, over one step or several consecutive ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.ledger import over_time
from zbc.compiler.recorded.timeline import Recording
from zbc.compiler.sim.beside import Shared, shared
from zbc.compiler.sim.simulate import Timeline, run
from zbc.compiler.steps import consecutive, in_a_row
from zbc.ir import COPY, Kind, Op, Program
from zbc.ops import round_trip
from zbc.viz.words import title

_HALVES, _BOTH = round_trip(split=True)[1:], round_trip(split=False)[-1]
_SECOND = 1 << 40  # added to the id of a BW: that of its W
Window = tuple[float, float]  # ms from the first start on


class DrawnOp(NamedTuple):
    """An op that takes time; ms from the first start of the strip. Ids are as in the graph, counted on over steps."""

    id: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Strip:
    """The timelines of consecutive steps of one program, on one axis."""

    steps: tuple[Timeline, ...]
    apart: Mapping[int, float] = field(default_factory=dict)  # see `Drawn.apart`

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
        """The collectives of a rank, which overlap with its compute ops; their ids are -1."""
        return (piece for ranks, piece in self._sums if rank in ranks)

    @cached_property
    def _sums(self) -> list[tuple[tuple[int, ...], DrawnOp]]:
        begin, every = self.begin, (one for timeline in self.steps for one in timeline.sums)
        return [(one.ranks, DrawnOp(-1, one.op, one.start - begin, one.end - begin)) for one in every]

    def row(self, rank: int) -> Iterator[DrawnOp]:
        """The compute ops of a rank, a BW as its B and W where these are drawn apart, and its collectives as far as
        they run after the last op of their step."""
        begin, row = self.begin, [half for piece in self.pieces(rank) for half in self._halves(piece)]
        for timeline in self.steps:
            last = timeline.last_end(rank) - begin
            for collective in timeline.sums:
                start, end = max(last, collective.start - begin), collective.end - begin
                if rank in collective.ranks and end > start:
                    row.append(DrawnOp(-1, collective.op, start, end))
                    last = end
        return iter(sorted(row, key=lambda piece: (piece.start, piece.end)))

    def _halves(self, piece: DrawnOp) -> Iterator[DrawnOp]:
        op, share = piece.op, self.apart.get(piece.op.stage, 1.0)
        if op.kind is not _BOTH or share == 1.0:
            yield piece
            return
        middle = piece.start + share * (piece.end - piece.start)
        yield piece._replace(op=op._replace(kind=_HALVES[0]), end=middle)
        yield DrawnOp(piece.id + _SECOND, op._replace(kind=_HALVES[1]), middle, piece.end)

    def copies(self, rank: int) -> Iterator[DrawnOp]:
        """The offloads and reloads of a rank, in the order of their starts; their ids are -1."""
        begin, copies = self.begin, list[DrawnOp]()
        for timeline in self.steps:
            graph = timeline.graph
            for event, ops in graph.met.items():
                op = graph.ops[ops[0]]
                if op.kind in COPY and graph.rank(ops[0]) == rank and timeline.end[event] > timeline.start[event]:
                    copies.append(DrawnOp(-1, op, timeline.start[event] - begin, timeline.end[event] - begin))
        return iter(sorted(copies, key=lambda piece: (piece.start, piece.end)))

    @cached_property
    def copying(self) -> bool:
        """Whether any rank has offloads that take time."""
        return any(True for rank in range(self.ranks) for _ in self.copies(rank))

    def shared(self, rank: int, costs: Costs) -> Iterator[Shared]:
        """The sums of tensor-parallel ranks inside the ops of a rank, in order."""
        for timeline in self.steps:
            for part in shared(timeline, costs, rank):
                yield part._replace(start=part.start - self.begin, end=part.end - self.begin)

    @property
    def collectives(self) -> set[Kind]:
        """The kinds of collectives that take time, except those per microbatch: see `meetings`."""
        kinds = {piece.op.kind for _, piece in self._sums if piece.end > piece.start}
        return {kind for kind in kinds if not kind.unit_wide}

    def meetings(self) -> Iterator[DrawnOp]:
        """The all-reduces of a vocabulary-parallel output layer; ids are -1."""
        return (piece for _, piece in self._sums if any(ref.what == "turn" for ref in piece.op.kind.row.writes))

    def sources(self) -> Iterator[int]:
        """For each op id, the id of the op that made its input, -1 for none."""
        for step, timeline in enumerate(self.steps):
            base = step * len(timeline.graph.ops)
            yield from (base + j if j >= 0 else -1 for j in timeline.graph.sources)

    def memory(self, rank: int, costs: Costs) -> Iterator[tuple[float, float]]:
        """(ms, activation units held from then on)."""
        begin = self.begin
        for timeline in self.steps:
            yield from ((point.ms - begin, point.units) for point in over_time(timeline, rank, costs))


@dataclass(frozen=True, slots=True)
class Drawn:
    """One plan of a picture: its ops with times, its name, and its costs. `recorded`: set if the times are measured,
    with the causes of waits."""

    name: str
    program: Program
    strip: Strip
    costs: Costs
    recorded: Recording | None = None
    groups: str = ""  # the groups of layers of the stages of a graph

    def __post_init__(self) -> None:
        object.__setattr__(self, "strip", replace(self.strip, apart=self.apart))

    @property
    def apart(self) -> dict[int, float]:
        """By stage B's share of a BW. Drawn as its B and its W, as in papers, is one of a schedule of separate B and W:
        a pass has joined the two where no other rank waits for B."""
        gradients = {kind for kind in Kind if kind.is_send and any(ref.what == "grad" for ref in kind.row.reads)}
        sent = {op[1:] for ops in self.program.ranks for op in ops if op.kind in gradients}
        joined = sent and not any(op.kind is _BOTH and op[1:] in sent for ops in self.program.ranks for op in ops)
        there = self.program.split and joined
        pairs = zip(self.costs.column("b"), self.costs.column("w"), strict=True) if there else ()
        return {stage: b / (b + w) for stage, (b, w) in enumerate(pairs) if w > 0}

    @property
    def braided(self) -> bool:
        """Whether overlap groups hide sums, which are then drawn below their ops."""
        return self.program.grouped and self.recorded is None and "f_sums" in self.costs.ms

    def heading(self, *, several: bool) -> str:
        """Its heading, alone or among several plans."""
        return f"{self.name}: {self.title}" if several else self.title

    @property
    def title(self) -> str:
        return title(self.program) + (f"; {self.groups}" if self.groups else "")


class Signs(NamedTuple):
    """Contents of a legend: kinds of ops, a second pipe, the most stages of a rank in one pipe."""

    kinds: set[Kind]
    two: bool
    chunks: int
    other: str  # name of the second pipe


def signs(drawn: Sequence[Drawn]) -> Signs:
    placements = [plan.program.placement for plan in drawn]
    kinds = {kind for plan in drawn for kind in plan.strip.collectives}
    for plan in drawn:
        there = {op.kind for ops in plan.program.ranks for op in ops if op.kind.computes}
        kinds |= there - {_BOTH} if plan.apart else there
    kinds |= {kind for plan in drawn for kind in plan.program.kinds & COPY if kind.row.look}
    stages = (pipe.count(rank) for placed in placements for pipe in placed.pipes for rank in range(placed.ranks))
    replicas = any(placed.replicas for placed in placements)
    second = "pipes through other replicas" if replicas else "pipe that runs upwards"
    return Signs(kinds, any(len(placed.pipes) > 1 for placed in placements), max(stages), second)


def once(timeline: Timeline) -> Strip:
    """The strip of one step."""
    return Strip((timeline,))


def repeated(timeline: Timeline, program: Program, costs: Costs, steps: int, *, barrier: bool) -> Strip:
    """`steps` steps: with a barrier each begins when the one before has ended on all ranks, else each rank continues.
    The optimizer's time is included if the program is complete."""
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


def longest(strips: Sequence[Strip]) -> float:
    """The length of the longest of several strips, ms; 1 if nothing takes time."""
    return max((strip.length for strip in strips), default=0.0) or 1.0
