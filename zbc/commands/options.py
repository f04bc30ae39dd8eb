"""Parameters that several commands share."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import typer

from zbc.commands.console import show, show_json

if TYPE_CHECKING:
    from rich.console import RenderableType

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


class Out(NamedTuple):
    """How a command answers."""

    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print all details.")] = False

    @property
    def silent(self) -> bool:
        """Whether there is no text for readers."""
        return self.json or self.quiet

    def answer(self, document: Callable[[], Mapping[str, Any]], parts: Callable[[], Iterable[RenderableType]]) -> None:
        """Prints one of both, of which only that one is made."""
        if self.json:
            show_json(document())
        elif not self.quiet:
            show(*parts())


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer takes it: in place of parameters that are groups of options, such as `Out`, their fields."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if hasattr(kind, "_field_defaults")}
    options = dict[str, inspect.Parameter]()
    for name, given in inspect.signature(command).parameters.items():
        group = groups.get(name)
        fields = {name: given.default} if group is None else group._field_defaults
        kinds = hints if group is None else get_type_hints(group, include_extras=True)
        for key, default in fields.items():
            options[key] = inspect.Parameter(key, given.KEYWORD_ONLY, default=default, annotation=kinds[key])

    def run(**given: Any) -> None:
        made = {name: kind(*map(given.pop, kind._fields)) for name, kind in groups.items()}
        command(**given, **made)

    spreads: Any = run
    spreads.__doc__, spreads.__signature__ = command.__doc__, inspect.Signature([*options.values()])
    return run
