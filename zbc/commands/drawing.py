"""`visualize`: pictures of plans, jobs and runs."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zbc.commands.console import show, show_json, tell, write_bytes, write_text
from zbc.commands.opening import Changes, opened_both
from zbc.commands.options import Out, PlanJobCsvOrRun, listed
from zbc.errors import ZbcError

if TYPE_CHECKING:
    from zbc.viz.strip import Drawn
    from zbc.viz.terminal import View


WIDTH = 100  # columns of pictures off a terminal
NARROWEST = 60


class Form(StrEnum):
    TERM = "term"
    SVG = "svg"
    PNG = "png"
    PDF = "pdf"
    HTML = "html"
    PERFETTO = "perfetto"


# Suffix of a file -> format; others are text.
_FORMS = {f".{form.value}": form for form in (Form.SVG, Form.PNG, Form.PDF, Form.HTML)}
_FORMS |= {".htm": Form.HTML, ".json": Form.PERFETTO}
_NEVER = (".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".eps", ".ps", ".tif", ".tiff")
_DRAWN = (Form.SVG, Form.PNG, Form.PDF)
_TAKEN_BY = {"--by slot": (Form.TERM,), "--zoom": (Form.TERM, *_DRAWN)}
_PNG_SCALE = 2.0


def form_of(output: Path | None) -> Form:
    suffix = "" if output is None else output.suffix.lower()
    if suffix in _NEVER:
        raise typer.BadParameter(f"zbc makes no {suffix} files; name a .svg, .png, .pdf, .html, .json or .txt file")
    return _FORMS.get(suffix, Form.TERM)


def refuse_unused(form: Form, asked: Mapping[str, bool]) -> None:
    """Refuses given options that a picture of this format would ignore; `asked`: option -> whether it was given."""
    for option, given in asked.items():
        if given and form not in _TAKEN_BY[option]:
            forms = " and ".join(taker.value for taker in _TAKEN_BY[option])
            raise typer.BadParameter(f"works with {forms}, not with {form.value}", param_hint=option)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Format and selection of a picture; `to_file`: not to the terminal."""

    form: Form
    ranks: tuple[int, ...] | None
    zoom: tuple[float, float] | None
    by_slot: bool
    bubbles: bool
    to_file: bool

    def text(self, drawn: Sequence[Drawn]) -> str:
        """The picture as text; for PNG and PDF the SVG that they are made from."""
        if self.form in _DRAWN:
            from zbc.viz.svg import SvgView, draw

            return draw(drawn, SvgView(ranks=self.ranks, zoom=self.zoom, bubbles=self.bubbles))
        if self.form is Form.HTML:
            from zbc.viz import html

            return html.draw(drawn, self.ranks)
        if self.form is Form.PERFETTO:
            from zbc.viz import perfetto

            return perfetto.draw(drawn, self.ranks)
        from zbc.viz.terminal import draw as typeset

        return typeset(drawn, self._view).plain + "\n"

    def show(self, drawn: Sequence[Drawn]) -> None:
        """Prints it, on a terminal in colour."""
        if self.form is not Form.TERM:
            show(self.text(drawn).rstrip("\n"))
            return
        from zbc.viz.terminal import draw as typeset

        show(typeset(drawn, self._view))

    def write(self, drawn: Sequence[Drawn], path: Path) -> None:
        if self.form is Form.PNG or self.form is Form.PDF:
            write_bytes(path, _rendered(self.text(drawn), self.form, path))
        else:
            write_text(path, self.text(drawn))

    @property
    def _view(self) -> View:
        from zbc.viz.terminal import View

        columns = columns_here(to_file=self.to_file)
        unicode = self.to_file or "utf" in (sys.stdout.encoding or "").lower()
        return View(columns, "slot" if self.by_slot else "time", self.ranks, self.zoom, unicode, self.bubbles)


def columns_here(*, to_file: bool = False) -> int:
    """Those that the environment names as COLUMNS; else of the terminal, and WIDTH off it."""
    if (named := os.environ.get("COLUMNS", "")).isdecimal():
        return max(NARROWEST, int(named))
    here = not to_file and sys.stdout.isatty()
    return max(NARROWEST, shutil.get_terminal_size((WIDTH, 24)).columns) if here else WIDTH


def _rendered(sheet: str, form: Form, path: Path) -> bytes:
    """An SVG document as PNG or PDF. Raises E602 without cairosvg."""
    try:
        cairosvg = importlib.import_module("cairosvg")
    except (ImportError, OSError):  # OSError: the package is installed, the cairo library is not
        text = f"visualize: {path.suffix.lower()} files are made by cairosvg, which is not installed"
        hint = f"pip install cairosvg, or name {path.with_suffix('.svg')}, which needs nothing"
        raise ZbcError("E602", text, hint=hint) from None
    if form is Form.PNG:
        made: bytes = cairosvg.svg2png(bytestring=sheet.encode(), scale=_PNG_SCALE)
    else:
        made = cairosvg.svg2pdf(bytestring=sheet.encode())
    return made


_MOST_STEPS = 100  # of a picture


class By(StrEnum):
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
    *,
    changes: Changes,
    out: Out,
) -> None:
    """Draw when each rank does what.

    For a recorded run, the prediction is drawn above the measurement.
    """
    form = form or form_of(output)
    if output is None and form in (Form.PNG, Form.PDF):
        raise typer.BadParameter(f"{form.value} needs a file: -o FILE.{form.value}", param_hint="--format")
    refuse_unused(form, {"--by slot": by is By.SLOT, "--zoom": zoom is not None})
    drawn = _drawn([target, *(others or ())], changes, *_parse_steps(steps))
    strips = [plan.strip for plan in drawn]
    shown = None if ranks is None else listed(ranks, "--ranks")
    counts = [strip.ranks for strip in strips]
    if shown is not None and max(shown) >= max(counts):
        raise typer.BadParameter(f"{ranks!r} names no rank of 0-{max(counts) - 1}", param_hint="--ranks")
    if shown is not None and max(shown) >= min(counts):
        raise typer.BadParameter(f"{ranks!r} names a rank that one of the plans does not have", param_hint="--ranks")
    window = None if zoom is None else _parse_zoom(zoom, max(strip.length for strip in strips))
    wanted = Wanted(form, shown, window, by is By.SLOT, out.verbose, output is not None)
    if output is not None:
        wanted.write(drawn, output)
    elif not out.json:
        wanted.show(drawn)
    if out.json:
        text, file = (wanted.text(drawn), None) if output is None else (None, str(output))
        show_json({"format": "zbc-picture", "version": 1, "form": form.value, "file": file, "picture": text})
    elif output is not None and not out.quiet:
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
