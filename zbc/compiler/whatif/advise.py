"""Recommends settings to train a model on given GPUs: the best of pp, dp, cp, tp, ep, schedule, recompute, shards.

1. Whether weights, gradients and optimizer state fit at all, fully sharded over all GPUs.
2. Every shape of the world, with each way to shard over replicas, is planned as 1F1B with few microbatches, three
   times: all stages recompute, or only cheap ops, or nothing. A mix forced by memory counts by its share. Those with
   the least bound come first, and none whose bound is beyond the best SHAPES.
3. The best SHAPES are planned with each of KINDS, with recompute and layers chosen by stage.
4. The best are planned in full, as complete jobs that can be written to files.
   Of large steps 3 and 4 take the policy of recompute of 2, and mixes are tried for the first row alone.
5. The first of these gives way to a faster plan under any schedule that `zbc compare` tries.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zbc.compiler.compile import compile_job
from zbc.compiler.compiled import Compiled
from zbc.compiler.partition.setup import as_ordered
from zbc.compiler.planner.case import Case
from zbc.compiler.planner.planner import faster
from zbc.compiler.reading import job_of
from zbc.compiler.schedules import AUTO, SCHEDULES, find
from zbc.compiler.shapes import ENOUGH, weighed
from zbc.errors import ZbcError
from zbc.job import gpu, toml, world
from zbc.job.job import RESERVE
from zbc.job.spec import Job
from zbc.text import GIB, at_least, percent, short, size

BASELINE = "1f1b"
KINDS = (BASELINE, "interleaved-1f1b", "zb-v")  # in other trainers, too; the first row is tried under all others
SHARDS = ("optimizer", "all")  # ZeRO-1; weights and gradients too, as in FSDP
SHAPES, ROWS, OF_SHAPE = 4, 5, 2  # numbers of planned shapes, of rows, and of rows per shape at most
LARGE = 300  # forwards of a step beyond which looks are rough: with one policy of recompute, and few microbatches
FILLED = 2  # times the ranks of a pipeline: microbatches beyond which 1F1B repeats itself
FEW = 3  # faster schedules that are planned in full, if looks are rough
AHEAD = 0.001  # of a step, below which another schedule is no faster
ACTIVATIONS = "memory", "activations"
WHOLE = {("partition", "layers_per_stage"): "equal"}  # settings of the looks at shapes
Least = list[tuple[int, world.Shape, ZbcError]]  # variants that are too large, with the bytes that they need
SPARE = 1.03  # ratio of memory or guesses up to which they count as equal


class State(NamedTuple):
    """Resident state on the GPUs, for any order."""

    parameters: int
    bytes: float  # weights, gradients, masters and optimizer state of one whole model
    room: float | None  # bytes of a GPU, less the reserve
    gpus: int

    @property
    def size(self) -> str:
        """`70.6B`."""
        unit, name = next(((u, n) for u, n in ((1e9, "B"), (1e6, "M")) if self.parameters >= u), (1e3, "k"))
        return f"{self.parameters / unit:.3g}{name}"

    @property
    def share(self) -> float:
        """Bytes on each GPU if all of it is sharded."""
        return self.bytes / self.gpus


@dataclass(frozen=True, slots=True)
class Row:
    """One recommendation: a complete job, and its plan."""

    document: toml.Document
    compiled: Compiled

    @property
    def job(self) -> Job:
        """The job with the recompute of its plan written down."""
        return as_ordered(self.compiled.job, self.compiled.found)

    @property
    def blocks(self) -> list[int]:
        """Blocks of each stage."""
        return [sum(name not in ("embed", "head") for name in names) for names in self.compiled.layers]

    @property
    def sample_ms(self) -> float:
        return self.compiled.settled_ms / self.compiled.sequences

    @property
    def shape(self) -> world.Shape:
        axes = self.job.parallel
        return world.Shape(axes.pp, axes.dp, self.job.schedule.microbatches, None, axes.tp, axes.ep, axes.cp)

    @property
    def recompute(self) -> tuple[int, int]:
        """The number of stages that recompute, and of all stages."""
        stages = self.compiled.program.placement.stages
        return sum(self.job.memory.recomputes(s) for s in range(stages)), stages

    @property
    def selective(self) -> int:
        """The number of stages with selective recompute only; its time counts as computing."""
        return sum(self.job.memory.spares(s) for s in range(self.recompute[1]))


@dataclass(frozen=True, slots=True)
class Advice:
    """Recommendations, the best first."""

    rows: tuple[Row, ...]
    state: State
    shapes: int  # number evaluated, with all ways to shard
    planned: int  # of these, planned with each schedule


class _Shape(NamedTuple):
    """A shape with its sharding, as 1F1B."""

    guess: float  # ms of a sample
    number: int
    shape: world.Shape
    document: toml.Document
    policy: str | None  # that fits in all stages

    @property
    def cut(self) -> world.Shape:
        """How it cuts up the model but for the experts."""
        return self.shape._replace(ep=1)

    def planned_as(self, kind: str) -> Iterator[toml.Document]:
        """Yields its job under a schedule; of a large step first with its own policy, which is one of many."""
        own = _with(self.document, {("schedule", "kind"): kind})
        if self.policy is not None and _is_large(self.shape):
            yield _with(own, {ACTIVATIONS: self.policy})
        yield own


def _is_large(shape: world.Shape) -> bool:
    return shape.pp * shape.microbatches > LARGE


def state_of(document: toml.Document) -> State:
    """The resident state of a model, however it is split. Raises E301 if all GPUs together have no room for it."""
    alone = {("parallel", "world"): 1, ("schedule", "kind"): "1f1b"}
    alone |= {("parallel", axis): 1 for axis in ("tp", "ep", "cp")}
    alone |= {("schedule", "batch"): document.values["schedule"].get("microbatch_size", 1)}
    single = world.read(_with(document, alone))
    assert isinstance(single, toml.Document)
    job = _job(single)
    case = Case(job, find("1f1b"), None)
    sizes = case.first.bytes or ()
    held = sum(row.weights + row.gradients + row.masters + row.optimizer for row in sizes)
    count = int(document.values["parallel"]["world"])
    state = State(sum(layer.params + layer.frozen for layer in case.table), held, job.room, count)
    if state.room is not None and state.share > state.room:
        raise _too_large(job, state)
    return state


def _too_large(job: Job, state: State) -> ZbcError:
    ratio = state.bytes / (state.parameters or 1)
    text = f"does not fit: {state.size} parameters need {size(state.bytes)}, {ratio:.3g} bytes each, "
    text += f"for weights, gradients and optimizer: {size(state.share)} on each of {state.gpus} GPUs"
    room = state.room or 1.0
    enough = -int(-state.bytes // room)
    larger = [name for name, card in gpu.GPUS.items() if 0.9 * card.memory_gib * GIB > state.share]
    hint = f"what does: {enough} GPUs or more, before activations"
    hint += f"; or --gpu {' or '.join(larger)}" if larger else ""
    given, kept = short(job.hardware.least_gib or 0), short(job.reserve_gib)
    details = [f"= hardware.memory_gib is {given} less a reserve of {kept}"]
    return ZbcError("E301", text, where=job.where("hardware", "memory_gib"), hint=hint, details=details)


def advise(
    document: toml.Document,
    done: Callable[[str, float], None] = lambda text, share: None,
    first: Callable[[Row], None] = lambda row: None,
) -> Advice:
    """The best rows for a document with a world and a batch but no shapes, schedule and shards. `done` is called with
    the current activity and its progress, `first` with the first row of a large step, before it is compared. Raises
    E1xx, and E301 if nothing fits, with the least too large variant."""
    state = state_of(document)
    every = [*_shapes(document)]
    if not any(shape.why is None for shape, _ in every):
        raise _no_shape(document, [shape for shape, _ in every])
    every = [(shape, own) for shape, own in every if shape.why is None]
    shapes, least = list[_Shape](), Least()
    for count, (bound, k) in enumerate(sorted((_bound(own), k) for k, (_, own) in enumerate(every))):
        done(LOOKING, count / len(every))
        chosen = _best(shapes)
        beat = SPARE * chosen[-1].guess if len(chosen) == SHAPES else math.inf
        if bound >= beat:  # nor can those after it be among the best
            break
        shape, own = every[k]
        guess, policy = _guess(own, shape, state, least, beat)
        if guess is not None:
            shapes.append(_Shape(guess, k, shape, own, policy))
    chosen, rows = _best(shapes), list[tuple[float, int, toml.Document, world.Shape]]()
    pairs = ((one, kind) for one in chosen for kind in KINDS if one.shape.pp > 1 or kind == BASELINE)
    jobs = [(one.shape, [*one.planned_as(kind)]) for one, kind in pairs]
    whole = dict[int, list[Row]]()
    if chosen and _is_large(chosen[0].shape):
        early = jobs[0][1][0]
        for row in whole.setdefault(id(early), [*_whole(early)]):
            first(row)
    for k, (shape, ways) in enumerate(jobs):
        done(PLANNING, k / len(jobs))
        for own in ways:
            look = _weighed(own, shape)
            if look.error is None and look.sample_ms is not None:
                rows.append((look.sample_ms, k, own, shape))
                break
            _remember(least, look)
    best = list[Row]()
    for own in _few(sorted(rows, key=lambda row: row[:2])):
        done(FINISHING, len(best) / ROWS)
        best += whole[id(own)] if id(own) in whole else _whole(own)
    if not best:
        raise _nothing_fits(state, document, least)
    best.sort(key=lambda row: row.sample_ms)
    done(COMPARING, 0.0)
    fastest = _mixed(_under_all(best[0]))
    return Advice((fastest, *best[1:]), state, len(every), len(chosen))


LOOKING, PLANNING, FINISHING = "looking at shapes", "planning the best shapes", "planning whole steps"
COMPARING = "planning the best under all schedules"


def _shapes(document: toml.Document) -> Iterator[tuple[world.Shape, toml.Document]]:
    """Yields every possible shape, with each way to shard over replicas."""
    for shard in SHARDS:
        made = _with(document, {("parallel", "shard"): shard, ("schedule", "kind"): BASELINE})
        worlds = world.read(made)
        if isinstance(worlds, toml.Document):  # there is only one
            parallel, count = worlds.values["parallel"], worlds.values["schedule"]["microbatches"]
            worlds = world.World(worlds, (world.Shape(parallel["pp"], parallel["dp"], count),))
        for shape in worlds.shapes:
            if shape.copies > 1 or shard == SHARDS[0]:
                yield shape, worlds.of(shape)


def _bound(document: toml.Document) -> float:
    """ms of a sample that 1F1B takes at least; none if it cannot be planned, which a look at it tells."""
    try:
        job = _job(_with(document, {**WHOLE, ACTIVATIONS: "keep"}))
        case = Case(job, find(BASELINE), None)
        samples = job.schedule.microbatches * job.schedule.microbatch_size * job.parallel.dp
        return case.setup(case.start).least_step / samples
    except ZbcError:
        return 0.0


def _weighed(document: toml.Document, shape: world.Shape, enough: float = ENOUGH) -> world.Weighed:
    try:
        return weighed(_job(document), shape, enough)
    except ZbcError as error:
        return world.Weighed(shape, error=error)


def _guess(
    document: toml.Document, shape: world.Shape, state: State, least: Least, beat: float
) -> tuple[float | None, str | None]:
    """ms of a sample as 1F1B, with as much recompute as memory needs, and the policy that fits in all stages; no time
    if even the most does not fit, or if it takes `beat` ms with none."""

    def under(policy: str) -> world.Weighed:
        return _weighed(_with(document, {**WHOLE, ACTIVATIONS: policy}), shape, FILLED)

    less, room = under("keep"), state.room or math.inf
    if less.sample_ms is None or less.peak_bytes is None or less.peak_bytes <= room:
        return less.sample_ms, None if less.peak_bytes is None else "keep"
    if less.sample_ms >= beat:
        return None, None
    again, policy = under("recompute"), "recompute"
    if again.sample_ms is None or again.peak_bytes is None or again.peak_bytes > SPARE * room:
        _remember(least, again)
        return None, None
    some = under("selective")
    if some.sample_ms is not None and some.peak_bytes is not None:
        less, again, policy = (less, some, "selective") if some.peak_bytes <= room else (some, again, policy)
    (ms, held), (slow, low) = ((one.sample_ms or 0.0, one.peak_bytes or 0) for one in (less, again))
    over = (held - room) / max(1.0, held - low)
    return ms + min(1.0, over) * (slow - ms), policy


def _remember(least: Least, row: world.Weighed) -> None:
    """Records a variant that is too large, with the bytes it needs."""
    if row.error is not None and row.peak_bytes is not None:
        least.append((row.peak_bytes, row.shape, row.error))


def _best(found: Sequence[_Shape]) -> list[_Shape]:
    """The best shapes, each with its best ep and the first way to shard that is as good as any other."""
    of = dict[world.Shape, _Shape]()
    for candidate in sorted(found, key=lambda one: one.number):
        if candidate.cut not in of or candidate.guess < of[candidate.cut].guess / SPARE:
            of[candidate.cut] = candidate
    return sorted(of.values())[:SHAPES]


def _few(rows: Sequence[tuple[float, int, toml.Document, world.Shape]]) -> Iterator[toml.Document]:
    """Yields the first rows, few of each shape."""
    of = Counter[world.Shape]()
    for _, _, document, shape in rows:
        if of[shape] < OF_SHAPE and of.total() < ROWS:
            of[shape] += 1
            yield document


def _whole(document: toml.Document) -> Iterator[Row]:
    """Yields the job, planned as by `zbc plan --budget 0`. Layers of stages and recompute stay open: for other
    schedules others are better."""
    try:
        yield Row(document, compile_job(_job(document), suggest=False, budget=0.0))
    except ZbcError:
        return


def _under_all(row: Row) -> Row:
    """The row, or its job under another schedule if one is faster. Of a large step they are looked at with fewer
    microbatches, and with the row's recompute if that is the same in all stages. A look may see more than the plan of
    its schedule alone; then the others are looked at again."""
    document, left, step, wanted = row.document, {*SCHEDULES} - {row.compiled.schedule}, row.compiled.step_ms, 1
    if _is_large(row.shape):
        (policy, *more), count = row.job.memory.chosen(), min(row.shape.microbatches, ENOUGH * row.shape.pp)
        changes = {("schedule", "microbatches"): count} | ({} if more else {ACTIVATIONS: policy})
        document, wanted = _with(document, changes), FEW
        step = _weighed(document, row.shape._replace(microbatches=count)).step_ms or step
    job, better = _job(document).under(AUTO), list[Row]()
    while len(better) < wanted and (names := faster(job, left, step * (1 - AHEAD))):
        for name in names[: wanted - len(better)]:
            planned = _whole(_with(row.document, {("schedule", "kind"): name}))
            better += [one for one in planned if one.sample_ms < row.sample_ms]
            left.remove(name)
    return min([row, *better], key=lambda one: one.sample_ms)


def _mixed(row: Row) -> Row:
    """The row, with less recompute in some stages if it was planned with one policy and that is faster. The stages are
    chosen with few microbatches: no more activations are held with all of them."""
    if row.document.values["memory"]["activations"] in ("auto", "keep"):
        return row
    best, count = [row], min(row.shape.microbatches, FILLED * row.shape.pp)
    for few in _whole(_with(row.document, {("schedule", "microbatches"): count, ACTIVATIONS: "auto"})):
        chosen = [(key, getattr(few.job.memory, key)) for key in ("activations", "attention")]
        mixed = {("memory", key): value for key, value in chosen if value is not None}
        best += _whole(_with(row.document, mixed))
    return min(best, key=lambda one: one.sample_ms)


def _no_shape(document: toml.Document, shapes: Sequence[world.Shape]) -> ZbcError:
    """E110 with the reason of each shape, and the nearest batch of which each GPU gets a share."""
    count, schedule = int(document.values["parallel"]["world"]), document.values["schedule"]
    each = count * int(schedule.get("microbatch_size", 1))
    batch = max(1, round(int(schedule["batch"]) / each)) * each
    details = [f"= {text}" for text in dict.fromkeys(f"{shape}: {shape.why}" for shape in shapes)]
    text = f"advise: no shape of {count} GPUs can be planned"
    hint = f"set a batch of {batch} (--batch), or another number of GPUs (--gpus)"
    return ZbcError("E110", text, where=document.where(("parallel", "world")), hint=hint, details=details)


def _nothing_fits(
    state: State, document: toml.Document, least: Sequence[tuple[int, world.Shape, ZbcError]]
) -> ZbcError:
    """The E301 of the least too large variant, with a fix that would fit."""
    if not least:
        text = f"does not fit: {size(state.share)} of weights, gradients and optimizer leave no room for activations"
        return ZbcError("E301", text, hint="use more GPUs, or GPUs with more memory")
    held, shape, error = min(least, key=lambda entry: entry[0])
    text = f"does not fit: of all shapes {shape} needs least, {size(held)} a GPU"
    enough = at_least(held / GIB / (1 - RESERVE))
    hint = f"what does: hardware.memory_gib = {enough}, more GPUs (--gpus), or shorter sequences (--seq-len)"
    return ZbcError("E301", text, where=document.where(("hardware", "memory_gib")), hint=hint, details=error.details)


# ---- comparison ------------------------------------------------------------------------------------------------------


def spent(row: Row) -> dict[str, float]:
    """The time of the mean rank in a step by activity, as ms of a sample and GPU: together the time of a sample."""
    report, parallel = row.compiled.report, row.job.parallel
    stages = [s for s in range(row.recompute[1]) if row.job.memory.recomputes(s)]
    again = row.compiled.costs.total("f", stages) * row.job.schedule.microbatches / parallel.pp
    sums = report.tp_sums.ms if report.tp_sums is not None else 0.0
    busy = sum(rank.busy_ms for rank in report.per_rank) / len(report.per_rank)
    shares = {
        "computing": busy - again - sums,
        "exchanges inside of layers": sums,
        "recompute": again,
        "waiting": row.compiled.settled_ms - busy,
    }
    return {name: ms * parallel.ranks / row.compiled.sequences for name, ms in shares.items()}


def decides(rows: Sequence[Row]) -> str:
    """The lead of the best row over the next of another shape, in a line: all parts of at least half a percent."""
    best = rows[0]
    second = next((row for row in rows[1:] if row.shape != best.shape), None)
    if second is None:
        return f"no other shape than {best.shape} fits"
    own, theirs = spent(best), spent(second)
    whole = sum(own.values())
    changes = {name: (theirs[name] - own[name]) / whole for name in own}
    several = [(name, by) for name, by in changes.items() if abs(by) > 0.005]
    told = [f"{percent(abs(by))} {'less' if by > 0 else 'more'} {name}" for name, by in several]
    ahead = f"{best.shape} is {percent(sum(changes.values()))} ahead of {second.shape}"
    return f"{ahead}: {', '.join(told)}" if told else ahead


def _job(document: toml.Document) -> Job:
    return job_of(gpu.filled(document))


def _with(document: toml.Document, changes: Mapping[tuple[str, str], Any]) -> toml.Document:
    """The document with other values."""
    tables = dict(document.values)
    for (table, key), value in changes.items():
        tables[table] = {**tables.get(table, {}), key: value}
    return replace(document, values=tables)
