"""`tune`: profiles a job, plans it, runs a few steps, plans with the measured times, and keeps the fastest plan."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbc.commands.console import labelled, show, show_json, table, tell
from zbc.commands.opening import Changes
from zbc.commands.options import AsJson, Budget, JobFile, ProfileFile, Quiet, ScheduleName, Settings, Verbose
from zbc.commands.planning import run_command
from zbc.commands.summary import throughput_lines
from zbc.commands.tuner import Tried, Tuner
from zbc.errors import EXIT_INTERRUPTED, ZbcError
from zbc.host.folders import RUNS
from zbc.text import aligned, short

if TYPE_CHECKING:
    from rich.console import RenderableType


def tune(
    job: JobFile,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The fastest plan.")] = Path(
        "plan-tuned"
    ),
    steps: Annotated[int, typer.Option(min=4, metavar="N", help="Steps of each plan.")] = 8,
    best: Annotated[int, typer.Option(min=1, metavar="N", help="Schedules to run beside the job's own.")] = 2,
    schedule: ScheduleName = None,
    settings: Settings = None,
    profile: ProfileFile = None,
    budget: Budget = None,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Find the fastest plan of a job by running the best few.

    Profiles the layers, plans, runs some steps of each plan, plans again with the measured times, and keeps the plan
    with the fastest steps. Ctrl-C keeps the best so far. Its trials stay in runs/tune-JOB-N.
    """
    from zbc.plan.directory import refuse_unwritable

    changes = Changes(settings, schedule, profile, budget)
    loaded = changes.job(job)
    refuse_unwritable(output)
    if "RANK" in os.environ:
        hint = "start it once, as `zbc tune JOB.toml`, on the machine with the devices"
        raise ZbcError("E604", "tune: inside of torchrun, which it starts itself", hint=hint)
    place = next(folder for n in count(1) if not (folder := RUNS / f"tune-{job.stem}-{n}").exists())
    tuner = Tuner(job, changes, place, steps, best, (lambda text: None) if quiet or json else tell)
    tuner.run()
    fastest = tuner.fastest
    assert fastest is not None
    manifest = fastest.compiled.write(output)
    if json:
        show_json({**_document(tuner, fastest), "plan": str(output), "plan_id": manifest.id})
    elif not quiet:
        show(*_told(tuner, fastest), "")
        show(labelled("plan", f"{output}: id {manifest.id}"), labelled("next", run_command(loaded, output)))
        if verbose:
            reports = (f"zbc report {shlex.quote(str(run))}" for plan in tuner.tried for run in plan.runs)
            show(labelled("more", *reports))
    if tuner.stopped:
        raise typer.Exit(EXIT_INTERRUPTED)


def _told(tuner: Tuner, fastest: Tried) -> Iterator[RenderableType]:
    first = tuner.tried[0]
    meant = aligned([plan.compiled.settled_ms for plan in tuner.tried])
    medians = [plan.measured for plan in tuner.tried if plan.measured is not None]
    measured = iter(aligned(medians))
    rows = []
    for plan, ms in zip(tuner.tried, meant, strict=True):
        shown = [f"{plan.error or 'not run'}", ""]
        if plan.measured is not None:
            factor = "" if first.measured is None else f"{first.measured / plan.measured:.2f}x"
            shown = [next(measured), factor]
        rows.append((plan.compiled.schedule, plan.source, ms, *shown, "<" if plan is fastest else ""))
    yield table(("schedule", "planned", "predicted ms", "measured ms", "vs first", ""), rows, left=2)
    yield ""
    if tuner.stopped:
        yield "stopped; this is the fastest so far"
    took = fastest.measured or 0.0
    rates = fastest.compiled.rates(took)
    yield labelled("fastest", f"{fastest.compiled.schedule}: {short(took)} ms a step", *throughput_lines(rates))


def _document(tuner: Tuner, fastest: Tried) -> dict[str, Any]:
    tried = [
        {
            "schedule": plan.compiled.schedule,
            "planned": plan.source,
            "predicted_ms": round(plan.compiled.settled_ms, 9),
            "measured_ms": plan.measured,
            "runs": [str(run) for run in plan.runs],
            "error": plan.error,
        }
        for plan in tuner.tried
    ]
    rates = fastest.compiled.rates(fastest.measured or 0.0)._asdict()
    head = {"format": "zbc-tuning", "version": 1, "stopped": tuner.stopped, "schedule": fastest.compiled.schedule}
    return {**head, "measured_ms": fastest.measured, **rates, "tried": tried}
