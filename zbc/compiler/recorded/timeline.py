"""Recorded steps as timelines: the ops of the prediction at their measured times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from zbc.compiler.graph import Graph, build
from zbc.compiler.recorded.view import LEAST_WAIT_NS, RecordedStep
from zbc.compiler.sim.simulate import Timeline
from zbc.ir import Op
from zbc.trace.recording import Cause, MemorySamples

_MS = 1e6


class Beside(NamedTuple):
    """Activity of a rank other than compute: an op of another kind, or a wait before one. Times in ms."""

    name: str
    what: str
    start: float
    end: float


@dataclass(frozen=True)
class Recording:
    """Recorded steps of one replica of the pipeline, on one axis that begins with the first of them."""

    steps: tuple[RecordedStep, ...]
    copy: int = 0
    ahead: bool = False  # with the ops that close a step without a barrier
    memory: tuple[MemorySamples | None, ...] = ()  # per rank of the run, its memory around each op of a step like these

    @cached_property
    def graph(self) -> Graph:
        return build(self.steps[0].program)

    def _ops(self, part: int) -> list[int]:
        """The ops of a pipeline rank in its timeline."""
        return self.graph.timed[part] if self.ahead else self.graph.computing[part]

    def _ms(self, ns: int) -> float:
        return (ns - self.steps[0].begins) / _MS

    def ranks(self) -> list[int]:
        """The run's ranks of this replica, in the order of the pipeline."""
        program = self.steps[0].program
        return [program.topology.rank(self.copy, part) for part in range(program.placement.ranks)]

    def timelines(self) -> tuple[Timeline, ...]:
        return tuple(self._timeline(step) for step in self.steps)

    def _timeline(self, step: RecordedStep) -> Timeline:
        graph = self.graph
        start, end = [0.0] * len(graph.before), [0.0] * len(graph.before)
        events = {graph.ops[ops[0]]: event for event, ops in graph.met.items()}
        for part, rank in enumerate(self.ranks()):
            record = step.ranks[rank]
            for i in self._ops(part):
                index = i - graph.first[part]
                start[i], end[i] = self._ms(record.work[index]), self._ms(record.end[index])
            for copy in record.copies:  # of activations
                event = events[record.ops[copy.op]]
                start[event], end[event] = self._ms(copy.start), self._ms(copy.end)
        for op, begin, over in self._sums(step):
            start[events[op]], end[events[op]] = begin, over
        return Timeline(graph, start, end, self.ahead)

    def _sums(self, step: RecordedStep) -> Iterator[tuple[Op, float, float]]:
        """Yields gradient reductions, from the arrival of all ranks to the end of the last wait for them, in ms."""
        begun: dict[Op, list[tuple[int, int]]] = {}
        ended: dict[int, int] = {}
        for rank in self.ranks():
            record = step.ranks[rank]
            waits = record.waited(Cause.SUM)
            ends = [record.start[index] + ns for index, ns in waits.items() if index < len(record.ops)]
            ended |= {rank: max(ends)} if ends else {}
            for index, op in enumerate(record.ops):
                if op.kind.sums:
                    begun.setdefault(op, []).append((rank, record.end[index]))
        for op, places in begun.items():
            start = max(at for _, at in places)
            end = max([start, *(ended[rank] for rank, _ in places if rank in ended)])
            yield op, self._ms(start), self._ms(end)

    @cached_property
    def leads(self) -> tuple[list[float], list[float]]:
        """Per op of the graph, step after step: ms it waited for its message, and ms between that and its start."""
        graph, count = self.graph, len(self.graph.ops)
        waited, delayed = ([0.0] * (count * len(self.steps)) for _ in range(2))
        for number, step in enumerate(self.steps):
            for part, rank in enumerate(self.ranks()):
                record = step.ranks[rank]
                messages = record.waited(Cause.MESSAGE)
                for i in self._ops(part):
                    index = i - graph.first[part]
                    lead = record.work[index] - record.start[index]
                    wait = min(lead, messages.get(index, 0))
                    waited[number * count + i], delayed[number * count + i] = wait / _MS, (lead - wait) / _MS
        return waited, delayed

    def path(self) -> list[int]:
        """The critical path of every step, from its last op back, the last step first; ops count as in `leads`. Before
        an op comes the one it waited for, if it waited, else the previous one of its rank."""
        chain, count = [], len(self.graph.ops)
        for number, step in reversed([*enumerate(self.steps)]):
            chain += [number * count + i for i in self._chain(number * count, self._timeline(step))]
        return chain

    def _chain(self, base: int, timeline: Timeline) -> Iterator[int]:
        before = {i: j for rank in range(timeline.ranks) for j, i in pairwise(timeline.ops(rank))}
        lasts = (timeline.ops(rank)[-1] for rank in range(timeline.ranks) if timeline.ops(rank))
        i = max(lasts, key=timeline.end.__getitem__)
        while i >= 0:
            yield i
            source = timeline.waited_for(i)
            fed = source >= 0 and self.leads[0][base + i] * _MS > LEAST_WAIT_NS
            i = source if fed else before.get(i, -1)

    def beside(self, rank: int) -> Iterator[Beside]:
        """Yields other activities of a rank of this replica, in order: waits, transfers, the end of a step."""
        run_rank = self.ranks()[rank]
        counted = {i - self.graph.first[rank] for i in self._ops(rank)}
        for step in self.steps:
            record = step.ranks[run_rank]
            for index, op in enumerate(record.ops):
                begin, work, end = (self._ms(ns) for ns in (record.start[index], record.work[index], record.end[index]))
                if index not in counted and end > begin:
                    yield Beside(step.program.placement.text(op), op.kind.value, begin, end)
                elif work > begin:
                    yield Beside(f"wait for {op}", "wait", begin, work)

    def held(self, rank: int, category: str) -> Iterator[tuple[float, int]]:
        """Yields (ms, bytes of a category held from then on) of a rank of this replica, at the end of each op."""
        run_rank = self.ranks()[rank]
        memory = self.memory[run_rank] if self.memory else None
        if memory is None or category not in memory.categories:
            return
        column = memory.categories.index(category)
        for step in self.steps:
            for ns, row in zip(step.ranks[run_rank].end, memory.bytes, strict=True):
                yield self._ms(ns), row[column]
