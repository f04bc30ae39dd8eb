"""Reads a job; with parallel.world, in the fastest of its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zbc import excludes
from zbc.compiler.check.memory import check_memory
from zbc.compiler.compile import looked
from zbc.compiler.deciding import chunked, decided
from zbc.compiler.memory.per_rank import RankMemory
from zbc.compiler.reading import Measured, job_of
from zbc.compiler.schedules import AUTO, find
from zbc.errors import MISTYPED, ZbcError
from zbc.job import spec, toml, world
from zbc.job.rules import asked_again
from zbc.job.spec import Job
from zbc.plan import directory as plans
from zbc.plan import reading
from zbc.text import size


def load_job(
    path: Path,
    overrides: Sequence[str] = (),
    schedule: str | None = None,
    profile: Path | None = None,
    *,
    sketch: bool = False,
    counts: bool = True,
) -> Job:
    """Read a job file, or the job of a plan directory; raises every problem at once, the schedule's included.

    Layers of a factory are run without numbers, unless not even that `counts`: for a check of what they do.

    With parallel.world, pp and dp are chosen: by the time per sample of the fast search, or not at all as a `sketch`.

    `profile` is the file of measured costs to plan with, instead of the job's costs in numbers, and
    of the costs that a plan was made with.
    """
    again = plans.is_plan(path)
    document = reading.document_of(path) if again else None
    document = spec.gathered(path, overrides, schedule, profile, document=document)
    kept = reading.job_of(plans.read_manifest(path)) if again else None
    measured = (None if kept is None or profile is not None else kept.profile, None if kept is None else kept.links)
    found = world.read(document, replicated=_has_replicas(document))
    if isinstance(found, world.World):
        return _fastest(found, measured, sketch=sketch)
    return job_of(found, measured, counts=counts)


def _has_replicas(document: toml.Document) -> bool:
    """Whether the schedule that a document names has replicas of each stage in one pipeline."""
    section = document.values.get("schedule")
    kind = section.get("kind") if isinstance(section, dict) else None
    with suppress(ZbcError):  # a wrong name is reported later
        return isinstance(kind, str) and kind.lower() != AUTO and "copies" in find(kind).traits
    return False


def _fastest(found: world.World, measured: Measured, *, sketch: bool) -> Job:
    """The job in the fastest of its shapes per sample, by the fast search; in any of them as a `sketch`. Raises the
    error of all shapes, if it is the same, and E110 if each has its own."""
    jobs, rows = dict[world.Shape, Job](), dict[world.Shape, world.Weighed]()
    for shape in found.shapes:
        rows[shape] = world.Weighed(shape)
        if shape.why is not None:
            continue
        try:
            jobs[shape] = job_of(found.of(shape), measured)
        except ZbcError as error:
            if {each.code for each in error.errors} <= MISTYPED:  # else a shape without such a key would be chosen
                raise
            rows[shape] = replace(rows[shape], error=error)
            continue
        if sketch:
            return jobs[shape]
        rows[shape] = weighed(jobs[shape], shape)
    while fits := [row for row in rows.values() if row.error is None and row.sample_ms is not None]:
        best = min(fits, key=lambda row: row.sample_ms or 0.0)
        if not best.at_least:
            return replace(jobs[best.shape], weighed=tuple(rows.values()))
        rows[best.shape] = weighed(jobs[best.shape], best.shape, best.shape.microbatches)
    raise _none_fits(found, [*rows.values()])


# Schedules to weigh a shape with if the schedule is open: the first two that the job allows.
_STANDINS = ("v-auto", "zb-auto", "interleaved-1f1b", "1f1b")

ENOUGH = 3  # times the ranks of a pipeline: microbatches beyond which a step grows by its busiest rank's work


def weighed(job: Job, shape: world.Shape, enough: float = ENOUGH) -> world.Weighed:
    """One shape with the best of its candidate schedules, planned with at most `enough` microbatches for each rank of a
    pipeline."""
    names: Sequence[str] = (job.schedule.kind,)
    if job.schedule.kind.lower() == AUTO:
        names = [name for name in _STANDINS if not any(excludes.clashes(vars(job), find(name).traits))][:2]
    jobs = [job.under(name) for name in names]
    rows = [_planned(each, shape, enough) for each in jobs]
    return min(rows, key=lambda row: (row.error is not None, row.sample_ms or 0.0))


def _planned(job: Job, shape: world.Shape, enough: float) -> world.Weighed:
    """One shape planned by the fast search, without its ramp. Each microbatch that is left out adds the busiest rank's
    work on one: a step takes at least that."""
    row, memory = world.Weighed(shape), list[RankMemory]()
    count = int(min(shape.microbatches, enough * shape.pp))
    rest = shape.microbatches - count
    changed = job.schedule.model_copy(update={"ramp": [], "microbatches": count})
    try:
        found, took = looked(decided(asked_again(replace(job, schedule=changed))))
        memory, timeline = found.memory, found.complete.timeline
        held = round(max(rank.bytes for rank in memory)) if found.costs.bytes is not None else None
        took += rest * max(map(timeline.busy, range(timeline.ranks))) / count
        sequences = job.parallel.dp * job.schedule.microbatch_size * shape.microbatches
        row = world.Weighed(shape, found.name, took, took / sequences, held, at_least=rest > 0)
        check_memory(job, memory, found.costs)
    except ZbcError as error:
        other = chunked(job, memory)
        return replace(row, error=error) if other is None else _planned(other, shape, enough)
    return row


def _none_fits(found: world.World, rows: Sequence[world.Weighed]) -> ZbcError:
    """Why there is no plan for any shape."""
    errors = [row.error for row in rows if row.error is not None]
    reasons = {tuple((each.code, each.message) for each in error.errors) for error in errors}
    if errors and len(errors) == len(rows) and len(reasons) == 1:
        return errors[0]
    lines = [f"= {row.shape}: {row.shape.why or (row.error and row.error.message)}" for row in rows]
    over = [row for row in rows if row.peak_bytes is not None]
    least = min(over, key=lambda row: row.peak_bytes or 0, default=None)
    hint = "set another batch, another number of ranks, or another schedule"
    if least is not None:
        needs = f"{least.schedule} at {least.shape} needs {size(least.peak_bytes or 0)}"
        hint = f'of all, {needs} a rank; memory.activations = "auto" makes room'
    where = found.document.where(world.WORLD)
    return ZbcError(
        "E110", "config: no pp and dp of parallel.world can be planned", where=where, hint=hint, details=lines
    )
