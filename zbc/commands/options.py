"""Parameters that several commands share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

_MOST = 1_000_000  # most numbers of a range


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


def complete_schedule(incomplete: str) -> list[tuple[str, str]]:
    from zbc.compiler.schedules import SCHEDULES

    return [(name, card.summary) for name, card in SCHEDULES.items() if name.startswith(incomplete)]


def seconds(text: str) -> float:
    """`10s`, `2m` or `10` as seconds."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m") else (text, "s")
    try:
        value = float(number) * (60.0 if unit == "m" else 1.0)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1e6:
        raise typer.BadParameter(f"{text!r} is no time; write 10s or 2m")
    return value


def share(text: str) -> float:
    """`5%` or `0.05` as a share; more than 1 must be in percent, since `5` is ambiguous."""
    number, scale = (text[:-1], 100.0) if text.endswith("%") else (text, 1.0)
    try:
        value = float(number) / scale
    except ValueError:
        value = -1.0
    if not 0.0 <= value < (1e3 if scale > 1 else 1.0 + 1e-9):
        raise typer.BadParameter(f"{text!r} is no share; write 5% or 0.05")
    return value


def listed(text: str, option: str, *, least: int = 0) -> tuple[int, ...]:
    """`0-3,5` as (0, 1, 2, 3, 5), in the order given, each once. Errors for other texts name `option`."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if match is None:
            raise typer.BadParameter(f"cannot read {text!r}; write {option} {least}-3,5", param_hint=option)
        first, last = int(match[1]), int(match[2] or match[1])
        if first < least or last < first or last - first >= _MOST:
            raise typer.BadParameter(f"{text!r} names nothing from {least} on", param_hint=option)
        numbers += range(first, last + 1)
    return tuple(dict.fromkeys(numbers))


def again(
    command: str, job: Path, schedule: str, settings: Sequence[str] | None = None, profile: Path | None = None
) -> str:
    """The command line for the same job under another schedule."""
    words = ["zbc", command, str(job), "--schedule", schedule]
    for setting in settings or ():
        words += ["--set", setting]
    return shlex.join([*words, *([] if profile is None else ["--profile", str(profile)])])


JobFile = Annotated[
    Path, typer.Argument(metavar="JOB.toml", help="A job file, or a plan directory for the job it was made from.")
]
PlanJobCsvOrRun = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN|JOB.toml|FILE.csv|RUN",
        help="A plan directory, a job, a torch pipelining CSV, or the directory of a recorded run.",
    ),
]
PlanJobOrCsv = Annotated[
    Path, typer.Argument(metavar="PLAN|JOB.toml|FILE.csv", help="A plan directory, a job, or a torch pipelining CSV.")
]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="A schedule, a torch CSV or module:function.",
        autocompletion=complete_schedule,
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value: schedule.microbatches=16.")
]
ProfileFile = Annotated[
    Path | None, typer.Option("--profile", metavar="FILE", help="Measured costs, made by `zbc profile`.")
]
Budget = Annotated[
    float | None,
    typer.Option("--budget", metavar="TIME", help="How long to search: 10s; 0 is fastest.", parser=seconds),
]
Exact = Annotated[
    float | None,
    typer.Option("--exact", metavar="TIME", help="Prove the order optimal or find a shorter one: 60s.", parser=seconds),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print all details.")]
