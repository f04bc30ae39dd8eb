"""Opens the plan, job, run or CSV of a command, with the options that change a job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from zbc.commands.options import Budget, ProfileFile, ScheduleName, Settings

if TYPE_CHECKING:
    from zbc.api import Plan, Run
    from zbc.job.spec import Job


class Changes(NamedTuple):
    """The options of a command that change a job."""

    schedule: ScheduleName = None
    settings: Settings = None
    profile: ProfileFile = None
    budget: Budget = None

    def job(self, path: Path, *, sketch: bool = False) -> Job:
        """The job of a file (see `load_job`). Raises E1xx."""
        from zbc.compiler.shapes import load_job

        return load_job(path, self.settings or (), self.schedule, self.profile, sketch=sketch)

    def refuse(self, path: Path) -> None:
        """Refuses the options if any is given, since `path` is no job."""
        values = {"--set": self.settings, "--schedule": self.schedule, "--profile": self.profile}
        given = [name for name, value in {**values, "--budget": self.budget}.items() if value not in (None, [])]
        if given:
            text = f"{' and '.join(given)} change a job, JOB.toml; {path} is none (`zbc plan` makes a plan again)"
            raise typer.BadParameter(text)


def is_job(path: Path) -> bool:
    return path.suffix == ".toml"


def is_planned(path: Path) -> bool:
    """Whether a path is of a plan, a job or an order."""
    return path.suffix in (".toml", ".csv") or path.name == "plan.json" or isfile(path / "plan.json")


def say_if_compiling(job: Job | None, *, quiet: bool) -> None:
    """Tells a terminal if the search of a job (None: of several schedules) has to compile its kernels first."""
    from zbc.commands.console import tell
    from zbc.compiler.schedules import AUTO, SCHEDULES, find
    from zbc.compiler.search.engine import compiles_first

    if quiet or not sys.stderr.isatty():
        return
    kind = "" if job is None else job.schedule.kind.lower()
    searches = job is None or kind == AUTO or (bool(kind) and find(kind).name in SCHEDULES and find(kind).searched)
    if searches and compiles_first():
        tell("compiling the search, once: some 20 s ...")


def opened(path: Path, changes: Changes) -> Plan | Run:
    """Opens the plan or run at a path; a job is changed and planned. Raises E1xx to E4xx."""
    from zbc import api

    if is_job(path):
        return api.plan(changes.job(path), budget=changes.budget)
    changes.refuse(path)
    loaded = api.load(path)
    assert isinstance(loaded, api.Plan | api.Run)
    return loaded


def opened_both(paths: Sequence[Path], changes: Changes) -> list[Plan | Run]:
    """Opens several paths; if any is a job, `changes` apply to jobs only."""
    jobs = [is_job(path) for path in paths]
    return [
        opened(path, changes if job or not any(jobs) else NO_CHANGES) for path, job in zip(paths, jobs, strict=True)
    ]


def opened_plan(path: Path, changes: Changes) -> Plan:
    """Opens a path as a plan; a recorded run gives the plan that ran."""
    from zbc.api import as_plan

    return as_plan(opened(path, changes))


NO_CHANGES = Changes()
