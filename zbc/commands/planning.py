"""`plan`, `check` and `compare`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zbc.commands.console import labelled, progress, show, show_json, write_text
from zbc.commands.console import refuse_unwritable as refuse_unwritable_file
from zbc.commands.options import (
    AsJson,
    Budget,
    JobFile,
    PlanJobOrCsv,
    ProfileFile,
    Quiet,
    ScheduleName,
    Settings,
    Verbose,
    complete_schedule,
)
from zbc.errors import ZbcError
from zbc.text import short

if TYPE_CHECKING:
    from zbc.compiler.compile import Compiled
    from zbc.job.spec import Job


def plan(
    job: JobFile,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The plan directory.")] = Path("plan"),
    schedule: ScheduleName = None,
    settings: Settings = None,
    profile: ProfileFile = None,
    budget: Budget = None,
    dump_ir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write the program as each compiler pass leaves it.")
    ] = None,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compile a job into a plan directory.

    All checks run before anything is written. The directory appears complete or not at all.
    """
    from zbc.commands import summary
    from zbc.compiler.compile import compile_job, load_job
    from zbc.plan.directory import refuse_unwritable
    from zbc.viz.words import title

    loaded = load_job(job, settings or (), schedule, profile)
    refuse_unwritable(output)  # before a search that may take long
    if dump_ir is not None:
        refuse_unwritable_file(dump_ir / "00.txt")
    compiled = compile_job(loaded, budget=budget)
    if dump_ir is not None:
        _dump(compiled, dump_ir)
    manifest = compiled.write(output)
    if json:
        starts = [{"steps": start.steps, **start.compiled.report.as_json()} for start in compiled.ramp]
        ramp = {"ramp": starts} if starts else {}
        show_json({**compiled.report.as_json(), **ramp, "plan": str(output), "plan_id": manifest.id})
    elif not quiet:
        show(f"{title(compiled.program)}, {compiled.report.ops} ops", "")
        show(*summary.of_plan(compiled, verbose=verbose))
        took = f"planned in {short(compiled.report.compile_seconds, 2)} s"
        show(labelled("plan", f"{output}: id {manifest.id}, {took}"))
        show(labelled("next", shlex.join(["zbc", "visualize", str(output)]), _run_command(loaded, output)))


def _run_command(job: Job, output: Path) -> str:
    if job.model.experts:
        return "this version plans and compares models with experts, it has no layers to run them"
    ranks, named = job.parallel.pp * job.parallel.dp, shlex.quote(str(output))
    if job.hardware.device == "cuda":
        return f"torchrun --standalone --nproc-per-node {ranks} -m zbc run {named}"
    return f"zbc run {named} --local {ranks}"


def _dump(compiled: Compiled, folder: Path) -> None:
    """One file per state of the program: `00-zb-v.txt`, `01-insert-comm.txt`, ..."""
    for number, (name, program) in enumerate(compiled.found.lowering.states(compiled.found.compute)):
        lines = []
        for rank, ops in enumerate(program.ranks):
            lines += [f"rank {rank}", *(f"  {program.placement.text(op)}" for op in ops)]
        safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
        write_text(folder / f"{number:02d}-{safe}.txt", "\n".join(lines) + "\n")


def check(
    target: PlanJobOrCsv,
    strict: Annotated[
        bool, typer.Option("--strict", help="Also fail if the plan would deadlock with blocking sends.")
    ] = False,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="For a CSV that fails: print a working order of its actions.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.csv", help="Write the order of --suggest to a file.")
    ] = None,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Prove a plan directory, a torch CSV or a job.

    Proves that the order is complete, paired and free of deadlock. The plan of a job is not written.

    With --suggest the exit code is still that of the file as it is.
    """
    from zbc.commands import checking

    suggest = suggest or output is not None
    if suggest and target.suffix != ".csv":
        raise typer.BadParameter("--suggest works on torch CSV files; plans and jobs are made again with `zbc plan`")
    try:
        checked = checking.checked(target)
    except ZbcError as error:
        if suggest and error.code.startswith("E2"):
            checking.suggest(target, output)
        raise
    if strict and not checked.survives_blocking_sends:
        raise checking.not_strict(checked.program)
    if json:
        show_json(checked.as_json)
    elif not quiet:
        show(*checking.verdict(checked, target, verbose=verbose))


def compare(
    job: JobFile,
    schedules: Annotated[
        str,
        typer.Option(
            metavar="all|A,B,C", help="Schedules, CSV files or plugins to compare.", autocompletion=complete_schedule
        ),
    ] = "all",
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2", help="Try each value; several sweeps try every combination."),
    ] = None,
    settings: Settings = None,
    profile: ProfileFile = None,
    budget: Budget = None,
    json: AsJson = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    md: Annotated[bool, typer.Option("--md", help="Print a Markdown table.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Plan a job under several schedules and rank them.

    The fastest comes first. What does not fit or cannot be planned stays in the table with the reason. If you sweep a
    number of [hardware], [costs] or [model], each value gets its own ranking, and the table says where the fastest
    schedule changes; with -v and --json where any two change places.
    """
    from zbc.commands import ranking
    from zbc.compiler.schedules import SCHEDULES
    from zbc.compiler.whatif.compare import Asked, combinations
    from zbc.compiler.whatif.compare import compare as rows_of
    from zbc.compiler.whatif.crossings import changed, crossings

    if json + csv + md > 1:
        raise typer.BadParameter("choose one of --json, --csv and --md")
    named = [name.strip() for name in schedules.split(",")]
    names = [one for name in named for one in (SCHEDULES if name == "all" else [name])]
    wanted = combinations(names, sweep or ())
    asked = Asked(job, tuple(settings or ()), profile, 0.0 if budget is None else budget)
    with progress("planning", len(wanted), quiet=quiet) as done:
        rows = rows_of(asked, wanted, done)
    if csv or md:
        show(ranking.as_csv(rows) if csv else ranking.as_markdown(rows))
    else:
        with progress("where the fastest changes", None, quiet=quiet):
            changes = crossings(asked, rows, every=verbose or json)
        if json:
            show_json(ranking.as_json(rows, changes))
        else:
            more = set() if verbose else changed(rows) - {one.pair for one in changes if one.leading}
            show(*ranking.as_table(rows, changes, more=len(more), verbose=verbose))
    if all(row.error is not None for row in rows):
        raise typer.Exit(min(row.error.exit_code for row in rows if row.error is not None))
