"""Parameters that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def complete_schedule(incomplete: str) -> list[tuple[str, str]]:
    """Shell completion of schedule names."""
    from zbc.compiler.schedules import SCHEDULES

    return [(name, card.summary) for name, card in SCHEDULES.items() if name.startswith(incomplete)]


JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job description.")]
PlanOrJob = Annotated[Path, typer.Argument(metavar="PLAN|JOB.toml", help="A plan directory or a job description.")]
ScheduleName = Annotated[
    str | None,
    typer.Option("--schedule", metavar="NAME", help="Use this schedule.", autocompletion=complete_schedule),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value, as in schedule.microbatches=16; repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no more than errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print all there is to tell.")]
