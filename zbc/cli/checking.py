"""What `check` does with a plan directory: go on past an edited file, to say what is wrong with its ops as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbc.cli.console import labelled
from zbc.cli.summary import PROVEN
from zbc.errors import ZbcError, raise_all

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.ir import Op, Program
    from zbc.plan import Manifest

_EDITED = "E402"


@dataclass(frozen=True, slots=True)
class Checked:
    """A program that passed every check, and its report."""

    program: Program
    survives_blocking_sends: bool
    as_json: dict[str, Any]
    files: int = 0  # verified; 0 for a job


def is_plan(target: Path) -> bool:
    """Whether `target` is meant as a plan directory rather than as a job file."""
    return target.is_dir() or target.name == "plan.json" or (not target.exists() and target.suffix != ".toml")


def folder_of(target: Path) -> Path:
    return target.parent if target.name == "plan.json" else target


def check_job(target: Path) -> Checked:
    """Compile and check a job. Raises what is wrong with it."""
    from zbc.compiler.compile import compile_job, load_job

    if target.suffix == ".csv":
        text = f"check: {target}: torch pipelining CSV files are not read by this version of zbc"
        raise ZbcError("E107", text, hint="check a plan directory or a job file")
    compiled = compile_job(load_job(target))
    return Checked(compiled.program, compiled.report.survives_blocking_sends, compiled.report.as_json())


def check_plan(target: Path) -> Checked:
    """Verify and check a plan directory. Raises E4xx and E2xx, all that are found together."""
    from zbc import plan
    from zbc.compiler.check import check_all, survives_blocking_sends

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
        program = plan.program_of(manifest, tuple(ranks))
        try:
            check_all(program)
        except ZbcError as error:
            problems += error.errors
        else:
            if problems:
                last = problems[-1]
                last.details = (*last.details, "the ops are complete, paired and free of deadlock all the same")
    raise_all(problems)
    survives = survives_blocking_sends(program)
    return Checked(program, survives, _report(manifest, survives), files=1 + manifest.ranks)


def _edited_manifest(folder: Path) -> Iterator[ZbcError]:
    from zbc import plan

    try:
        plan.read_manifest(folder)
    except ZbcError as error:
        yield error


def _report(manifest: Manifest, survives: bool) -> dict[str, Any]:
    """The report of a plan on disk: what was predicted when it was made, and what was proven now."""
    from zbc.compiler.report import FORMAT, VERSION

    counts = {key: getattr(manifest, key) for key in ("schedule", "ranks", "stages", "microbatches")}
    proven = {"deadlock_free": True, "survives_blocking_sends": survives, "compile_seconds": None}
    return {"format": FORMAT, "version": VERSION, **counts, **manifest.predicted, **proven}


def not_strict(program: Program) -> ZbcError:
    """E207, with the circle that blocking sends would make."""
    from zbc.compiler.check.deadlock import check_deadlock

    try:
        check_deadlock(program, blocking_sends=True)
    except ZbcError as error:
        details = [f"{error.errors[0].message}:", *error.errors[0].details]
    hint = "fine on gloo, NCCL and in one process, where a send returns at once; drop --strict for these"
    return ZbcError("E207", "program: deadlocks where a send blocks until it is received", details=details, hint=hint)


def verdict(checked: Checked, target: Path, *, verbose: bool) -> Iterator[RenderableType]:
    """What was proven."""
    from zbc.viz.terminal import title

    yield f"{title(checked.program)}, {checked.program.size} ops"
    yield ""
    short = [line.partition(":")[0] for line in PROVEN]
    yield labelled("proven", *(PROVEN if verbose else [", ".join(short)]))
    yield labelled("blocking", f"survives blocking sends: {'yes' if checked.survives_blocking_sends else 'no'}")
    if checked.files:
        yield labelled("files", f"all {checked.files} of {folder_of(target)} are as they were written")
    else:
        yield labelled("memory", "fits what [hardware] and [schedule] allow")
