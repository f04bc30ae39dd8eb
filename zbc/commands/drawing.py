"""`visualize`, and `schedules` with its pictures."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zbc.commands.console import labelled, show, table, tell, write_text
from zbc.commands.options import PlanJobCsvOrRun, Verbose, complete_schedule, listed
from zbc.text import wrap

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from zbc.compiler.schedules import ScheduleCard
    from zbc.viz.strip import Drawn

_WIDTH = 100  # of pictures that do not go to a terminal
_EVERYTHING = 1000  # columns of a list that does not go to a terminal
_NARROWEST = 60
_CARD = (4, 6)  # ranks and microbatches of the picture on a schedule's card


class Form(StrEnum):
    """What a picture can be made as."""

    TERM = "term"
    SVG = "svg"
    HTML = "html"
    PERFETTO = "perfetto"


_FORMS = {".svg": Form.SVG, ".html": Form.HTML, ".htm": Form.HTML, ".json": Form.PERFETTO}  # of files, by their suffix
_TAKEN_BY = {"--by slot": (Form.TERM,), "--width": (Form.TERM,), "--zoom": (Form.TERM, Form.SVG)}


class By(StrEnum):
    """What a cell of a picture is."""

    TIME = "time"
    SLOT = "slot"


def visualize(
    target: PlanJobCsvOrRun,
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="A second plan, drawn below on the same time axis.")
    ] = None,
    form: Annotated[
        Form | None,
        typer.Option("--as", help="Form of the picture; default: by the name of FILE (.svg, .html, .json), else term."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the picture to a file.")
    ] = None,
    by: Annotated[By, typer.Option(help="time: cells of equal length; slot: one op a cell (text only).")] = By.TIME,
    ranks: Annotated[str | None, typer.Option(metavar="0-3,5", help="Only these ranks.")] = None,
    zoom: Annotated[str | None, typer.Option(metavar="A-B", help="Only from A to B ms.")] = None,
    width: Annotated[
        int | None, typer.Option(min=_NARROWEST, metavar="N", help="Columns; default: those of the terminal.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Draw this many steps in a row.")] = 1,
    first: Annotated[
        int | None, typer.Option("--from", min=1, metavar="STEP", help="Recorded runs only: draw from this step on.")
    ] = None,
    barrier: Annotated[
        bool | None,
        typer.Option(help="With --steps: whether all ranks end a step before the next; default: as the job says."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Draw when each rank does what.

    For a recorded run, the prediction is drawn above the measurement.
    """
    form = form or _FORMS.get("" if output is None else output.suffix.lower(), Form.TERM)
    _refuse_unused(form, {"--by slot": by is By.SLOT, "--width": width is not None, "--zoom": zoom is not None})
    drawn = _drawn([target] if other is None else [target, other], steps, first, barrier)
    strips = [one.strip for one in drawn]
    shown = None if ranks is None else _parse_ranks(ranks, max(strip.ranks for strip in strips))
    if shown is not None and max(shown) >= min(strip.ranks for strip in strips):
        raise typer.BadParameter(f"{ranks!r} names a rank that one of the plans does not have", param_hint="--ranks")
    window = None if zoom is None else _parse_zoom(zoom, max(strip.length for strip in strips))
    _put(form, drawn, output, shown, window, width, by, bubbles=verbose)


def _put(
    form: Form,
    drawn: Sequence[Drawn],
    output: Path | None,
    ranks: tuple[int, ...] | None,
    window: tuple[float, float] | None,
    width: int | None,
    by: By,
    *,
    bubbles: bool,
) -> None:
    """Show a picture, or write it to a file."""
    if form is Form.TERM:
        from zbc.viz.terminal import View
        from zbc.viz.terminal import draw as typeset

        columns = width or (_columns() if output is None else _WIDTH)
        unicode = output is not None or "utf" in (sys.stdout.encoding or "").lower()
        picture = typeset(drawn, View(columns, by.value, ranks, window, unicode, bubbles))
        if output is None:
            show(picture)
            return
        text = picture.plain + "\n"
    elif form is Form.SVG:
        from zbc.viz.svg import SvgView, draw

        text = draw(drawn, SvgView(ranks=ranks, zoom=window, bubbles=bubbles))
    elif form is Form.HTML:
        from zbc.viz import html

        text = html.draw(drawn, ranks)
    else:
        from zbc.viz import perfetto

        text = perfetto.draw(drawn, ranks)
    if output is None:
        show(text.rstrip("\n"))
    else:
        write_text(output, text)
        tell(f"wrote {output}")


def _refuse_unused(form: Form, asked: Mapping[str, bool]) -> None:
    """Refuse options, by whether they were given, that a picture of this form would leave out of account."""
    for option, given in asked.items():
        if given and form not in _TAKEN_BY[option]:
            forms = " and ".join(f"--as {one.value}" for one in _TAKEN_BY[option])
            raise typer.BadParameter(f"works with {forms}, not with --as {form.value}", param_hint=option)


def _drawn(paths: Sequence[Path], steps: int, first: int | None, barrier: bool | None) -> list[Drawn]:
    from zbc.api import Run, as_plan, load

    found = [load(path) for path in paths]
    if first is not None and not any(isinstance(one, Run) for one in found):
        raise typer.BadParameter("works with a recorded run, which has several steps", param_hint="--from")
    drawn: list[Drawn] = []
    for one in found:
        drawn += one.drawn(steps, first=first) if isinstance(one, Run) else [as_plan(one).drawn(steps, barrier=barrier)]
    return drawn


def _columns() -> int:
    return max(_NARROWEST, shutil.get_terminal_size((_WIDTH, 24)).columns) if sys.stdout.isatty() else _WIDTH


def _parse_ranks(text: str, count: int) -> tuple[int, ...]:
    found = listed(text, "--ranks")
    if max(found) >= count:
        raise typer.BadParameter(f"{text!r} names no rank of 0-{count - 1}", param_hint="--ranks")
    return found


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
) -> None:
    """List the schedules, or show the card of one."""
    from zbc.compiler.schedules import AUTO, SCHEDULES, find

    if name is None:
        show(*_list([*SCHEDULES.values()], AUTO))
    elif name.lower() == AUTO:
        show(*_AUTO)
    else:
        show(*card_parts(find(name), _columns()))


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
    """All schedules, with the columns for which there is room."""
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
    """What is known of one schedule, and its picture, made by the tool itself."""
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
    yield labelled("needs", *wrap(card.needs.split(" "), 69, between=" "))
    yield ""
    one = Drawn(card.name, shown.program, once(shown.timeline), shown.costs)
    yield draw([one], View(width=width, by="slot", unicode=False))
