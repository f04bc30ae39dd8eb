"""Why a step is not shorter: its critical path, the binding constraint, and gains from a little more of something."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from zbc.compiler.check.memory import excess
from zbc.compiler.compile import compile_job
from zbc.compiler.compiled import Compiled
from zbc.compiler.memory.per_rank import RankMemory, peaks
from zbc.compiler.partition.setup import start_of
from zbc.compiler.report.report import Facts, told
from zbc.compiler.sim.simulate import Timeline
from zbc.errors import ZbcError
from zbc.host.until import Until
from zbc.ir import Placement, forward
from zbc.job.spec import Job, parse_limit

SAME = 1e-9
ENDLESS = Until(math.inf)


@dataclass(frozen=True, slots=True)
class Path:
    """A chain of ops and transfers without a gap that is as long as the step, in ms."""

    by_kind: dict[str, float]
    by_rank: dict[int, float]
    transfers: float
    changes: int  # number of moves to another rank
    by_slice: dict[int, float]  # of a microbatch, if it has several

    @property
    def total(self) -> float:
        return sum(self.by_kind.values()) + self.transfers


def critical_path(compiled: Compiled) -> Path:
    """The composition of a plan's critical path (see `chain`)."""
    timeline, whole = compiled.timeline, compiled.job.objective == "makespan"
    begins = [0.0 if whole else timeline.first_start(rank) for rank in range(timeline.ranks)]
    rank = max(range(timeline.ranks), key=lambda r: timeline.closes(r) - begins[r])
    return path_of(timeline, rank, begins[rank])


def path_of(timeline: Timeline, rank: int, begin: float = 0.0) -> Path:
    """The composition of the critical path that ends `rank`'s step, back to `begin` ms."""
    graph, transfers, changes = timeline.graph, 0.0, 0
    by_kind, by_rank, by_slice = dict[str, float](), dict[int, float](), dict[int, float]()
    for node in chain(timeline, rank, begin):
        length = timeline.end[node] - timeline.start[node]
        if node < len(graph.ops):
            kind, r = graph.ops[node].kind, graph.rank(node)
            by_kind[kind.value] = by_kind.get(kind.value, 0.0) + length
            by_rank[r] = by_rank.get(r, 0.0) + length
            part = graph.ops[node].slice
            if graph.program.slices > 1 and kind.computes:
                by_slice[part] = by_slice.get(part, 0.0) + length
        elif node in graph.met:
            kind = graph.ops[graph.met[node][0]].kind
            by_kind[kind.value] = by_kind.get(kind.value, 0.0) + length
        else:
            transfers += length
            changes += 1
    return Path({kind: ms for kind, ms in by_kind.items() if ms > SAME}, by_rank, transfers, changes, by_slice)


def chain(timeline: Timeline, rank: int, begin: float = 0.0) -> Iterator[int]:
    """Yields the nodes of the critical path that ends `rank`'s step, from the last one back to `begin` ms: ops, and
    between them messages and collectives. Each node is preceded by the one it waited for: the node before it on its
    rank, else its last dependency."""
    graph, marks = timeline.graph, set(timeline.graph.marks)
    node = _last(timeline, rank)
    while node >= 0 and timeline.start[node] >= begin - SAME:
        counts = node >= len(graph.ops) or timeline.end[node] > timeline.start[node] or graph.ops[node].kind.computes
        if node not in marks and counts:
            yield node
        before, waits = graph.before[node], graph.pred[graph.ptr[node] : graph.ptr[node + 1]]
        if before < 0 or timeline.end[before] < timeline.start[node] - SAME:
            before = max(waits, key=timeline.end.__getitem__, default=-1)
        node = before


def _last(timeline: Timeline, rank: int) -> int:
    """The last node of a rank's step: its last op, or a collective that ends after it."""
    ops, graph = timeline.ops(rank), timeline.graph
    last, closes = ops[-1] if ops else -1, timeline.closes(rank)
    if closes <= timeline.last_end(rank) + SAME:
        return last
    ends = (event for event, members in graph.met.items() if any(graph.rank(i) == rank for i in members))
    return next(event for event in ends if timeline.end[event] == closes)


def binds(compiled: Compiled) -> str:
    """The constraint that binds this step, as far as the bound and the memory tell."""
    report, job = compiled.report, compiled.job
    bound = report.lower_bound_ms(job.objective)
    busiest = max(rank.busy_ms for rank in report.per_rank)
    if compiled.step_ms <= busiest * (1 + SAME):
        return "the work of the busiest rank: only a better partition, more ranks or faster ops shorten the step"
    if compiled.step_ms <= bound * (1 + SAME):
        return "the lower bound of this placement: another placement, more memory or more microbatches may shorten it"
    group, p, where = job.schedule.group, job.parallel.pp, compiled.program.placement
    if group is not None and group * job.slices < p and where == Placement.looped(p, where.chunks or 1):
        return f"schedule.group = {group}: rounds of fewer microbatches than the {p} ranks leave them waiting; drop it"
    if _full(compiled):
        return "the memory limit: a rank has no room for one more F"
    return "the order of ops: neither the busiest rank nor a bound is reached"


def bent_by_memory(compiled: Compiled) -> bool:
    """Whether a memory limit keeps a plan from the partition that is most even in time, without recompute."""
    job, program = compiled.job, compiled.program
    if compiled.found.recompute:
        return True
    if job.hardware.memory_gib is None and job.schedule.memory_limit is None:
        return False
    even, costs = start_of(job, program.placement)
    return even != compiled.found.stages and excess(job, peaks(program, costs), costs) > 0


def _full(compiled: Compiled) -> bool:
    """Whether some rank has no room for one more F."""
    costs, stages, more = compiled.costs, range(compiled.costs.stages), list[RankMemory]()
    kept, kept_bytes = (
        [min(hold(forward(s, part=j)) for j in range(costs.slices)) for s in stages]
        for hold in (costs.held, costs.held_bytes)
    )
    for rank, held in enumerate(compiled.memory):
        units, size = (min(of[s] for s in compiled.program.placement.stages_of(rank)) for of in (kept, kept_bytes))
        activations, together = held.activations + size, held.together + size
        more.append(replace(held, units=held.units + units, activations=activations, together=together))
    return excess(compiled.job, more, costs) > SAME


def what_ifs(compiled: Compiled, until: Until = ENDLESS) -> Iterator[Facts]:
    """Yields each change of the job with ms of its step, and the time per sequence relative to the plan: planned like
    the job itself with the fast tier of the search, as long as there is time."""
    if until.over(2 * compiled.report.compile_seconds):  # of the job itself and one other
        return
    now = _fast(compiled.job)
    if now is None:
        return
    base = now.step_ms / now.sequences
    for change, job in _changes(compiled):
        made = None if until.over() else _fast(job)
        if made is not None:
            yield told(change=change, ms=made.step_ms, factor=made.step_ms / made.sequences / base)


def _changes(compiled: Compiled) -> Iterator[tuple[str, Job]]:
    job = compiled.job
    schedule = job.schedule
    lengths = schedule.lengths
    tokens = [*lengths, statistics.median_low(lengths)] if lengths else None
    longer = schedule.model_copy(update={"microbatches": schedule.microbatches + 1, "tokens": tokens})
    yield "one microbatch more", replace(job, schedule=longer)
    limit = parse_limit(schedule.memory_limit) if schedule.memory_limit else None
    if limit is not None:
        text = f"{1.1 * limit[0]:.6f}x" if limit[1] == "x" else f"{1.1 * limit[0] / 1024:.3f} KiB"
        roomier = schedule.model_copy(update={"memory_limit": text})
        yield "10% more memory for activations", replace(job, schedule=roomier)
    elif (memory := job.hardware.memory_gib) is not None:
        more_gib = [1.1 * gib for gib in memory] if isinstance(memory, list) else 1.1 * memory
        device = job.hardware.model_copy(update={"memory_gib": more_gib})
        yield "10% more memory of the device", replace(job, hardware=device)
    moved = _moved(compiled)
    if moved is not None and (job.costs.f is None or job.costs.per == "layer"):
        stage, target, counts = moved
        cut = job.partition.model_copy(update={"layers_per_stage": counts})
        yield f"one layer from stage {stage} to stage {target}", replace(job, partition=cut)


def _moved(compiled: Compiled) -> tuple[int, int, list[int]] | None:
    """The blocks per stage with one moved from the slowest stage to the fastest."""
    counts = [sum(name.startswith("layers.") for name in part) for part in compiled.layers]
    f, b, w = map(compiled.costs.column, ("f", "b", "w"))
    stages = sorted(range(compiled.costs.stages), key=lambda s: f[s] + b[s] + w[s])
    cheapest, dearest = stages[0], next((s for s in reversed(stages) if counts[s] > 1), None)
    if dearest is None or dearest == cheapest:
        return None
    counts[dearest] -= 1
    counts[cheapest] += 1
    return dearest, cheapest, counts


def _fast(job: Job) -> Compiled | None:
    """The plan of `--budget 0`; None if there is none."""
    with suppress(ZbcError):
        return compile_job(job, suggest=False, budget=0.0)
    return None
