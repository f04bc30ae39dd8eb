"""`run`: train with a plan, or with the plan of a job, which is made just before.

That is below `runs`, named after the job file and the plan id: `runs/plans/zbc-691945da`. Under torchrun the first rank
of each machine plans, and the others wait for a file next to the plans that names the directory. Each machine plans for
itself; the run checks that their plans are the same.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbc.commands.checking import folder_of
from zbc.commands.console import show_json, tell
from zbc.commands.opening import Changes, is_job, say_if_compiling
from zbc.commands.options import Device, Out, listed
from zbc.commands.summary import crowd, crowded, throughput_lines
from zbc.errors import ZbcError
from zbc.host.closed_pipe import to_stdout
from zbc.host.folders import RUNS
from zbc.text import short

if TYPE_CHECKING:
    from zbc.compiler.compiled import Compiled
    from zbc.compiler.recorded.log import RunLog
    from zbc.job.spec import Job


_LOOK_S, _OLD_S = 0.1, 3600.0


@dataclass(frozen=True)
class Planned:
    """The directory of a job's plan; `compiled` on the rank that made it."""

    folder: Path
    compiled: Compiled | None = None


def planned(path: Path, changes: Changes) -> Planned:
    """The plan directory of the job at `path`. Raises E1xx, E3xx and E407."""
    env = os.environ
    waits = "RANK" in env and env.get("LOCAL_RANK", env["RANK"]) != "0"
    job = changes.job(path, sketch=waits)
    place = RUNS / "plans"
    if "RANK" not in env:
        return _made(path, job, changes, place)
    word = place / f".{path.stem}-{_launch()}"
    if waits:
        return Planned(_heard(word))
    made = _made(path, job, changes, place)
    _say(word, made.folder)
    return made


def _made(path: Path, job: Job, changes: Changes, place: Path) -> Planned:
    from zbc.compiler.compile import compile_job

    say_if_compiling(job, quiet=False)
    compiled = compile_job(job, budget=changes.budget)
    return Planned(keep(compiled, place, path.stem), compiled)


def keep(compiled: Compiled, place: Path, name: str) -> Path:
    """Writes a plan below `place`, named by `name` and its id, unless it exists already."""
    from zbc.plan import directory as plans

    manifest, files = compiled.assemble()
    folder = place / f"{name}-{manifest.id[:8]}"
    with suppress(ZbcError):
        if plans.is_plan(folder) and plans.read_manifest(folder).dumps() == manifest.dumps():
            return folder
    plans.write(folder, manifest, files)
    return folder


def _launch() -> str:
    """An id of this launch that the ranks of this machine share."""
    env = os.environ
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    parts = [socket.gethostname(), str(os.getppid()), *(env.get(name, "") for name in names)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _say(word: Path, folder: Path) -> None:
    """Tells the other ranks of this machine the plan's directory; removes the files of old launches."""
    for old in word.parent.glob(f"{word.name.rpartition('-')[0]}-*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > _OLD_S:
                old.unlink()
    fresh = word.with_name(f"{word.name}.new")
    try:
        fresh.write_text(folder.name, encoding="utf-8")
        os.replace(fresh, word)
    except OSError as error:
        raise ZbcError("E407", f"plan: cannot write {word}: {error.strerror or error}") from None


def _heard(word: Path) -> Path:
    """Waits for the first rank of this machine, returns the plan's directory. Raises E604 if the launcher has gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        with suppress(FileNotFoundError):
            return word.parent / word.read_text(encoding="utf-8")
        time.sleep(_LOOK_S)
    raise ZbcError("E604", "run: the launcher of this rank is gone", hint="start the run again with torchrun")


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
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="The run directory.")] = None,
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
    *,
    changes: Changes,
    out: Out,
) -> None:
    """Train with a plan, or plan a job and train with that.

    torchrun --standalone --nproc-per-node 4 -m zbc run PLAN
    """
    traced = frozenset(() if trace is None else (step - 1 for step in listed(trace, "--trace", least=1)))
    if is_job(plan):
        made = planned(plan, changes)
        folder = made.folder
        if made.compiled is not None:
            job = made.compiled.job
            if local is None and job.hardware.device != "cuda" and "RANK" not in os.environ:
                local = job.parallel.ranks
            if not out.silent:
                tell(_prediction(made.compiled, folder, verbose=out.verbose))
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
        out=output,
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
    ended = launch.run(options, (lambda text: None) if out.silent else to_stdout)
    trained = ended.folder if ended.trained else None
    if out.json and os.environ.get("RANK", "0") == "0":
        from zbc.compiler.recorded.report import FORMAT, VERSION

        document: dict[str, Any] = {"run": str(ended.folder)} if forward is None else {"forward": str(forward)}
        if trained is not None:
            document = {"format": FORMAT, "version": VERSION, **document, **read(trained).as_json()}
        show_json(document)
    elif trained is not None and local is not None and not out.silent:
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
    from zbc.viz.words import title

    lines = [f"{title(compiled.program)}; {short(compiled.settled_ms)} ms a step predicted, plan {folder}"]
    crowd = crowded(compiled)
    lines += [] if crowd is None else [crowd]
    lines += list(throughput_lines(compiled.report.rates)) if verbose else []
    return "\n".join(lines)
