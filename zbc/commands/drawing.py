"""`visualize`: pictures of plans, jobs and runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zbc.commands.console import show_json, tell
from zbc.commands.opening import Changes, opened_both
from zbc.commands.options import (
    AsJson,
    Budget,
    PlanJobCsvOrRun,
    ProfileFile,
    Quiet,
    ScheduleName,
    Settings,
    Verbose,
    listed,
)
from zbc.commands.picture import Form, Wanted, form_of, refuse_unused

if TYPE_CHECKING:
    from zbc.viz.strip import Drawn


_MOST_STEPS = 100  # of a picture


class By(StrEnum):
    """The unit of a cell of a picture."""

    TIME = "time"
    SLOT = "slot"


def visualize(
    target: PlanJobCsvOrRun,
    others: Annotated[
        list[Path] | None, typer.Argument(metavar="OTHER", help="More plans, drawn below.", show_default=False)
    ] = None,
    form: Annotated[Form | None, typer.Option("--format", help="Default: by the name of FILE.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the picture to a file.")
    ] = None,
    by: Annotated[By, typer.Option(help="slot: one op a cell (text only).")] = By.TIME,
    ranks: Annotated[str | None, typer.Option(metavar="0-3,5", help="Only these ranks.")] = None,
    zoom: Annotated[str | None, typer.Option(metavar="A-B", help="Only from A to B ms.")] = None,
    steps: Annotated[
        str, typer.Option(metavar="N|A-B", help="Draw this many steps in a row; of a recorded run also A to B.")
    ] = "1",
    schedule: ScheduleName = None,
    settings: Settings = None,
    profile: ProfileFile = None,
    budget: Budget = None,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Draw when each rank does what.

    For a recorded run, the prediction is drawn above the measurement.
    """
    form = form or form_of(output)
    if output is None and form in (Form.PNG, Form.PDF):
        raise typer.BadParameter(f"{form.value} needs a file: -o FILE.{form.value}", param_hint="--format")
    refuse_unused(form, {"--by slot": by is By.SLOT, "--zoom": zoom is not None})
    changes = Changes(settings, schedule, profile, budget)
    drawn = _drawn([target, *(others or ())], changes, *_parse_steps(steps))
    strips = [plan.strip for plan in drawn]
    shown = None if ranks is None else listed(ranks, "--ranks")
    counts = [strip.ranks for strip in strips]
    if shown is not None and max(shown) >= max(counts):
        raise typer.BadParameter(f"{ranks!r} names no rank of 0-{max(counts) - 1}", param_hint="--ranks")
    if shown is not None and max(shown) >= min(counts):
        raise typer.BadParameter(f"{ranks!r} names a rank that one of the plans does not have", param_hint="--ranks")
    window = None if zoom is None else _parse_zoom(zoom, max(strip.length for strip in strips))
    wanted = Wanted(form, shown, window, by is By.SLOT, verbose, output is not None)
    if output is not None:
        wanted.write(drawn, output)
    elif not json:
        wanted.show(drawn)
    if json:
        text, file = (wanted.text(drawn), None) if output is None else (None, str(output))
        show_json({"format": "zbc-picture", "version": 1, "form": form.value, "file": file, "picture": text})
    elif output is not None and not quiet:
        tell(f"wrote {output}")


def _drawn(paths: Sequence[Path], changes: Changes, steps: int, first: int | None) -> list[Drawn]:
    from zbc.api import Run

    targets = opened_both(paths, changes)
    if first is not None and not any(isinstance(target, Run) for target in targets):
        raise typer.BadParameter("works with a recorded run, which has several steps", param_hint="--steps")
    drawn: list[Drawn] = []
    for target in targets:
        drawn += target.drawn(steps, first=first) if isinstance(target, Run) else [target.drawn(steps)]
    return drawn


def _parse_steps(text: str) -> tuple[int, int | None]:
    """The number of steps, and the first one if `text` names it: `3-5` is (3, 3)."""
    match = re.fullmatch(r"\s*([1-9]\d{0,8})(?:-([1-9]\d{0,8}))?\s*", text)
    first = int(match[1]) if match and match[2] else None
    count = 0 if match is None else int(match[1]) if first is None else int(match[2]) - first + 1
    if not 1 <= count <= _MOST_STEPS:
        hint = "write --steps 3, or 10-12 of a recorded run"
        raise typer.BadParameter(f"{text!r} names no 1 to {_MOST_STEPS} steps; {hint}", param_hint="--steps")
    return count, first


def _parse_zoom(text: str, makespan: float) -> tuple[float, float]:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*-\s*(\d+(?:\.\d+)?)\s*(?:ms)?\s*", text)
    if match is None:
        raise typer.BadParameter(f"cannot read {text!r}; write --zoom 0-120 (ms)", param_hint="--zoom")
    begin, end = float(match[1]), float(match[2])
    if not begin < end or begin >= makespan:
        raise typer.BadParameter(f"{text!r} shows nothing of 0-{makespan:.6g} ms", param_hint="--zoom")
    return begin, end
