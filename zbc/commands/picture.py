"""Pictures in the forms that `visualize` writes."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from zbc.commands.console import show, write_bytes, write_text
from zbc.errors import ZbcError

if TYPE_CHECKING:
    from zbc.viz.strip import Drawn
    from zbc.viz.terminal import View

WIDTH = 100  # columns of pictures off a terminal
NARROWEST = 60


class Form(StrEnum):
    """The formats of a picture."""

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
    """The format for the name of a file."""
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
