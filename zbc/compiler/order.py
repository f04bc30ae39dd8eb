"""Which order of ops a job gets: its schedule's, its plugin's, or the best of all placements."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zbc.compiler import cost, estimate
from zbc.compiler.bounds import Bounds, bounds
from zbc.compiler.cost import Costs
from zbc.compiler.limits import Limit, limit_of
from zbc.compiler.partition import Stages, partition
from zbc.compiler.schedules import AUTO, BUDGET, SCHEDULES, Request, Schedule, find
from zbc.compiler.simulate import simulate
from zbc.errors import ZbcError
from zbc.interop.sheet_check import check_sheet
from zbc.interop.torch_csv import read
from zbc.ir import Placement, Program
from zbc.spec import Job

FINALISTS = 2  # placements that share the budget of "auto"


@dataclass(frozen=True, slots=True)
class Ordered:
    """A compute-only program with the cut and the costs it was made for."""

    name: str
    program: Program
    stages: Stages
    costs: Costs
    bounds: Bounds


def order(job: Job, table: Sequence[estimate.Layer], budget: float | None = None) -> Ordered:
    """The order of `job`; searched ones take about `budget` seconds (None: what the schedule takes by default).

    Raises E1xx (impossible as asked) or E303 (memory_limit below what any order needs).
    """
    if job.schedule.plugin is not None:
        found = _plugin(job, table)
    elif job.schedule.file is not None:
        found = _file(job, table)
    elif (job.schedule.kind or "").lower() == AUTO:
        found = _best(job, table, budget)
    else:
        found = _one(job, table, find(job.schedule.kind or ""), job.schedule.chunks, budget)
    program = replace(
        found.program,
        copies=job.parallel.dp,
        tied=job.model.tie_embeddings and found.program.placement.stages > 1,
        sharded=job.optimizer.zero1,
    )
    return replace(found, program=program)


def _one(
    job: Job, table: Sequence[estimate.Layer], schedule: Schedule, chunks: int | None, budget: float | None
) -> Ordered:
    p = job.parallel.pp
    schedule.check_ranks(p)
    v = schedule.stages_per_rank(chunks)
    placement = schedule.placement(p, v)
    stages, costs = _costs(job, placement, table)
    limit = limit_of(job, placement, costs) if schedule.searched else Limit(costs, None)
    seconds = schedule.budget if budget is None else budget
    program = schedule.make(_request(job, v, limit, seconds))
    return Ordered(schedule.name, program, stages, costs, _bounds(job, placement, costs))


def _bounds(job: Job, placement: Placement, costs: Costs) -> Bounds:
    """What no order within the job's memory limit can beat."""
    try:
        limit = limit_of(job, placement, costs)
    except ZbcError:
        limit = Limit(costs, None)
    return bounds(placement, limit.costs, job.schedule.microbatches, limit.units)


def _costs(job: Job, placement: Placement, table: Sequence[estimate.Layer]) -> tuple[Stages, Costs]:
    stages = partition(job, placement, table)
    return stages, cost.build(job, placement, stages, table)


def _request(job: Job, v: int, limit: Limit, budget: float) -> Request:
    return Request(
        p=job.parallel.pp,
        m=job.schedule.microbatches,
        v=v,
        group=job.schedule.group,
        early=job.schedule.early,
        overlap=job.costs.overlap > 0 if job.schedule.overlap is None else job.schedule.overlap,
        costs=limit.costs,
        memory_limit=limit.units,
        objective=job.objective,
        budget=budget,
    )


# ---- auto ----------------------------------------------------------------------------------------------------


def _best(job: Job, table: Sequence[estimate.Layer], budget: float | None) -> Ordered:
    """The best over all placements: each searched briefly, the best of them at length."""
    found: list[tuple[float, Schedule, int]] = []
    first: dict[tuple[str, int], Ordered] = {}
    refused: list[ZbcError] = []
    for schedule, v in _entrants(job):
        try:
            ordered = _one(job, table, schedule, v, 0.0)
        except ZbcError as error:
            refused.append(error)
            continue
        first[schedule.name, v] = ordered
        found.append((_step(job, ordered), schedule, v))
    if not found:
        raise min(refused, key=lambda error: error.code != "E303")
    found.sort(key=lambda entry: (entry[0], entry[2]))
    finalists = found[:FINALISTS]
    seconds = (BUDGET if budget is None else budget) / len(finalists)
    results = [first[schedule.name, v] for _, schedule, v in found]
    if seconds > 0:
        results += [_one(job, table, schedule, v, seconds) for _, schedule, v in finalists]
    return min(results, key=lambda ordered: _step(job, ordered))


def _entrants(job: Job) -> Iterator[tuple[Schedule, int]]:
    """The searched schedules whose placements differ, with the chunks worth trying."""
    asked = job.schedule.chunks
    for name, counts in (("zb-auto", (1,)), ("v-auto", (2,)), ("looped-zb", (2, 3, 4))):
        for v in counts:
            if asked in (None, v):
                yield SCHEDULES[name], v


def _step(job: Job, ordered: Ordered) -> float:
    timeline = simulate(ordered.program, ordered.costs)
    return timeline.makespan if job.objective == "makespan" else timeline.span


# ---- orders from elsewhere: files and plugins -----------------------------------------------------------------------


def _file(job: Job, table: Sequence[estimate.Layer]) -> Ordered:
    """The order of a torch CSV file; a relative path starts at the folder of the job file that names it."""
    where = job.where("schedule", "file")
    path = Path(job.schedule.file or "")
    if not where.startswith("--"):  # written in a file, not on the command line
        path = Path(where.rsplit(":", 2)[0]).parent / path
    sheet = read(path)
    check_sheet(sheet)
    program = sheet.program
    for key, found, asked in (
        ("parallel.pp", program.placement.ranks, job.parallel.pp),
        ("schedule.microbatches", program.microbatches, job.schedule.microbatches),
    ):
        if found != asked:
            text = f"schedule: {path.name} is an order for {key} = {found}, the job has {asked}"
            raise ZbcError("E122", text, where=where, hint=f"set {key} = {found}")
    stages, costs = _costs(job, program.placement, table)
    return Ordered(path.name, program, stages, costs, _bounds(job, program.placement, costs))


def _plugin(job: Job, table: Sequence[estimate.Layer]) -> Ordered:
    """A user's own generator, `module:function`, Request -> Program."""
    name = job.schedule.plugin or ""
    module, _, attribute = name.partition(":")
    where = job.where("schedule", "plugin")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        hint = "it is looked up on the import path and in the current directory"
        text = f"schedule: cannot import plugin {name}"
        raise ZbcError("E121", text, where=where, hint=hint, details=[str(error)]) from error
    program = make(
        Request(job.parallel.pp, job.schedule.microbatches, job.schedule.chunks or 1, objective=job.objective)
    )
    if not isinstance(program, Program):
        text = f"schedule: plugin {name} returned {type(program).__name__}, not a zbc.ir.Program"
        raise ZbcError("E121", text, where=where)
    if program.placement.ranks != job.parallel.pp or program.microbatches != job.schedule.microbatches:
        text = f"schedule: plugin {name} made a program for other ranks or microbatches than it was asked for"
        raise ZbcError("E121", text, where=where)
    stages, costs = _costs(job, program.placement, table)
    program = replace(program, history=(name,))
    return Ordered(name, program, stages, costs, _bounds(job, program.placement, costs))
