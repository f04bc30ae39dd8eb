"""The idle windows of a rank: start, length, cause, and the memory free meanwhile.

Busy time and windows tile the makespan of every rank. Within a window no op that takes a rank's time runs there;
transfers and collectives may.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.ledger import over_time
from zbc.compiler.memory.per_rank import resident
from zbc.compiler.sim.simulate import Timeline
from zbc.ir import Program


class Window(NamedTuple):
    """`start_ms` counts from the beginning of the step. `before` is the op that ends it, "" at the end of the step.
    Causes: "warm_up" (before the rank's first op), "message" (between ops, for a tensor of another rank), "sums" (after
    its last op, until its last collective is completed) and "drain" (after that). `free_bytes`: bytes not taken by
    weights, gradients, optimizer state or activations at any moment of it; None if not known."""

    start_ms: float
    length_ms: float
    cause: str
    before: str
    free_bytes: int | None = None


def windows(timeline: Timeline, rank: int) -> Iterator[Window]:
    """Yields the windows of one rank, in order, without free memory."""
    ops, graph = timeline.ops(rank), timeline.graph
    begin = min(timeline.first_start(r) for r in range(timeline.ranks))
    free, cause = begin, "warm_up"
    for node in ops:
        if timeline.start[node] > free:
            yield Window(free - begin, timeline.start[node] - free, cause, str(graph.ops[node]))
        free, cause = timeline.end[node], "message"
    closes, over = timeline.closes(rank), begin + timeline.makespan
    if closes > free:
        last = max((event for event in timeline.sums if rank in event.ranks), key=lambda event: event.end)
        yield Window(free - begin, closes - free, "sums", str(last.op))
        free = closes
    if over > free:
        yield Window(free - begin, over - free, "drain", "")


def with_memory(
    timeline: Timeline, program: Program, costs: Costs, room: float | None, rank: int
) -> tuple[Window, ...]:
    """The windows with the part of `room` bytes that is free."""
    rows = tuple(windows(timeline, rank))
    points = [] if room is None or costs.bytes is None else [*over_time(timeline, rank, costs)]
    if room is None or not points:
        return rows
    base = resident(program, rank, costs)
    begin = min(timeline.first_start(r) for r in range(timeline.ranks))
    times, held = [point.ms - begin for point in points], [base + point.activations + point.weights for point in points]
    return tuple(window._replace(free_bytes=max(0, int(room - _most(window, times, held, base)))) for window in rows)


def _most(window: Window, times: Sequence[float], held: Sequence[float], base: float) -> float:
    """The most bytes held in a window; `base` before the first change."""
    low, high = bisect_right(times, window.start_ms), bisect_right(times, window.start_ms + window.length_ms)
    return max([held[low - 1] if low else base, *held[low:high]])


class Bubbles(NamedTuple):
    """Idle windows of every rank of a pipeline."""

    name: str
    makespan_ms: float
    busy_ms: tuple[float, ...]
    windows: tuple[tuple[Window, ...], ...]

    @classmethod
    def of(cls, name: str, timeline: Timeline, program: Program, costs: Costs, room: float | None) -> Bubbles:
        ranks = range(timeline.ranks)
        rows = tuple(with_memory(timeline, program, costs, room, rank) for rank in ranks)
        return cls(name, timeline.makespan, tuple(timeline.busy(rank) for rank in ranks), rows)
