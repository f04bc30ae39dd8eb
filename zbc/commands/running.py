"""`run`: train with a plan, or with the plan of a job."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbc.commands.checking import folder_of
from zbc.commands.console import show_json, tell
from zbc.commands.opening import Changes, is_job
from zbc.commands.options import AsJson, Budget, Device, ProfileFile, Quiet, ScheduleName, Settings, Verbose, listed
from zbc.commands.planned import planned
from zbc.commands.summary import crowd, crowded, throughput_lines
from zbc.errors import ZbcError
from zbc.host.closed_pipe import to_stdout
from zbc.text import short

if TYPE_CHECKING:
    from zbc.compiler.compiled import Compiled
    from zbc.compiler.recorded.log import RunLog


def run(
    plan: Annotated[Path, typer.Argument(metavar="PLAN|JOB.toml", help="A plan directory, or a job to plan first.")],
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Train for N steps.")] = None,
    local: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Run N ranks on this machine, without torchrun.")
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="With --local: compute here; default: hardware.device of the plan.")
    ] = None,
    threads: Annotated[
        bool, typer.Option("--threads", help="With --local: ranks are threads of one process, on one device.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="The run directory.")] = None,
    save_hf: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the final weights as a Hugging Face folder.")
    ] = None,
    save_adapter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the final adapters as a folder that peft loads.")
    ] = None,
    save_raw: Annotated[
        bool, typer.Option("--save-raw", help="With optimizer.ema: save the weights themselves, not their averages.")
    ] = False,
    forward: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Train nothing: write the log-probabilities of the data's targets, or outputs, as safetensors.",
        ),
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="10-19", help="Record these steps, for `zbc report` and `zbc visualize`.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|PATH|none",
            help="Continue from the newest checkpoint, or from PATH; default: only after a restart.",
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="With --local: restart all ranks when one fails, at most N times.")
    ] = 0,
    schedule: ScheduleName = None,
    settings: Settings = None,
    profile: ProfileFile = None,
    budget: Budget = None,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train with a plan, or plan a job and train with that.

    torchrun --standalone --nproc-per-node 4 -m zbc run PLAN
    """
    traced = frozenset(() if trace is None else (step - 1 for step in listed(trace, "--trace", least=1)))
    changes = Changes(settings, schedule, profile, budget)
    if is_job(plan):
        made = planned(plan, changes)
        folder = made.folder
        if made.compiled is not None:
            job = made.compiled.job
            if local is None and job.hardware.device != "cuda" and "RANK" not in os.environ:
                local = job.parallel.ranks
            if not quiet and not json:
                tell(_prediction(made.compiled, folder, verbose=verbose))
    else:
        changes.refuse(plan)
        folder = folder_of(plan)
    if os.path.isfile(folder):
        hint = "first: zbc plan JOB.toml   then: zbc run plan; or: zbc run JOB.toml"
        raise ZbcError("E401", f"run: {folder} is a file, not a plan directory", hint=hint)
    if local is not None:  # all ranks are here: verify every file before any process starts
        from zbc.plan.directory import StoredPlan

        StoredPlan.read(folder)
    from zbc.compiler.recorded.log import read
    from zbc.training.launch import launch
    from zbc.training.launch.launch import RunOptions

    options = RunOptions(
        folder,
        steps=steps,
        out=out,
        save_hf=save_hf,
        save_adapter=save_adapter,
        save_raw=save_raw,
        forward=forward,
        resume=resume,
        trace=traced,
        local=local,
        device=None if device is None else device.value,
        threads=threads,
        max_restarts=max_restarts,
    )
    ended = launch.run(options, (lambda text: None) if quiet or json else to_stdout)
    trained = ended.folder if ended.trained else None
    if json and os.environ.get("RANK", "0") == "0":
        from zbc.compiler.recorded.report import FORMAT, VERSION

        document: dict[str, Any] = {"run": str(ended.folder)} if forward is None else {"forward": str(forward)}
        if trained is not None:
            document = {"format": FORMAT, "version": VERSION, **document, **read(trained).as_json()}
        show_json(document)
    elif trained is not None and local is not None and not quiet and not json:
        for line in _ending(read(trained), plan if is_job(plan) else None):
            to_stdout(line)


def _ending(found: RunLog, job: Path | None) -> Iterator[str]:
    """Measured and predicted step time, likely causes of a difference, and the next commands."""
    from zbc.trace.recording import has_trace

    step, about, folder = found.step(), found.about, shlex.quote(str(found.folder))
    predicted = "" if step.predicted is None else f", {short(step.predicted)} predicted"
    yield ""
    yield f"measured   {short(step.measured)} ms a step, median of {len(found.counted)}{predicted}"
    estimated = about.get("predicted", {}).get("costs") == "estimated"
    if estimated and about.get("device") == "cpu" and step.predicted is not None:
        busy = [rank["busy_ms"] for rank in about["predicted"]["per_rank"]]
        crowded = crowd(len(about.get("processes", busy)), busy, step.predicted)
        yield f"why        {crowded or 'op times were estimated, not measured on this machine'}"
    if estimated:
        yield f"next       zbc profile {shlex.quote(str(job or 'JOB.toml'))}   measures ops here, to plan with"
    recorded = "" if has_trace(found.folder) else "; with --trace 3-6 it says where time goes"
    yield f"{'' if estimated else 'next':11}zbc report {folder}{recorded}"


def _prediction(compiled: Compiled, folder: Path, *, verbose: bool) -> str:
    """The plan and its predicted step time, for people."""
    from zbc.viz.words import title

    lines = [f"{title(compiled.program)}; {short(compiled.settled_ms)} ms a step predicted, plan {folder}"]
    crowd = crowded(compiled)
    lines += [] if crowd is None else [crowd]
    lines += list(throughput_lines(compiled.report.rates)) if verbose else []
    return "\n".join(lines)
