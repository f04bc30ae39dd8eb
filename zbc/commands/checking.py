"""`check`: all problems of a plan directory; an edited file does not hide problems of its ops."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbc.commands.console import labelled, show, tell, write_text
from zbc.commands.opening import NO_CHANGES, Changes
from zbc.commands.options import Out, PlanJobOrCsv
from zbc.commands.summary import PROVEN, outlives, ranges
from zbc.errors import ZbcError, raise_all
from zbc.text import short

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.compiler.check import Survival
    from zbc.compiler.sim.simulate import Transfers
    from zbc.ir import Op, Program
    from zbc.job.spec import Job
    from zbc.plan.directory import Manifest, StoredPlan
    from zbc.training.probing.checkup import Checkup


@dataclass(frozen=True, slots=True)
class Checked:
    """A program that passed every check, and its report."""

    program: Program
    survives: Survival
    as_json: dict[str, Any]
    transfers: Transfers | None  # None for slices of microbatches without a job
    files: int = 0  # verified; 0 for a job and a CSV
    priced: tuple[Job, float] | None = None  # its job, and the ms of a step with its optimizer
    step: tuple[str, ...] = ()  # for a CSV: the cost of its step if every op takes 1


def check(
    target: PlanJobOrCsv,
    strict: Annotated[
        bool, typer.Option("--strict", help="Also fail if the plan would deadlock with blocking sends.")
    ] = False,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Of a job: compare the gradients of its stages with plain autograd's.")
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="For a CSV that fails: print a working order of its actions.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.csv", help="Write the order of --fix to a file.")
    ] = None,
    *,
    changes: Changes,
    out: Out,
) -> None:
    """Prove a plan directory, a torch CSV or a job.

    Proves that the order is complete, paired and free of deadlock, and that a plan fits the memory its job allows. The
    plan of a job is not written.

    With --fix the exit code is still that of the file as it is. With --gradients two microbatches run on the CPU
    through the stages of the job's plan and through plain autograd; E510 if a gradient differs.
    """
    if gradients:
        return examine(target, changes, out)
    wanted = fix or output is not None
    if wanted and target.suffix != ".csv":
        raise typer.BadParameter("--fix works on torch CSV files; plans and jobs are made again with `zbc plan`")
    try:
        checked = proven(target, changes)
    except ZbcError as error:
        if wanted and error.code.startswith("E2"):
            show_order(target, output)
        raise
    if strict and not checked.survives.blocking_sends:
        raise not_strict(checked.program)

    def document() -> dict[str, Any]:
        if checked.priced is None:
            return checked.as_json
        from zbc.compiler.whatif.others import BASELINE, quick, speedup

        job, ms = checked.priced
        return {**checked.as_json, "speedup_over_1f1b": speedup(quick(job, BASELINE), ms)}  # 1F1B is planned for it

    out.answer(document, lambda: verdict(checked, target, verbose=out.verbose))


def is_plan(target: Path) -> bool:
    """Whether `target` is meant as a plan directory rather than as a job file or a CSV file."""
    named = target.suffix in (".toml", ".csv")
    return os.path.isdir(target) or target.name == "plan.json" or (not os.path.exists(target) and not named)


def folder_of(target: Path) -> Path:
    return target.parent if target.name == "plan.json" else target


def proven(target: Path, changes: Changes = NO_CHANGES) -> Checked:
    """Checks a CSV file, a plan directory or a job. Raises its problems."""
    from zbc.compiler.compile import compile_job
    from zbc.compiler.sim.simulate import either_transfer

    if target.suffix == ".csv" or is_plan(target):
        changes.refuse(target)
    if target.suffix == ".csv":
        return check_csv(target)
    if is_plan(target):
        return check_plan(target)
    compiled = compile_job(changes.job(target), budget=changes.budget)
    transfers, report = either_transfer(compiled.timeline.graph, compiled.costs), compiled.report
    document, priced = {**report.as_json(), **transfers._asdict()}, (compiled.job, compiled.settled_ms)
    return Checked(compiled.program, report.survives, document, transfers, priced=priced)


def check_csv(target: Path) -> Checked:
    """Checks the order of a torch CSV. Raises E4xx and E2xx, with rows and columns."""
    from zbc.api import Plan
    from zbc.compiler.check import survival
    from zbc.compiler.graph import build
    from zbc.compiler.sim.simulate import either_transfer
    from zbc.viz.words import step_costs
    from zbc.viz.words import verdict as words

    plan = Plan.read_csv(target)
    plan.check()
    program = plan.complete
    placement, timeline = program.placement, plan.timeline
    survives = survival(build(program))
    transfers = either_transfer(timeline.graph, plan.costs)
    report = {
        **_head(target.name, placement.ranks, placement.stages, program.microbatches),
        "ops": plan.program.size,
        "costs": "F = B = W = 1 per rank",
        **step_costs(timeline),
        **transfers._asdict(),
        **_proven(survives),
    }
    return Checked(program, survives, report, transfers, step=tuple(words(timeline).split("; ")))


def show_order(target: Path, output: Path | None) -> None:
    """Writes or prints a working order of the same actions, and its changes on stderr."""
    from zbc.api import Plan
    from zbc.interop import torch_csv
    from zbc.interop.repair import repair

    plan = Plan.read_csv(target)
    repaired = repair(plan.program, plan.costs)
    text = torch_csv.dumps(repaired.program)
    if output is None:
        show(text.rstrip("\n"))
    else:
        write_text(output, text)
    dropped = f", {len(repaired.dropped)} repeated ones dropped" if repaired.dropped else ""
    tell(
        f"suggested: {output or 'the order above'}, {repaired.moved} of {plan.program.size} actions moved{dropped}; "
        f"makespan {short(repaired.makespan)} at F = B = W = 1 per rank"
    )


def check_plan(target: Path) -> Checked:
    """Verifies and checks a plan directory. Raises all E4xx and E2xx found, together."""
    from zbc.compiler import recall
    from zbc.compiler.check import check_all, check_forward, survival
    from zbc.compiler.check.asked import check_asked
    from zbc.compiler.check.orders import order_problems
    from zbc.compiler.graph import build
    from zbc.compiler.partition.limits import limits_of
    from zbc.compiler.report.report import bound_is
    from zbc.compiler.sim.simulate import either_transfer
    from zbc.plan import directory as plan
    from zbc.plan.headline import headline, prediction, settled_ms
    from zbc.plan.reading import job_of

    folder = folder_of(target)
    manifest = plan.read_manifest(folder, verify=False)
    problems = list[ZbcError]()
    ranks: list[tuple[Op, ...]] = []
    with _noted(problems):
        plan.read_manifest(folder)
    for rank in range(manifest.ranks):
        with _noted(problems):
            ranks.append(plan.read_rank(folder, rank, manifest, verify=False).ops)
            plan.read_rank(folder, rank, manifest)
    if len(ranks) == manifest.ranks:
        plan.check_counts(manifest, tuple(ranks))
        program = plan.program_of(manifest, tuple(ranks))
        try:
            check_all(program)
            if evaluates(manifest):
                check_forward(program)
        except ZbcError as error:
            problems += error.errors
        else:
            if problems:
                last = problems[-1]
                last.details = (*last.details, "the ops are complete, paired and free of deadlock all the same")
    raise_all(problems)
    job = job_of(manifest)
    check_asked(manifest, program)
    graph = build(program)
    survives = survival(graph)
    below = [check_plan(folder) for folder, _ in plan.read_ramp(folder, manifest)]
    if manifest.balance is not None:
        raise_all([*order_problems([program, *(start.program for start in below)])])
    files = 1 + manifest.ranks + sum(start.files for start in below)
    for start in below:
        survives &= start.survives
    # Predicted when the plan was made; proven now.
    head = _head(manifest.schedule, manifest.ranks, manifest.stages, manifest.microbatches)
    costs = recall.costs_of(manifest) if manifest.slices == job.slices else None
    transfers = None if costs is None else either_transfer(graph, costs)
    limits, told = limits_of(job, manifest.schedule, costs), manifest.predicted
    extra: dict[str, Any] = {"limits": limits}
    extra |= {} if transfers is None else transfers._asdict()
    predicted = {**told, **headline(manifest)}
    with prediction():
        step, bound = told["makespan_ms"], told["lower_bound_makespan_ms"]
        units = limits.activation_units
        predicted["bound_is"] = bound_is(step, bound, units, manifest.ranks, manifest.stages)
    priced = job, settled_ms(manifest)
    return Checked(program, survives, {**head, **predicted, **extra, **_proven(survives)}, transfers, files, priced)


@contextmanager
def _noted(problems: list[ZbcError]) -> Iterator[None]:
    try:
        yield
    except ZbcError as error:
        problems.append(error)


def evaluates(manifest: Manifest) -> bool:
    train = manifest.training.get("train")
    return isinstance(train, dict) and bool(train.get("eval_every"))


def _head(schedule: str, ranks: int, stages: int, microbatches: int) -> dict[str, Any]:
    from zbc.compiler.report.report import FORMAT, VERSION

    counts = {"schedule": schedule, "ranks": ranks, "stages": stages, "microbatches": microbatches}
    return {"format": FORMAT, "version": VERSION, **counts}


def _proven(survives: Survival) -> dict[str, Any]:
    return {"deadlock_free": True, **survives.as_json(), "compile_seconds": None}


def not_strict(program: Program) -> ZbcError:
    """E207, with the cycle that blocking sends would cause."""
    from zbc.compiler.check.deadlock import deadlock_problems
    from zbc.compiler.graph import build

    error = next(deadlock_problems(build(program), blocking_sends=True))
    details = [f"{error.message}:", *error.details]
    hint = "fine on gloo, NCCL and in one process, where a send returns at once; drop --strict for these"
    return ZbcError("E207", "program: deadlocks where a send blocks until it is received", details=details, hint=hint)


def verdict(checked: Checked, target: Path, *, verbose: bool) -> Iterator[RenderableType]:
    from zbc.viz.words import title

    yield f"{title(checked.program)}, {checked.program.size} ops"
    yield ""
    short = [line.partition(":")[0] for line in PROVEN]
    yield labelled("proven", *(PROVEN if verbose else [", ".join(short)]))
    yield labelled("blocking", *outlives(checked.survives, verbose=True))
    if checked.transfers is not None:
        yield labelled("transfers", checked.transfers.text)
    if checked.files:
        yield labelled("files", f"all {checked.files} of {folder_of(target)} are as they were written")
    if checked.step:
        yield labelled("step", *checked.step, "at F = B = W = 1 ms per rank and microbatch")
    elif checked.transfers is not None:
        yield labelled("memory", "fits what [hardware] and [schedule] allow")


_SHOWN = 8  # parameters of an error


def examine(target: Path, changes: Changes, out: Out) -> None:
    """Plans the job, runs two microbatches both ways and prints the comparison. Raises E510 if gradients differ, E704
    if they are not finite."""
    from zbc.compiler.compile import compile_job
    from zbc.compiler.shapes import load_job
    from zbc.plan.directory import StoredPlan

    job = load_job(target, changes.settings or (), changes.schedule, changes.profile, counts=False)
    compiled = compile_job(job, budget=changes.budget or 0.0)
    manifest, _ = compiled.assemble()
    plan = StoredPlan(manifest, compiled.program)
    from zbc.training.probing.checkup import check_up  # slow: torch; after planning, which may fail

    checkup = check_up(plan)
    if not checkup.fine:
        raise _differs(checkup)
    overflowing = [parameter.name for parameter in checkup.parameters if not parameter.finite]
    if not math.isfinite(checkup.loss) and not overflowing:
        text = f"model: the loss is {checkup.loss:.9g}, by plain autograd as through the stages"
        raise ZbcError("E704", text, hint="look at the loss, and at data it is not defined for")
    if overflowing:
        text = f"model: the gradients of {len(overflowing)} of {len(checkup.parameters)} parameters are not finite,"
        text += " by plain autograd as through the stages"
        hint = "torch.autograd.set_detect_anomaly(True) in the factory names the operation they come from"
        raise ZbcError("E704", text, hint=hint, details=[f"loss {checkup.loss:.9g}", *_first(overflowing)])
    out.answer(checkup.as_json, lambda: _examined(compiled.schedule, plan, checkup))


def _examined(schedule: str, plan: StoredPlan, found: Checkup) -> Iterator[RenderableType]:
    manifest = plan.manifest
    layers = sum(map(len, manifest.layers))
    yield labelled("model", f"{layers} layers, {len(found.parameters)} parameters")
    ways: dict[str, list[int]] = {}
    for stage, way in enumerate(found.stages):
        ways.setdefault(way, []).append(stage)
    yield labelled("plan", f"{schedule}, {manifest.stages} stages", *(f"{ranges(s)}: {way}" for way, s in ways.items()))
    yield labelled("loss", f"{found.loss:.9g} through the stages, {found.plain_loss:.9g} in one piece")
    rest = sum(parameter.error != 0 for parameter in found.parameters)
    lines = [f"bit by bit the same for {len(found.parameters) - rest} of {len(found.parameters)} parameters"]
    if rest:
        worst = max(found.parameters, key=lambda parameter: parameter.error)
        lines.append(f"{rest} differ by rounding, {worst.name} most: {worst.error:.1e}")
    yield labelled("gradients", *lines, f"tolerance {found.tolerance:g} of the largest in each: all right")
    if found.unscaled:
        from zbc.training.probing.trials import unscaled

        yield labelled("warning", *unscaled(found.unscaled))


def _differs(found: Checkup) -> ZbcError:
    wrong = sorted(found.wrong, key=lambda row: -row.error)
    count = f"{len(wrong)} of {len(found.parameters)} parameters get"
    text = f"model: {count} another gradient than from plain autograd"
    if not wrong:
        text = f"model: the loss is {found.loss:.9g} through the stages, {found.plain_loss:.9g} in one piece"
    missing = "missing on one side, or finite on one side only"
    lines = [
        f"{row.name}: {missing if math.isinf(row.error) else f'off by {row.error:.1e} of its largest'}" for row in wrong
    ]
    hint = "a layer may keep state between forwards or look at where it runs: see docs/models.md"
    return ZbcError("E510", text, hint=hint, details=_first(lines))


def _first(lines: list[str]) -> list[str]:
    rest = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"and {rest} more"] if rest > 0 else [])]
