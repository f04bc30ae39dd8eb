"""`tune`: profiles a job, plans it, runs a few steps, plans with the measured times, and keeps the fastest plan.

Runs are separate commands, as a user would start them, so a failing plan ends only its run.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbc.commands.console import labelled, table, tell
from zbc.commands.opening import Changes
from zbc.commands.options import JobFile, Out
from zbc.commands.planning import run_command
from zbc.commands.running import keep
from zbc.commands.summary import throughput_lines
from zbc.errors import EXIT_INTERRUPTED, ZbcError
from zbc.host.folders import RUNS
from zbc.text import aligned, short

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.compiler.compiled import Compiled
    from zbc.job.spec import Job


SETTLING = 2  # warm-up steps of a run, which do not count
_ROUNDS = 6  # of the profile
_PATIENCE_S = 60.0  # for a run that was told to stop
_CLOSE = 0.1  # plans that are slower than the fastest by more are not run a second time


@dataclass
class Tried:
    """A plan, its origin, and the measured ms of its steps."""

    source: str
    compiled: Compiled
    folder: Path
    steps: list[float] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)
    error: str | None = None

    @property
    def measured(self) -> float | None:
        """The median step in ms; None if no run was completed."""
        return median(self.steps) if self.steps else None


@dataclass
class Tuner:
    """A tuning in progress; its results are in `tried`, in the order of the runs."""

    path: Path  # of the job
    changes: Changes
    place: Path
    steps: int
    best: int
    say: Callable[[str], None]
    tried: list[Tried] = field(default_factory=list)
    stopped: bool = False

    def run(self) -> None:
        """Fills `tried`. Raises the errors of the job; Ctrl-C ends it early, once a plan has been measured."""
        try:
            self._run()
        except KeyboardInterrupt:
            if self.fastest is None:
                raise
            self.stopped = True

    @property
    def fastest(self) -> Tried | None:
        """The plan with the shortest median step; the first of equals."""
        measured = [trial for trial in self.tried if trial.measured is not None]
        return min(measured, key=lambda trial: trial.measured or 0.0, default=None)

    def _run(self) -> None:
        profile = self.changes.profile or self._profile()
        job = self.changes._replace(profile=profile).job(self.path)
        for source, compiled in self._candidates(job, profile):
            self._try(source, compiled)
        if self.fastest is None:
            errors = [f"{plan.compiled.schedule}: {plan.error}" for plan in self.tried if plan.error is not None]
            raise ZbcError("E703", "tune: no plan of this job ran to its end", details=errors)
        for source, compiled in self._again(self.fastest):
            self._try(source, compiled)
        self._once_more()

    def _profile(self) -> Path:
        """Measures the layers, as `zbc profile` does; returns the file."""
        made = self.place / "profile.json"
        self.say("profiling the layers")
        options = ["--rounds", str(_ROUNDS), "-o", str(made), "-q"]
        options += [word for setting in self.changes.settings or () for word in ("--set", setting)]
        self._command("profile", str(self.path), *options)
        return made

    def _candidates(self, job: Job, profile: Path) -> Iterator[tuple[str, Compiled]]:
        """The job's own schedule, then the fastest others by the fast search, each compiled as by `zbc plan`."""
        from zbc.compiler.compile import compile_job
        from zbc.compiler.schedules import SCHEDULES
        from zbc.compiler.whatif.compare import Asked, combinations, compare

        own = compile_job(job, budget=self.changes.budget)
        yield "the job's own", own
        self.say("comparing schedules")
        asked = Asked(self.path, tuple(self.changes.settings or ()), profile, 0.0)
        rows = compare(asked, combinations([*SCHEDULES], ()))
        names = [row.schedule for row in rows if row.report is not None and row.schedule != own.schedule]
        for name in names[: self.best]:
            changed = self.changes._replace(profile=profile, schedule=name).job(self.path)
            with contextlib.suppress(ZbcError):
                yield "by the profile", compile_job(changed, suggest=False, budget=self.changes.budget)

    def _again(self, first: Tried) -> Iterator[tuple[str, Compiled]]:
        """The tried schedules, planned again with the measured times of the fastest."""
        from zbc.compiler.compile import compile_job
        from zbc.compiler.recorded.derive import derive
        from zbc.trace import recording

        if not recording.has_trace(first.runs[0]):
            return
        self.say("planning with measured steps")
        base = first.compiled.job.profile
        profile = derive(recording.read(first.runs[0]), base).profile
        ranked = sorted((trial for trial in self.tried if trial.steps), key=lambda trial: trial.measured or 0.0)
        for trial in ranked[: max(2, self.best)]:
            job = replace(trial.compiled.job, profile=profile)
            with contextlib.suppress(ZbcError):
                yield "by its steps", compile_job(job, suggest=False, budget=self.changes.budget)

    def _once_more(self) -> None:
        """Runs the first plan and those close to the fastest again, so that a busy moment decides nothing."""
        best, first = self.fastest, self.tried[0]
        if best is None or best.measured is None or len(self.tried) == 1:
            return
        limit = best.measured * (1 + _CLOSE)
        for plan in self.tried:
            if plan.measured is not None and (plan is first or plan.measured <= limit):
                self._measure(plan)

    def _try(self, source: str, compiled: Compiled) -> None:
        """Runs a plan, unless one with the same work was run."""
        from zbc.compiler.recorded.replan import same_work

        if any(same_work(compiled, tried.compiled) for tried in self.tried):
            return
        job = compiled.job  # to be tried without checkpoints and other logs than its own
        checkpoint, log = job.checkpoint.model_copy(update={"every": 0}), job.log.model_copy(update={"to": []})
        trial = replace(compiled, job=replace(job, checkpoint=checkpoint, log=log))
        tried = Tried(source, compiled, keep(trial, self.place / "plans", compiled.schedule))
        self.tried.append(tried)
        self._measure(tried)

    def _measure(self, one: Tried) -> None:
        """Runs some steps of a plan and stores their times."""
        from zbc.compiler.recorded import log

        out = self.place / "runs" / f"{one.folder.name}-{len(one.runs) + 1}"
        self.say(f"running {self.steps} steps of {one.compiled.schedule}, {one.source}")
        traced = f"{SETTLING + 1}-{max(SETTLING + 1, self.steps - 2)}"
        try:
            self._launch(one, ["--steps", str(self.steps), "--trace", traced, "-o", str(out)])
        except ZbcError as error:
            one.error = error.message
            return
        one.runs.append(out)
        one.steps += [row["step_ms"] for row in log.read(out).steps if row["step"] > SETTLING]

    def _launch(self, one: Tried, options: Sequence[str]) -> None:
        job = one.compiled.job
        world = job.parallel.ranks
        if job.hardware.device == "cuda":
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
            self._command("run", str(one.folder), *options, before=torchrun)
        else:
            self._command("run", str(one.folder), "--local", str(world), *options)

    def _command(self, *words: str, before: Sequence[str] = ()) -> None:
        """Runs a command of zbc. Raises E703 with the end of its output if it fails."""
        command = [sys.executable, "-P", *before, "-m", "zbc", *words]  # -P: nothing of the current folder is imported
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
            try:
                output, _ = child.communicate()
            except KeyboardInterrupt:
                _end(child)
                raise
        if child.returncode == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if child.returncode:
            text = f"tune: `zbc {words[0]} {words[1]}` ended with code {child.returncode}"
            raise ZbcError("E703", text, details=output.strip().splitlines()[-12:])


def _end(child: subprocess.Popen[str]) -> None:
    """Waits for a command that was told to stop, and kills it if it does not."""
    try:
        child.communicate(timeout=_PATIENCE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()


def tune(
    job: JobFile,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The fastest plan.")] = Path(
        "plan-tuned"
    ),
    steps: Annotated[int, typer.Option(min=4, metavar="N", help="Steps of each plan.")] = 8,
    best: Annotated[int, typer.Option(min=1, metavar="N", help="Schedules to run beside the job's own.")] = 2,
    *,
    changes: Changes,
    out: Out,
) -> None:
    """Find the fastest plan of a job by running the best few.

    Profiles the layers, plans, runs some steps of each plan, plans again with the measured times, and keeps the plan
    with the fastest steps. Ctrl-C keeps the best so far. Its trials stay in runs/tune-JOB-N.
    """
    from zbc.plan.directory import refuse_unwritable

    loaded = changes.job(job)
    refuse_unwritable(output)
    if "RANK" in os.environ:
        hint = "start it once, as `zbc tune JOB.toml`, on the machine with the devices"
        raise ZbcError("E604", "tune: inside of torchrun, which it starts itself", hint=hint)
    place = next(folder for n in count(1) if not (folder := RUNS / f"tune-{job.stem}-{n}").exists())
    tuner = Tuner(job, changes, place, steps, best, (lambda text: None) if out.silent else tell)
    tuner.run()
    fastest = tuner.fastest
    assert fastest is not None
    manifest = fastest.compiled.write(output)

    def parts() -> Iterator[RenderableType]:
        yield from (*_told(tuner, fastest), "")
        yield from (labelled("plan", f"{output}: id {manifest.id}"), labelled("next", run_command(loaded, output)))
        if out.verbose:
            reports = (f"zbc report {shlex.quote(str(run))}" for plan in tuner.tried for run in plan.runs)
            yield labelled("more", *reports)

    out.answer(lambda: {**_document(tuner, fastest), "plan": str(output), "plan_id": manifest.id}, parts)
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
