"""`export` and `import`: plans in the forms of other tools."""

from __future__ import annotations

import json as jsonlib
import os
import re
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zbc.commands.console import labelled, refuse_unwritable, show, show_json, tell, write_text
from zbc.commands.opening import Changes, opened_plan
from zbc.commands.options import AsJson, Budget, PlanJobOrCsv, ProfileFile, Quiet, ScheduleName, Settings, Verbose

if TYPE_CHECKING:
    from zbc.api import Plan


class Target(StrEnum):
    """The forms a plan can be exported to: the keys of zbc.api.EXPORTS."""

    TORCH_CSV = "torch-csv"
    TORCHTITAN = "torchtitan"
    MEGATRON = "megatron"
    JSON = "json"
    DOT = "dot"
    GRAPHML = "graphml"
    PERFETTO = "perfetto"


class Dialect(StrEnum):
    """The forms of a torch CSV, and the versions of torchtitan: the values of zbc.api.DIALECTS."""

    COMPUTE_ONLY = "compute_only"
    COMPUTE_COMMS = "compute_comms"
    COMPUTE_COMMS_2_15 = "compute_comms-2.15"
    TORCHTITAN_0_2 = "0.2"
    TORCHTITAN_0_3 = "0.3"


def export(
    target: PlanJobOrCsv,
    to: Annotated[Target, typer.Option("--to", help="The format to write.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a file instead of printing.")
    ] = None,
    dialect: Annotated[
        Dialect | None,
        typer.Option(
            "--dialect",
            help="For torch-csv: compute ops only, or with transfers (up to torch 2.14, or since). "
            "For torchtitan: its version.",
            show_default="compute_only; 0.2",
        ),
    ] = None,
    schedule: ScheduleName = None,
    settings: Settings = None,
    profile: ProfileFile = None,
    budget: Budget = None,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Export a plan to another tool's format.

    Plans that the tool cannot express are refused. torchtitan also needs a CSV file; -o writes it next to the settings,
    which name it by its absolute path.
    """
    if output is not None:
        refuse_unwritable(output)
    csv_name = "order.csv" if output is None else str(output.with_suffix(".csv"))
    files = opened_plan(target, Changes(settings, schedule, profile, budget)).export(
        to.value, csv_name=csv_name, dialect=None if dialect is None else dialect.value
    )
    main, *extra = files
    if json and output is None:
        show_json({"format": "zbc-export", "version": 1, "to": to.value, "texts": files})
        return
    if output is None:
        show(files[main].rstrip("\n"))
        if extra:
            tell(f"not printed: {csv_name}, which this names; -o FILE writes both")
        return
    if main == ".py" and output.suffix != main:
        raise typer.BadParameter(f"this is Python, to be imported: choose {output.with_suffix(main)}", param_hint="-o")
    written: list[str] = []
    for suffix in files:
        path = output if suffix == main else output.with_suffix(suffix)
        if suffix != main and path == output:
            raise typer.BadParameter(f"{output} ends like the file beside it; choose FILE{main}", param_hint="-o")
        write_text(path, files[suffix])
        written.append(str(path))
        if not quiet and not json:
            tell(f"wrote {path}")
    if json:
        show_json({"format": "zbc-export", "version": 1, "to": to.value, "files": written})


def import_order(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.csv|CLASS", help="A torch pipelining CSV, compute_only, or a schedule class of torch."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="JOB.toml", help="The job file to write.")] = Path(
        "zbc.toml"
    ),
    base: Annotated[
        Path | None, typer.Option("--job", metavar="JOB.toml", help="Take model, costs and training from this job.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="P", min=1, max=1024, help="For a class: pipeline ranks.")
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option("--microbatches", metavar="M", min=1, max=65536, help="For a class: microbatches per step."),
    ] = None,
    chunks: Annotated[
        int,
        typer.Option("--chunks", metavar="V", min=1, max=64, help="For a class that takes several: stages per rank."),
    ] = 2,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Read a torch CSV or class and write a job that uses its order.

    The order is read strictly and proven. The order of a class is written as CSV next to the job.
    """
    from zbc.api import Plan
    from zbc.errors import ZbcError
    from zbc.viz.words import step_costs, title, verdict

    if os.path.exists(output):
        raise ZbcError("E111", f"import: {output} exists", hint="choose another file with -o")
    made = None
    if source.suffix != ".csv":
        source = made = _of_class(str(source), output.with_suffix(".csv"), ranks, microbatches, chunks)
    elif ranks or microbatches:
        raise typer.BadParameter(f"{source} has its own numbers", param_hint="--ranks, --microbatches")
    try:
        plan = Plan.read_csv(source)
        plan.check()
        write_text(output, _job_text(plan, source, output, base))
    except BaseException:
        if made is not None:
            made.unlink(missing_ok=True)
        raise
    if json:
        show_json({"format": "zbc-import", "version": 1, "job": str(output), **step_costs(plan.timeline)})
    elif not quiet:
        show(title(plan.program), "", labelled("step", *verdict(plan.timeline, bubbles=verbose).split("; ")))
        show(labelled("", "at F = B = W = 1 ms per rank and microbatch"))
        order, job = shlex.quote(str(source)), shlex.quote(str(output))
        show(f"wrote {output}", "", labelled("next", f"zbc plan {job}", f"zbc visualize {order}"))


def _of_class(name: str, path: Path, ranks: int | None, microbatches: int | None, chunks: int) -> Path:
    """Writes the order of a torch schedule class as CSV. Raises E111 if the file exists."""
    from zbc.errors import ZbcError

    if not re.fullmatch(r"Schedule\w+", name):
        text = f"{name} does not end in .csv, by which jobs know an order, and is no schedule class of torch"
        raise typer.BadParameter(text, param_hint="FILE.csv|CLASS")
    from zbc import pipelining  # loads torch

    if name not in pipelining.NAMES:
        text = f"{name} is not one of {', '.join(pipelining.NAMES)}"
        raise typer.BadParameter(text, param_hint="FILE.csv|CLASS")
    if ranks is None or microbatches is None:
        raise typer.BadParameter(f"{name} needs both", param_hint="--ranks, --microbatches")
    if os.path.exists(path):
        raise ZbcError("E111", f"import: {path} exists", hint="choose another name for the job with -o")
    try:
        text = pipelining.own_order(name, ranks, microbatches, chunks)
    except ValueError as error:
        numbers = f"{ranks} ranks and {microbatches} microbatches"
        raise typer.BadParameter(f"torch builds no {name} for {numbers}: {error}", param_hint=name) from None
    write_text(path, text)
    return path


def _job_text(plan: Plan, source: Path, output: Path, base: Path | None) -> str:
    """The tiny template, or all values of `base`, with this order in place of the schedule."""
    from zbc.commands.jobs import Template, listing, template_text
    from zbc.compiler.compile import load_job

    placement, m = plan.program.placement, plan.program.microbatches
    csv = os.path.relpath(source, output.parent)
    if base is not None:
        settings = [f"parallel.pp={placement.ranks}", f"schedule.microbatches={m}"]
        return "\n".join(listing(load_job(base, settings, csv))) + "\n"
    text = template_text(Template.TINY)
    layers = max(4, placement.stages)
    for key, value in (("layers", layers), ("pp", placement.ranks), ("microbatches", m)):
        text = re.sub(rf"(?m)^{key} = \d+", f"{key} = {value}", text)
    return re.sub(r'(?m)^kind = "zb-v".*$', lambda _: f"file = {jsonlib.dumps(csv)}", text)
