"""Compiles a job description to a checked, simulated, complete plan."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from zbc import excludes
from zbc.compiler import recall
from zbc.compiler.adapting import adapter_report
from zbc.compiler.check import check_graph
from zbc.compiler.check.asked import missing_problems
from zbc.compiler.check.faults import op_faults
from zbc.compiler.check.forward import check_forward
from zbc.compiler.check.found import raise_found
from zbc.compiler.check.memory import RECOMPUTE, check_host, check_memory, fullest_device, hint_of, ways
from zbc.compiler.check.orders import order_problems
from zbc.compiler.cost import estimate
from zbc.compiler.cost.cards import with_card
from zbc.compiler.cost.cost import Costs
from zbc.compiler.deciding import chunked, decided
from zbc.compiler.freezing import freeze_report, freezes
from zbc.compiler.graph import build
from zbc.compiler.memory.per_rank import RankMemory
from zbc.compiler.numbering import numbered
from zbc.compiler.order import glance, order
from zbc.compiler.partition.limits import limits_of
from zbc.compiler.partition.setup import Ordered, as_ordered, over_of
from zbc.compiler.passes.reduce_grads import reduced_as
from zbc.compiler.report import report
from zbc.compiler.schedules import AUTO, LIMITS, SCHEDULES, find
from zbc.compiler.schedules.options import option_problems, undecided
from zbc.compiler.sim.simulate import Timeline
from zbc.compiler.steps import either_way
from zbc.errors import MISTYPED, Problems, ZbcError
from zbc.exact.proving import proven
from zbc.host.until import Until
from zbc.ir import Program
from zbc.job import gpu, spec, tokens, toml, world
from zbc.job.cuts import cuts_of
from zbc.job.flops import attention_cost
from zbc.job.links import LinkTable
from zbc.job.profile import Profile
from zbc.job.rules import asked_again
from zbc.job.sections import is_name
from zbc.job.spec import Draft, Job
from zbc.job.throughput import Throughput, throughput
from zbc.plan import directory as plans
from zbc.plan.forward import forward_of
from zbc.plan.lateness import lateness
from zbc.text import GIB, at_least, short, size, wrap


class RampStart(NamedTuple):
    """A plan with fewer microbatches, and the number of steps a training runs it before the next."""

    compiled: Compiled
    steps: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """All results for one planned job."""

    job: Job
    schedule: str
    compute: Program  # compute-only, as made by the schedule
    program: Program  # complete
    costs: Costs
    layers: tuple[tuple[str, ...], ...]  # stage -> layer names
    found: Ordered  # its order, partition and recomputing stages
    timeline: Timeline
    memory: list[RankMemory]
    report: report.Report
    ramp: tuple[RampStart, ...] = ()

    @property
    def step_ms(self) -> float:
        """ms of a step as plans are compared: in steady state, or by the job's objective (see `Job.steady`)."""
        return self.settled_ms if self.job.steady else self.report.step_ms(self.job.objective)

    @property
    def settled_ms(self) -> float:
        """ms of a step with its optimizer in steady state."""
        ahead = self.report.ahead_ms if self.job.optimizer.sync != "before-step" else None
        return float(self.report.barrier_ms if ahead is None else ahead)

    @property
    def sequences(self) -> int:
        """Sequences per step, over all replicas."""
        return self.job.parallel.dp * self.job.schedule.microbatches * self.job.schedule.microbatch_size

    def rates(self, ms: float) -> Throughput:
        """Throughput of steps of `ms`."""
        job = self.job
        world, peak, frozen = job.parallel.ranks, gpu.peak_tflops(job.hardware.gpu), bool(job.adapter.rank)
        tokens = job.parallel.dp * job.schedule.microbatch_size * sum(job.tokens) if job.model.seq_len else 0
        return throughput(job.model, self.sequences, ms, world, peak, tokens or None, frozen=frozen)

    def assemble(self) -> tuple[plans.Manifest, dict[str, str]]:
        """The manifest and the text of every other file; names of files may have a folder."""
        boundary, parts, below = _boundary(self.job), [], dict[str, str]()
        for start in self.ramp:
            its, files = start.compiled.assemble()
            name = f"m{its.microbatches}"
            parts.append(
                plans.RampPlan(folder=name, microbatches=its.microbatches, steps=start.steps, sha256=its.digest())
            )
            below |= {f"{name}/{file}": text for file, text in {plans.MANIFEST: its.dumps(), **files}.items()}
        manifest, files = plans.assemble(
            self.program,
            parameters={"chunks": self.program.placement.chunks},
            layers=self.layers,
            boundaries=[boundary] * (len(self.layers) - 1),
            microbatch_size=self.job.schedule.microbatch_size,
            predicted=self.report.predicted(),
            planning=as_ordered(self.job, self.found).planning(),
            training=self.job.training(),
            ramp=parts,
            cuts=cuts_of(self.job),
            words=self.job.words,
            balance=_unequal(self.job),
        )
        return manifest, {**files, **below}

    def write(self, folder: Path) -> plans.Manifest:
        """Write the plan directory; it appears complete or not at all."""
        manifest, files = self.assemble()
        plans.write(folder, manifest, files)
        return manifest


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
    document = recall.document_of(path) if again else None
    document = spec.gathered(path, overrides, schedule, profile, document=document)
    kept = recall.job_of(plans.read_manifest(path)) if again else None
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


Measured = tuple[Profile | None, LinkTable | None]  # contents of the files that a plan's job named
ASKING = 10.0  # least CPU seconds for testing whether other schedules would fit
UNMEASURED: Measured = (None, None)


def _fastest(found: world.World, measured: Measured, *, sketch: bool) -> Job:
    """The job in the fastest of its shapes per sample, by the fast search; in any of them as a `sketch`.

    Raises the error of all shapes, if it is the same, and E110 if each has its own.
    """
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
    """One shape planned by the fast search, without its ramp.

    Each microbatch that is left out adds the busiest rank's work on one: a step takes at least that.
    """
    row, memory = world.Weighed(shape), list[RankMemory]()
    count = int(min(shape.microbatches, enough * shape.pp))
    rest = shape.microbatches - count
    changed = job.schedule.model_copy(update={"ramp": [], "microbatches": count})
    try:
        compiled = _compile(decided(asked_again(replace(job, schedule=changed))), 0.0)
        held = compiled.report.peak_bytes if compiled.report.bytes_known else None
        busiest, memory = max(rank.busy_ms for rank in compiled.report.per_rank) / count, compiled.memory
        took = compiled.settled_ms + rest * busiest
        sequences = compiled.sequences // count * shape.microbatches
        row = world.Weighed(shape, compiled.schedule, took, took / sequences, held, at_least=rest > 0)
        check_memory(job, memory, compiled.costs)
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


def job_of(document: toml.Document, measured: Measured = UNMEASURED, *, counts: bool = True) -> Job:
    """The job of a document whose shape is known, or all its problems, the schedule's too; `measured` if it has no
    profile."""
    draft = spec.drafted(document)
    draft.profile, draft.links = draft.profile or measured[0], draft.links or measured[1]
    if draft.profile is not None and draft.profile.link is not None and "hardware" in draft.sections:
        draft.sections["hardware"] = gpu.measured(draft.sections["hardware"])
    draft.problems += _schedule_problems(draft)
    draft.problems += _set_limit(draft)
    tokens.settle(draft)
    draft.problems += _pretrained(draft)
    return with_card(draft.finish()) if counts else draft.finish()


def _pretrained(draft: Draft) -> list[ZbcError]:
    """E520 for a missing folder of weights; a run reads it, and should not be the first to find out."""
    model = draft.sections.get("model")
    if model is None or model.pretrained is None or os.path.isdir(model.pretrained):
        return []
    text = f"model: {model.pretrained} is not a folder"
    hint = "name a folder with config.json and *.safetensors; a relative name starts in the current directory"
    return [ZbcError("E520", text, where=draft.document.where(("model", "pretrained")), hint=hint)]


def _set_limit(draft: Draft) -> list[ZbcError]:
    """Sets the limit that the name of the job's schedule implies; E110 if it has another one."""
    section = draft.sections.get("schedule")
    meant = None if section is None else LIMITS.get((section.kind or "").lower())
    if section is None or meant is None:
        return []
    if section.memory_limit is None:
        draft.sections["schedule"] = section.model_copy(update={"memory_limit": meant})
    elif spec.parse_limit(section.memory_limit) != spec.parse_limit(meant):
        text = f'config: {section.kind} has memory_limit = "{meant}", schedule.memory_limit is "{section.memory_limit}"'
        where = draft.document.where(("schedule", "memory_limit"))
        return [ZbcError("E110", text, where=where, hint='drop it, or use kind = "zb-auto"')]
    return []


def _schedule_problems(draft: Draft) -> list[ZbcError]:
    """Problems with the schedule's name and chunks, read even if the rest of [schedule] is wrong as well."""
    section = draft.document.values.get("schedule")
    kind, chunks = (section.get("kind"), section.get("chunks")) if isinstance(section, dict) else (None, None)
    where = draft.document.where
    if not isinstance(kind, str) or kind.lower() == AUTO or not is_name(kind):
        return undecided(draft, SCHEDULES.values())
    try:
        found = find(kind)
    except ZbcError as error:
        return [ZbcError("E104", error.message, where=where(("schedule", "kind")), hint=error.hint)]
    problems = option_problems(draft, found, SCHEDULES.values())
    if not isinstance(chunks, int) or chunks < 1:  # not given, or reported by itself
        return problems
    try:
        found.stages_per_rank(chunks)
    except ZbcError as error:
        problems.append(ZbcError(error.code, error.message, where=where(("schedule", "chunks")), hint=error.hint))
    return problems


def compile_job(job: Job, *, suggest: bool = True, budget: float | None = None, exact: float | None = None) -> Compiled:
    """Plan a job: schedule, complete, prove, predict; and its ramp, on the same stages.

    `exact`: seconds for a proof that the order is optimal, or for a shorter one (`proving`); not for the ramp.

    Raises E1xx (the job cannot be planned), E2xx (the order is wrong; possible for plugins), E3xx (does not fit; with
    `suggest`, with the schedules that would).
    """
    until, compiled = Until(budget if budget is None else max(budget, ASKING)), None
    asked, job = job, decided(job)
    try:
        compiled = _compile(job, budget, exact)
        check_memory(job, compiled.memory, compiled.costs)
    except ZbcError as error:
        if (other := chunked(asked, [] if compiled is None else compiled.memory)) is not None:
            with suppress(ZbcError):
                return compile_job(other, suggest=False, budget=budget, exact=exact)
        if compiled is not None and suggest and not _unknown(job, compiled):
            raise _with_alternatives(error, compiled, budget, until) from None
        raise
    check_host(job, compiled.program, compiled.costs)
    if job.balances:
        return _with_counts(compiled, budget)
    return replace(compiled, ramp=tuple(_starts(compiled, budget)))


def _with_counts(compiled: Compiled, budget: float | None) -> Compiled:
    """Adds plans for all other numbers of microbatches that a replica may get in a step, with gradient reductions in
    the order of the largest. Raises E209 if weight gathers still have different orders."""
    own, most = compiled.program.microbatches, compiled.job.most_microbatches
    found = {own: compiled}
    for count in range(most, 0, -1):
        if count != own:
            found[count] = _compile(_with_count(compiled, count), budget)
            _same_stages(found[count], compiled, count, ("data", "balance"))
            check_memory(compiled.job, found[count].memory, found[count].costs)
    if not compiled.program.one_sided:
        found = {count: _summed_as(one, found[most].program) for count, one in found.items()}
    plans = dict(sorted(found.items()))
    raise_found(order_problems([one.program for one in plans.values()]))
    return replace(plans.pop(own), ramp=tuple(RampStart(one, 0) for one in plans.values()))


def _summed_as(compiled: Compiled, other: Program) -> Compiled:
    program = reduced_as(compiled.program, other)
    if program is not compiled.program:
        check_graph(build(program))
    return replace(compiled, program=program)


def _starts(compiled: Compiled, budget: float | None) -> Iterator[RampStart]:
    """Yields the plans of `schedule.ramp`: the same schedule and the same stages, for other numbers of microbatches."""
    job, where = compiled.job, ("schedule", "ramp")
    for number, phase in enumerate(job.schedule.ramp):
        try:
            found = compile_job(_with_count(compiled, phase.microbatches), suggest=False, budget=budget)
        except ZbcError as error:
            raise _of_phase(error, job, number) from None
        _same_stages(found, compiled, phase.microbatches, where)
        yield RampStart(found, phase.length(job.schedule.microbatch_size * job.parallel.dp))


def _of_phase(error: ZbcError, job: Job, number: int) -> ZbcError:
    """The error of a plan for an entry of the ramp, which has its own number of microbatches."""
    if error.hint is None or "schedule.microbatches" not in error.hint:
        return error
    hint = error.hint.replace("schedule.microbatches", f"microbatches of entry {number} of schedule.ramp")
    where = job.where("schedule", "ramp", number, "microbatches")
    return ZbcError(error.code, error.message, where=where, hint=hint, details=error.details)


def _with_count(compiled: Compiled, count: int) -> Job:
    """The job of a plan with its schedule and its stages, for another number of microbatches."""
    job = compiled.job
    chosen: dict[str, object] = {"ramp": [], "chunks": compiled.program.placement.chunks, "microbatches": count}
    if job.schedule.plugin is None:
        chosen["kind"] = compiled.schedule
    if job.balances:
        chosen["max_microbatches"] = job.most_microbatches
    blocks = [sum(name not in ("embed", "head") for name in names) for names in compiled.layers]
    made = replace(
        job,
        schedule=job.schedule.model_copy(update=chosen),
        partition=job.partition.model_copy(update={"layers_per_stage": blocks}),
        node=compiled.costs.node,
        memory=as_ordered(job, compiled.found).memory,
    )
    return asked_again(made)


def _same_stages(found: Compiled, whole: Compiled, count: int, where: tuple[str, str]) -> None:
    if found.program.placement != whole.program.placement or found.layers != whole.layers:
        text = f"schedule: with {count} microbatches stages are on other ranks or have other layers"
        hint = f"{'.'.join(where)} needs a schedule whose stages do not depend on the number of microbatches"
        raise ZbcError("E110", text, where=whole.job.where(*where), hint=hint)


def _compile(job: Job, budget: float | None, exact: float | None = None) -> Compiled:
    """`compile_job` without the check whether it fits."""
    began = time.perf_counter()
    table = estimate.layers(job)
    try:
        job, before, unequal = numbered(job, table, budget)
        proof = None
        if exact is not None and over_of(job, before) == 0:
            before, proof = proven(job, before, exact)
        found = freezes(job, before, table)
        raise_found(op_faults(found.compute.graph))  # passes and the simulator rely on it; plugins may be wrong
        found.compute.forget()
        program = found.complete.program
    except ZbcError as error:
        if job.flushless and error.where is None:  # from the pass, which has no job
            error.where = job.where("optimizer", "sync")
        raise
    check_graph(found.complete.graph)
    raise_found(missing_problems(job, program))
    if job.train.eval_every:
        check_forward(forward_of(program))
    timeline, memory = found.complete.timeline, found.memory
    layers = tuple(tuple(table[i].name for i in part) for part in found.stages)
    chosen = report.Chosen(layers, as_ordered(job, found).memory, found.tried, found.all_tried, cuts_of(job))
    barrier, ahead = either_way(found.complete)
    summary = report.build(
        program,
        found.costs,
        timeline,
        memory,
        found.bounds,
        found.name,
        chosen,
        barrier_ms=barrier,
        ahead_ms=None if job.freeze.share else ahead,  # frozen layers need the barrier
        limits=report.told(**asdict(limits_of(job, found.name, found.costs))),
        freezing=freeze_report(job, before, found),
        adapter=adapter_report(job, found),
        unequal=unequal,
        exact=proof,
        **(_steps(job, program, ahead, barrier) if program.flushless else {}),
    )
    compiled = Compiled(job, found.name, found.program, program, found.costs, layers, found, timeline, memory, summary)
    took, rates = time.perf_counter() - began, compiled.rates(compiled.settled_ms)
    return replace(compiled, report=summary.having(compile_seconds=took, rates=rates))


def _steps(job: Job, program: Program, period: float, flush: float) -> report.Facts:
    """ms of steps without a flush and of those with one between any two; the staleness of each stage's gradients in
    steps of the stage, and whether each stage steps on its own, several times in a step of the training."""
    alone = job.optimizer.sync == "asynchronous"
    late = {stage: most for ops in program.ranks for stage, most in lateness(ops).items()}
    delay = tuple(late[stage] if alone else 1 for stage in range(program.placement.stages))
    steps = report.told(period_ms=period, flush_ms=flush, delay=delay, alone=alone)
    return report.told(steady_state_ms=period, flushless=steps)


def _unknown(job: Job, compiled: Compiled) -> bool:
    """Whether bytes are limited that are unknown for every schedule, so that none would fit."""
    limit = spec.parse_limit(job.schedule.memory_limit or "")
    return compiled.costs.bytes is None and limit is not None and limit[1] == "bytes"


class _Alternative(NamedTuple):
    """Another schedule that would fit: its name, the ms of a step and the memory of each rank."""

    schedule: str
    step_ms: float
    memory: list[RankMemory]


def _with_alternatives(error: ZbcError, compiled: Compiled, budget: float | None, until: Until) -> ZbcError:
    """The error with the schedules that would fit, the fastest first, with their steps relative to this one: as many as
    there is time to test."""
    left = list[str]()
    found = sorted(_alternatives(compiled.job, compiled.schedule, until, left), key=lambda other: other.step_ms)
    words = [
        f"{o.schedule} ({_need(o, compiled.job, error)}, step {_change(o.step_ms, compiled.step_ms)})" for o in found
    ]
    lines = wrap([f"= would fit: {words[0]}", *words[1:]], 90, between=", ") if words else []
    details = (
        [lines[0], *(f"  {line}" for line in lines[1:])]
        if lines
        else ["= no other schedule would fit, by the fast search"][: not left]
    )
    if left:
        most = f"{', '.join(left[:4])}{', ...' if len(left) > 4 else ''}"
        details.append(f"= not asked for lack of time (a larger --budget): {most}")
    last = error.errors[-1]
    hint = last.hint
    if last.code == "E301" and compiled.job.rooms is not None:
        worst = compiled.memory[fullest_device(compiled.job.rooms, compiled.memory)]
        helping = (way for way in ways(compiled.job, worst) if _helps(compiled, way))
        hint = hint_of(compiled.job, worst, [*islice(helping, 2)])
        if not until.over(compiled.report.compile_seconds):
            hint = _enough(compiled, hint, budget)
    extended = ZbcError(last.code, last.message, where=last.where, hint=hint, details=[*last.details, *details])
    return extended if len(error.errors) == 1 else Problems([*error.errors[:-1], extended])


def _need(other: _Alternative, job: Job, error: ZbcError) -> str:
    """The plan's need of the memory that `error` found too small."""
    if error.code == "E301":
        return size(max(rank.bytes for rank in other.memory))
    limit = spec.parse_limit(job.schedule.memory_limit or "")
    if limit is not None and limit[1] == "bytes":
        return size(max(rank.activations for rank in other.memory))
    return f"{short(max(rank.units for rank in other.memory))} units"


def _change(ms: float, from_ms: float) -> str:
    return f"{100 * (ms / from_ms - 1):+.1f}%" if from_ms > 0 else "+0.0%"


def _alternatives(job: Job, failed: str, until: Until, left: list[str]) -> Iterator[_Alternative]:
    """Yields every other registered schedule that keeps to the job's limits, those without a search first; predicted,
    not proven. `left` gets the ones there is no time for."""
    job = chunked(job) or job
    table = estimate.layers(job)
    for name, card in sorted(SCHEDULES.items(), key=lambda entry: entry[1].searched):
        if name == failed:
            continue
        if until.over():
            left.append(name)
            continue
        chunks = job.schedule.chunks if card.allows(job.schedule.chunks) else None
        changes = {"kind": name, "chunks": chunks}
        other = replace(job, schedule=job.schedule.model_copy(update=changes))
        try:
            found = glance(other, table)
        except ZbcError:
            continue
        if found is not None:
            yield _Alternative(name, found.step_ms(job), found.memory)


def _helps(compiled: Compiled, way: str) -> bool:
    """Whether the fullest rank needs less with these settings, by the fastest search; recompute has to make enough
    room."""
    document = compiled.job.document
    try:
        for setting in way.split(" with "):
            document = toml.merge(document, spec.override(setting.replace(" = ", "="), document.source))
        other = job_of(document, (compiled.job.profile, compiled.job.links))
        other = (chunked(other) if way == RECOMPUTE else None) or other
        found = order(other, estimate.layers(other), 0.0)
        if way == RECOMPUTE:
            check_memory(other, found.memory, found.costs)
    except ZbcError:
        return False
    return max(rank.bytes for rank in found.memory) < max(rank.bytes for rank in compiled.memory)


def _enough(compiled: Compiled, hint: str, budget: float | None) -> str:
    """The hint with a sufficient amount of memory: with more room a search may find an order that needs more."""
    head, key, amount = hint.rpartition("memory_gib = ")
    table = estimate.layers(compiled.job)
    for _ in range(4):
        job = replace(compiled.job, hardware=compiled.job.hardware.model_copy(update={"memory_gib": float(amount)}))
        try:
            found = order(job, table, budget)
        except ZbcError:
            return hint
        most = max(rank.bytes for rank in found.memory) / GIB
        if most <= float(amount):
            break
        amount = at_least(most * 1.01)
    return f"{head}{key}{amount}"


def _unequal(job: Job) -> plans.Unequal | None:
    """How samples are dealt to replicas with unequal numbers of microbatches."""
    if not job.balances or job.model.seq_len is None:
        return None
    return plans.Unequal(room=job.model.seq_len, most=job.most_microbatches, quadratic=attention_cost(job.model))


def _boundary(job: Job) -> plans.Boundary | None:
    """The tensor between stages, if known before the model is built."""
    model = job.model
    if not model.builtin or model.seq_len is None or model.hidden is None:
        return None
    longest = max((b - a for a, b in pairwise(cuts_of(job))), default=model.seq_len)
    rows, kind = longest // job.parallel.cp, model.parameters.split()[0]
    return plans.Boundary(shape=[job.schedule.microbatch_size, rows, model.hidden], dtype=kind)
