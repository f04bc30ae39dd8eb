"""Chooses the order of ops for a job: its schedule's, its file's or plugin's, or the best of all."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

from zbc.compiler.check.faults import op_faults
from zbc.compiler.check.memory import excess
from zbc.compiler.cost import pricing
from zbc.compiler.cost.cost import refuse_slices
from zbc.compiler.partition import groups
from zbc.compiler.partition.limits import bounds_of, limit_of
from zbc.compiler.partition.moving import moving
from zbc.compiler.partition.setup import Ordered, finished, lowering_of, moves, refusals, start_of, with_recompute
from zbc.compiler.partition.userpass import refuse_what_is_no_op
from zbc.compiler.planner.planner import entrants, looked, planned
from zbc.compiler.schedules import AUTO, SCHEDULES, Request, ScheduleCard, find, replicated
from zbc.compiler.schedules.branched import branched
from zbc.errors import ZbcError, raise_all, raise_found
from zbc.interop.sheet_check import check_sheet
from zbc.interop.torch_csv import read
from zbc.ir import Placement, Program
from zbc.job import userobject
from zbc.job.sections import is_name
from zbc.job.spec import Job


def order(job: Job, budget: float | None = None) -> Ordered:
    """The order of `job`; searched ones take about `budget` seconds (None: the schedule's default). Raises E1xx
    (impossible as requested), E303 (memory_limit below the need of any order) or, for an order made elsewhere, E202,
    E205 or E206."""
    if job.schedule.plugin is not None:
        return _plugin(job)
    if job.schedule.file is not None:
        return _file(job)
    if job.model.graph:
        return _of_graph(job)
    return planned(job, _cards(job), budget)


def glance(job: Job) -> Ordered | None:
    """The best order that fits, by the fast part of searches; None if it finds none. Raises E1xx."""
    if not is_name(job.schedule.kind) or job.model.graph:
        found = order(job)
        return None if excess(job, found.memory, found.costs) > 0 else found
    return looked(job, _cards(job))[0].ordered


def under(job: Job, name: str) -> Job:
    """The job under another schedule, without a ramp; with its own chunks, if the schedule may have them."""
    chunks = job.schedule.chunks if SCHEDULES[name].allows(job.schedule.chunks) else None
    return replace(job, schedule=job.schedule.model_copy(update={"kind": name, "chunks": chunks, "ramp": []}))


def _cards(job: Job) -> list[tuple[ScheduleCard, int | None]]:
    """The schedules that a job allows, with their stages per rank."""
    if job.schedule.kind.lower() == AUTO:
        return list(entrants(job))
    card = find(job.schedule.kind)
    if card.name == replicated.NAME:
        asked = job.parallel.replicas
        counts = asked if isinstance(asked, list) else [1] * job.parallel.pp  # ranks of each stage
        card = replicated.replicated(counts, job.schedule.microbatches)
    return [(card, job.schedule.chunks)]


def _of_graph(job: Job) -> Ordered:
    """The order of a model that is a graph of groups of layers. Raises E110 for a schedule without an order for graphs,
    E110 or E130 for impossible stages, E303 for a limit."""
    kind = job.schedule.kind.lower()
    if kind != AUTO:
        raise_all(refusals(job, find(kind)))
    stages, placement = groups.stages_of(job)
    costs = pricing.build(with_recompute(job, (), placement), placement, stages)
    request = Request(job.parallel.pp, job.schedule.microbatches, costs=costs, objective=job.objective)
    made = branched(kind, placement, request)
    program = finished(job, made, costs, stages)
    limit, lowering = limit_of(job, placement, costs), lowering_of(job)
    if limit.units is not None and moves(job, placement):
        lowering = moving(job, placement, limit, limit.units)
    return Ordered(made.history[0], program, stages, costs, bounds_of(job, placement, costs), lowering)


# ---- orders from elsewhere: files and plugins -----------------------------------------------------------------------


def _file(job: Job) -> Ordered:
    """The order of a torch CSV file; a relative path starts at the folder of the job file that names it."""
    where = job.where("schedule", "kind")
    path = Path(job.schedule.file or "")
    if not where.startswith("--"):  # written in a file, not on the command line
        path = Path(where.rsplit(":", 2)[0]).parent / path
    sheet = read(path)
    check_sheet(sheet)
    program = sheet.program
    for key, found, asked in (
        ("parallel.pp", program.placement.ranks, job.parallel.pp),
        ("schedule.microbatches", program.microbatches, job.schedule.microbatches),
        ("schedule.chunks", program.placement.chunks, job.schedule.chunks),
    ):
        if asked is not None and found is None:
            text = f"schedule: {path.name} has ranks with different numbers of stages, {key} is {asked}"
            raise ZbcError("E110", text, where=where, hint=f"leave {key} out")
        if asked is not None and found != asked:
            text = f"schedule: {path.name} is an order for {key} = {found}, the job has {asked}"
            raise ZbcError("E110", text, where=where, hint=f"set {key} = {found}")
    return _given(path.name, program, job)


def _plugin(job: Job) -> Ordered:
    """A user's own generator, `module:function`, Request -> Program."""
    name = job.schedule.plugin or ""
    where = job.where("schedule", "kind")
    make = userobject.load(re.sub("^torch:", "zbc.pipelining:", name), "schedule.kind", code="E121", where=where)
    asked = job.schedule
    request = Request(
        job.parallel.pp,
        asked.microbatches,
        asked.chunks or 1,
        group=asked.group,
        early=asked.early,
        overlap=bool(asked.overlap),
        objective=job.objective,
        slices=job.slices,
    )
    program = userobject.call(partial(make, request), {}, name, "schedule.kind", code="E121", where=where)
    if not isinstance(program, Program):
        text = f"schedule: plugin {name} returned {type(program).__name__}, not a zbc.ir.Program"
        raise ZbcError("E121", text, where=where, hint="return zbc.ir.Program(placement, microbatches, ranks)")
    refuse_what_is_no_op(program, f"plugin {name}", where)
    if program.slices != job.slices:
        if job.schedule.slices == 1:  # E110
            refuse_slices(f"schedule: the order of plugin {name}", program.slices, where=where)
        text = f"schedule: plugin {name} made an order of {program.slices} slices, schedule.slices is {asked.slices}"
        hint = f"it was asked for request.slices; or set schedule.slices = {program.slices}"
        raise ZbcError("E121", text, where=where, hint=hint)
    _refuse_what_is_no_pipeline(program.placement, name, where)
    found, asked_for = (program.placement.ranks, program.microbatches), (job.parallel.pp, job.schedule.microbatches)
    if found != asked_for:
        text = f"schedule: plugin {name} made a program of {found[0]} ranks and {found[1]} microbatches"
        hint = f"it was asked for {asked_for[0]} and {asked_for[1]}: request.p and request.m"
        raise ZbcError("E121", text, where=where, hint=hint)
    made, chunks = program.placement.chunks, asked.chunks
    if chunks is not None and made != chunks:
        number = "different numbers of stages on its ranks" if made is None else f"{made} stages per rank"
        text = f"schedule: plugin {name} made a program with {number}, schedule.chunks is {chunks}"
        hint = "leave schedule.chunks out" if made is None else f"set schedule.chunks = {made}, or leave it out"
        raise ZbcError("E121", text, where=job.where("schedule", "chunks"), hint=hint)
    return _given(name, replace(program, history=(name,)), job)


def _given(name: str, program: Program, job: Job) -> Ordered:
    """An order made elsewhere, with the partition the job starts from. Raises E202, E205 or E206 for faults of its ops:
    passes and the simulator rely on them."""
    stages, costs = start_of(job, program.placement)
    least = bounds_of(job, program.placement, costs.hidden() if program.grouped else costs)
    given = Ordered(name, finished(job, program, costs, stages), stages, costs, least, lowering_of(job))
    raise_found(op_faults(given.compute.graph))
    return given


def _refuse_what_is_no_pipeline(placement: Placement, name: str, where: str) -> None:
    """Raises E121 for pipes of different lengths, for stages that are not in a row, and for a rank without any."""
    idle = next((rank for rank in range(placement.ranks) if not placement.stages_of(rank)), None)
    problems = [
        (len(set(map(len, placement.pipes))) > 1, "pipes of different lengths", "every pipe holds all stages"),
        (placement.branches, "stages that are not in a row", "leave out the placement's edges"),
        (idle is not None, f"no stage on rank {idle}", "every rank holds a stage of some pipe"),
    ]
    for wrong, text, hint in problems:
        if wrong:
            raise ZbcError("E121", f"schedule: plugin {name} made a placement with {text}", where=where, hint=hint)
