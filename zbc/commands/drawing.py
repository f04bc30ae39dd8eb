"""`visualize`, and `schedules` with its pictures."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbc.commands.console import labelled, show, show_json, table, tell
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
    complete_schedule,
    listed,
)
from zbc.commands.picture import NARROWEST, Form, Wanted, columns_here, form_of, refuse_unused
from zbc.text import wrap

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from zbc.compiler.schedules import ScheduleCard
    from zbc.viz.strip import Drawn

_EVERYTHING = 1000  # columns of a list off a terminal
_CARD = (4, 6)  # ranks and microbatches of the picture on a schedule's card


class By(StrEnum):
    """The unit of a cell of a picture."""

    TIME = "time"
    SLOT = "slot"


def visualize(
    target: PlanJobCsvOrRun,
    others: Annotated[
        list[Path] | None, typer.Argument(metavar="OTHER", help="More plans, drawn below.", show_default=False)
    ] = None,
    form: Annotated[Form | None, typer.Option("--as", help="Default: by the name of FILE.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the picture to a file.")
    ] = None,
    by: Annotated[By, typer.Option(help="slot: one op a cell (text only).")] = By.TIME,
    ranks: Annotated[str | None, typer.Option(metavar="0-3,5", help="Only these ranks.")] = None,
    zoom: Annotated[str | None, typer.Option(metavar="A-B", help="Only from A to B ms.")] = None,
    width: Annotated[
        int | None, typer.Option(min=NARROWEST, metavar="N", help="Columns; default: those of the terminal.")
    ] = None,
    captions: Annotated[
        list[str] | None, typer.Option("--caption", metavar="TEXT", help="What a plan is called: one for each.")
    ] = None,
    own_axis: Annotated[bool, typer.Option("--own-axis", help="Give each plan a time axis of its own.")] = False,
    steps: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Draw this many steps in a row.")] = 1,
    first: Annotated[
        int | None, typer.Option("--from", min=1, metavar="STEP", help="Of a recorded run: from this step on.")
    ] = None,
    barrier: Annotated[
        bool | None, typer.Option(help="With --steps: whether steps end together; default: the job's way.")
    ] = None,
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
        raise typer.BadParameter(f"--as {form.value} needs a file: -o FILE.{form.value}", param_hint="--as")
    given = {"--by slot": by is By.SLOT, "--width": width is not None, "--zoom": zoom is not None}
    refuse_unused(form, {**given, "--own-axis": own_axis, "--caption": bool(captions)})
    if own_axis and zoom is not None:
        raise typer.BadParameter("--zoom shows the same times of all plans", param_hint="--own-axis")
    changes = Changes(settings, schedule, profile, budget)
    drawn = _drawn([target, *(others or ())], changes, steps, first, barrier)
    if captions:
        drawn = _captioned(drawn, captions)
    strips = [plan.strip for plan in drawn]
    shown = None if ranks is None else _parse_ranks(ranks, max(strip.ranks for strip in strips))
    if shown is not None and max(shown) >= min(strip.ranks for strip in strips):
        raise typer.BadParameter(f"{ranks!r} names a rank that one of the plans does not have", param_hint="--ranks")
    window = None if zoom is None else _parse_zoom(zoom, max(strip.length for strip in strips))
    wanted = Wanted(form, shown, window, width, by is By.SLOT, verbose, output is not None, own_axis)
    if output is not None:
        wanted.write(drawn, output)
    elif not json:
        wanted.show(drawn)
    if json:
        text = None if output is not None else wanted.text(drawn)
        show_json({"format": "zbc-picture", "version": 1, "form": form.value, "file": _named(output), "picture": text})
    elif output is not None and not quiet:
        tell(f"wrote {output}")


def _captioned(drawn: list[Drawn], captions: Sequence[str]) -> list[Drawn]:
    from zbc.viz.strip import captioned

    if len(captions) != len(drawn):
        text = f"{len(captions)} given for {len(drawn)} pictures: write one for each, in their order"
        raise typer.BadParameter(text, param_hint="--caption")
    return captioned(drawn, captions)


def _named(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _drawn(paths: Sequence[Path], changes: Changes, steps: int, first: int | None, barrier: bool | None) -> list[Drawn]:
    from zbc.api import Run

    targets = opened_both(paths, changes)
    if first is not None and not any(isinstance(target, Run) for target in targets):
        raise typer.BadParameter("works with a recorded run, which has several steps", param_hint="--from")
    drawn: list[Drawn] = []
    for target in targets:
        drawn += target.drawn(steps, first=first) if isinstance(target, Run) else [target.drawn(steps, barrier=barrier)]
    return drawn


def _parse_ranks(text: str, count: int) -> tuple[int, ...]:
    ranks = listed(text, "--ranks")
    if max(ranks) >= count:
        raise typer.BadParameter(f"{text!r} names no rank of 0-{count - 1}", param_hint="--ranks")
    return ranks


def _parse_zoom(text: str, makespan: float) -> tuple[float, float]:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*-\s*(\d+(?:\.\d+)?)\s*(?:ms)?\s*", text)
    if match is None:
        raise typer.BadParameter(f"cannot read {text!r}; write --zoom 0-120 (ms)", param_hint="--zoom")
    begin, end = float(match[1]), float(match[2])
    if not begin < end or begin >= makespan:
        raise typer.BadParameter(f"{text!r} shows nothing of 0-{makespan:.6g} ms", param_hint="--zoom")
    return begin, end


def schedules(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show the card of this one.", autocompletion=complete_schedule)
    ] = None,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """List the schedules, or show the card of one."""
    from zbc.compiler.schedules import AUTO, SCHEDULES, find

    cards = [*SCHEDULES.values()] if name is None else [] if name.lower() == AUTO else [find(name)]
    if json:
        show_json({"format": "zbc-schedules", "version": 1, "schedules": [_card(card) for card in cards]})
    elif quiet:
        return
    elif name is None:
        show(*_list(cards, AUTO))
    else:
        show(*(card_parts(cards[0], columns_here()) if cards else _AUTO))


def _card(card: ScheduleCard) -> dict[str, Any]:
    low, high = card.chunks
    texts = ("name", "summary", "source", "makespan", "span", "memory", "needs")
    return {
        **{key: getattr(card, key) for key in texts},
        "aliases": list(card.aliases),
        "placement": card.placement_name,
        "chunks": [low, high],
        "splits_backward": card.splits_backward,
        "searched": card.searched,
    }


_AUTO = (
    "auto: the best of all schedules, for the job's costs and memory",
    "",
    "Never worse than any of them by name with the same --budget. looped-zb is tried",
    "with two to four stages per rank, or with those of schedule.chunks.",
)
_UNITS = (
    "p ranks, m microbatches, v chunks (stages per rank); one rank's F, B and W of",
    "a microbatch take 1 each, transfers nothing; memory is the peak of activations,",
    "1 = one rank's share of one microbatch. The bubble is what a makespan or span",
    "has beyond 3m. `zbc schedules NAME` shows one of them.",
)


def _list(cards: Sequence[ScheduleCard], auto: str) -> Iterator[RenderableType]:
    """All schedules, with the columns that fit the terminal."""
    rows = [("name", "placement", "chunks", "makespan", "span", "memory", "B, W")]
    for card in cards:
        split = "apart" if card.splits_backward else "as one"
        rows.append((card.name, card.placement_name, _chunks(card), card.makespan, card.span, card.memory, split))
    rows.append((auto, "any", "1+", "the best", "the best", "the limit", "apart"))
    columns, left_out = list(zip(*rows, strict=True)), list[str]()
    room = shutil.get_terminal_size((_EVERYTHING, 24)).columns
    for name in ("chunks", "span"):
        if sum(max(map(len, column)) + 2 for column in columns) - 2 > room:
            columns = [column for column in columns if column[0] != name]
            left_out.append(name)
    heads, *cells = zip(*columns, strict=True)
    yield table(heads, cells, left=len(heads))
    yield ""
    yield from _UNITS
    if left_out:
        yield f"No room for: {', '.join(left_out)}."


def _chunks(card: ScheduleCard) -> str:
    low, high = card.chunks
    return f"{low}" if low == high else f"{low}+" if high is None else f"{low}-{high}"


def card_text(card: ScheduleCard, width: int) -> str:
    """The card as plain text."""
    return "\n".join(part if isinstance(part, str) else part.plain for part in card_parts(card, width))


def card_parts(card: ScheduleCard, width: int) -> Iterator[str | Text]:
    """The facts about one schedule, and a picture of its order."""
    from zbc.compiler.lowering import Lowering
    from zbc.compiler.schedules import Request
    from zbc.compiler.sim.context import Context
    from zbc.viz.strip import Drawn, once
    from zbc.viz.terminal import View, draw

    p, m = _CARD
    shown = Lowering().lower(Context.of(card.make(Request(p, m, card.default_chunks))))
    yield from wrap(f"{card.name}: {card.summary}".split(" "), 80, between=" ")
    yield ""
    yield labelled("source", *wrap(card.source.split(" "), 69, between=" "))
    if card.aliases:
        yield labelled("also", ", ".join(card.aliases))
    yield labelled("placement", f"{card.placement_name}; stages per rank: {_chunks(card)}")
    yield labelled("backward", "B and W are ops of their own" if card.splits_backward else "B and W are one op")
    yield labelled("makespan", card.makespan)
    yield labelled("span", card.span)
    yield labelled("memory", f"{card.memory}; in activation units, on the fullest rank")
    if card.sliced:
        yield labelled("slices", f"in k slices, up to p: the bubble over k, memory {card.sliced}")
    yield labelled("needs", *wrap(card.needs.split(" "), 69, between=" "))
    yield ""
    picture = Drawn(card.name, shown.program, once(shown.timeline), shown.costs)
    yield draw([picture], View(width=width, by="slot", unicode=False))
