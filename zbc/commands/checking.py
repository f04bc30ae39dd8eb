"""What `check` does with a plan directory: go on past an edited file, to say what is wrong with its ops as well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbc.commands.console import labelled, show, tell, write_text
from zbc.commands.summary import PROVEN
from zbc.errors import ZbcError, raise_all
from zbc.text import short

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.ir import Op, Program
    from zbc.plan.directory import Manifest

_EDITED = "E402"


@dataclass(frozen=True, slots=True)
class Checked:
    """A program that passed every check, and its report."""

    program: Program
    survives_blocking_sends: bool
    as_json: dict[str, Any]
    files: int = 0  # verified; 0 for a job and a CSV
    step: tuple[str, ...] = ()  # of a CSV: what its step costs where every op takes 1


def is_plan(target: Path) -> bool:
    """Whether `target` is meant as a plan directory rather than as a job file or a CSV file."""
    named = target.suffix in (".toml", ".csv")
    return os.path.isdir(target) or target.name == "plan.json" or (not os.path.exists(target) and not named)


def folder_of(target: Path) -> Path:
    return target.parent if target.name == "plan.json" else target


def check_job(target: Path) -> Checked:
    """Compile and check a job. Raises what is wrong with it."""
    from zbc.compiler.compile import compile_job, load_job

    compiled = compile_job(load_job(target))
    return Checked(compiled.program, compiled.report.survives_blocking_sends, compiled.report.as_json())


def check_csv(target: Path) -> Checked:
    """Check the order of a torch CSV. Raises E4xx and E2xx, with rows and columns."""
    from zbc.api import Plan
    from zbc.compiler.check import survives_blocking_sends
    from zbc.viz.words import verdict as step_costs

    plan = Plan.read_csv(target)
    plan.check()
    program = plan.complete
    survives = survives_blocking_sends(program)
    placement, timeline = program.placement, plan.timeline
    report = {
        **_head(target.name, placement.ranks, placement.stages, program.microbatches),
        "ops": plan.program.size,
        "costs": "F = B = W = 1 per rank",
        "makespan_ms": round(timeline.makespan, 9),
        "span_ms": round(timeline.span, 9),
        "bubble_rate_makespan": round(timeline.bubble_rate_makespan, 9),
        "bubble_rate_span": round(timeline.bubble_rate_span, 9),
        **_proven(survives),
    }
    return Checked(program, survives, report, step=tuple(step_costs(timeline).split("; ")))


def suggest(target: Path, output: Path | None) -> None:
    """Write, or print, an order of the same actions that works, and say on stderr what it changes."""
    from zbc.api import Plan
    from zbc.interop import torch_csv
    from zbc.interop.repair import repair

    plan = Plan.read_csv(target)
    found = repair(plan.program, plan.costs)
    text = torch_csv.dumps(found.program)
    if output is None:
        show(text.rstrip("\n"))
    else:
        write_text(output, text)
    dropped = f", {len(found.dropped)} repeated ones dropped" if found.dropped else ""
    tell(
        f"suggested: {output or 'the order above'}, {found.moved} of {plan.program.size} actions moved{dropped}; "
        f"makespan {short(found.makespan)} at F = B = W = 1 per rank"
    )


def check_plan(target: Path) -> Checked:
    """Verify and check a plan directory. Raises E4xx and E2xx, all that are found together."""
    from zbc.compiler.check import check_all, survives_blocking_sends
    from zbc.compiler.check.forward import check_forward
    from zbc.plan import directory as plan
    from zbc.plan.forward import forward_only

    folder = folder_of(target)
    manifest = plan.read_manifest(folder, verify=False)
    problems = [*_edited_manifest(folder)]
    ranks: list[tuple[Op, ...]] = []
    for rank in range(manifest.ranks):
        try:
            ranks.append(plan.read_rank(folder, rank, manifest, verify=False).ops)
            plan.read_rank(folder, rank, manifest)
        except ZbcError as error:
            problems.append(error)
    if len(ranks) == manifest.ranks:
        plan.check_counts(manifest, tuple(ranks))
        program = plan.program_of(manifest, tuple(ranks))
        try:
            check_all(program)
            if evaluates(manifest):
                check_forward(forward_only(program.placement, program.microbatches))
        except ZbcError as error:
            problems += error.errors
        else:
            if problems:
                last = problems[-1]
                last.details = (*last.details, "the ops are complete, paired and free of deadlock all the same")
    raise_all(problems)
    survives = survives_blocking_sends(program)
    below = [check_plan(folder) for folder, _ in plan.read_ramp(folder, manifest)]
    files = 1 + manifest.ranks + sum(one.files for one in below)
    survives = survives and all(one.survives_blocking_sends for one in below)
    return Checked(program, survives, _report(manifest, survives), files=files)


def evaluates(manifest: Manifest) -> bool:
    train = manifest.training.get("train")
    return isinstance(train, dict) and bool(train.get("eval_every"))


def _edited_manifest(folder: Path) -> Iterator[ZbcError]:
    from zbc.plan import directory as plan

    try:
        plan.read_manifest(folder)
    except ZbcError as error:
        yield error


def _report(manifest: Manifest, survives: bool) -> dict[str, Any]:
    """The report of a plan on disk: what was predicted when it was made, and what was proven now."""
    from zbc.compiler.partition.limits import limits_of
    from zbc.compiler.recall import job_of

    head = _head(manifest.schedule, manifest.ranks, manifest.stages, manifest.microbatches)
    limits = asdict(limits_of(job_of(manifest), manifest.schedule))
    return {**head, **manifest.predicted, "limits": limits, **_proven(survives)}


def _head(schedule: str, ranks: int, stages: int, microbatches: int) -> dict[str, Any]:
    from zbc.compiler.report.report import FORMAT, VERSION

    counts = {"schedule": schedule, "ranks": ranks, "stages": stages, "microbatches": microbatches}
    return {"format": FORMAT, "version": VERSION, **counts}


def _proven(survives: bool) -> dict[str, Any]:
    return {"deadlock_free": True, "survives_blocking_sends": survives, "compile_seconds": None}


def not_strict(program: Program) -> ZbcError:
    """E207, with the cycle that blocking sends would make."""
    from zbc.compiler.check.deadlock import check_deadlock

    try:
        check_deadlock(program, blocking_sends=True)
    except ZbcError as error:
        details = [f"{error.errors[0].message}:", *error.errors[0].details]
    hint = "fine on gloo, NCCL and in one process, where a send returns at once; drop --strict for these"
    return ZbcError("E207", "program: deadlocks where a send blocks until it is received", details=details, hint=hint)


def verdict(checked: Checked, target: Path, *, verbose: bool) -> Iterator[RenderableType]:
    """What was proven."""
    from zbc.viz.words import title

    yield f"{title(checked.program)}, {checked.program.size} ops"
    yield ""
    short = [line.partition(":")[0] for line in PROVEN]
    yield labelled("proven", *(PROVEN if verbose else [", ".join(short)]))
    yield labelled("blocking", f"survives blocking sends: {'yes' if checked.survives_blocking_sends else 'no'}")
    if checked.files:
        yield labelled("files", f"all {checked.files} of {folder_of(target)} are as they were written")
    elif checked.step:
        yield labelled("step", *checked.step, "at F = B = W = 1 ms per rank and microbatch")
    else:
        yield labelled("memory", "fits what [hardware] and [schedule] allow")
