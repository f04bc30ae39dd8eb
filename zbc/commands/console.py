"""Output of commands: the answer on stdout, messages and progress on stderr.

Text is printed as rich `Text`, never as markup: markup swallows `[costs]` and crashes on `[/x]`. There are colours on
terminals only; NO_COLOR switches them off.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from zbc.errors import ZbcError, unwritten
from zbc.host.closed_pipe import EXIT_PIPE, silence, unwritten_stdout
from zbc.host.folders import folders_for
from zbc.text import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

_UNBOUND = 10_000  # columns: long lines are wrapped by the terminal, never cut


@cache
def _visible() -> type[Console]:
    """A console that shows control characters, as names come from untrusted files."""
    from rich.console import Console
    from rich.segment import Segment

    class Visible(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else visible(text), style, control)

        def on_broken_pipe(self) -> None:
            silence(sys.stderr if self.stderr else sys.stdout)
            if not self.stderr:
                raise SystemExit(EXIT_PIPE)

    return Visible


def _console(file: TextIO, width: int | None = None) -> Console:
    plain: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False, "soft_wrap": True}
    plain["color_system"] = None if os.environ.get("NO_COLOR") else "auto"
    return _visible()(file=file, stderr=file is sys.stderr, width=width, **plain)


def stdout() -> Console:
    """The console of answers. A reader that goes away (`zbc explain | head -1`) ends the command quietly."""
    return _console(sys.stdout, _UNBOUND)


def stderr() -> Console:
    """The console of remarks. A closed stderr is ignored."""
    return _console(sys.stderr)


def show(*parts: RenderableType) -> None:
    """Prints on stdout, one part below the other. Raises E608 if stdout cannot be written."""
    from rich.text import Text

    console = stdout()
    try:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str | Text))
    except OSError as error:
        raise unwritten_stdout(error) from None


def show_json(document: Mapping[str, Any]) -> None:
    show(json.dumps(document, indent=1, ensure_ascii=False))


def tell(message: str | Text) -> None:
    """Prints a remark on stderr, if it can be written."""
    try:
        stderr().print(message)
    except OSError:
        silence(sys.stderr)


def show_error(error: ZbcError, *, as_json: bool = False) -> None:
    """Prints the error on stderr, for `--json` also as one document on stdout."""
    from rich.text import Text

    text = Text(error.render())
    text.highlight_regex(re.compile(r"^error\[\w+\]", re.MULTILINE), "bold red")
    text.highlight_regex(re.compile(r"^  --> \S+", re.MULTILINE), "cyan")
    tell(text)
    if as_json:
        with suppress(ZbcError):  # if stdout cannot be written, stderr has the error
            show_json({"format": "zbc-error", "version": 1, "errors": [single.as_json() for single in error.errors]})


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, most: int | None = None) -> Table:
    """A table without lines; the first `left` columns are words, the others numbers. With more than `most` rows the
    middle is left out."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, head in enumerate(heads):
        made.add_column(head, justify="left" if index < left else "right", no_wrap=True)
    rows = list(rows)
    if most is not None and len(rows) > most:
        rows = [*rows[: most - 3], ("...", f"{len(rows) - most + 1} more: -v"), *rows[-2:]]
    for row in rows:
        made.add_row(*row)
    return made


def labelled(label: str, *lines: str) -> Text:
    """`label` in bold in front of the first line, the others aligned below it."""
    from rich.text import Text

    text = Text(f"{label:<{LABEL}}", style="bold")
    text.append(("\n" + " " * LABEL).join(lines), style="not bold")
    return text


LABEL = 11  # columns of a label


def indented(block: RenderableType, by: int = LABEL) -> RenderableType:
    """A table indented by the width of a label, or by `by` columns."""
    from rich.padding import Padding

    return Padding(block, (0, 0, 0, by), expand=False)


@contextmanager
def progress(title: str, total: int | None, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, on a terminal only; yields a function that advances it by `amount` (default 1). Without
    a total it shows activity and the time so far."""
    console = stderr()
    if quiet or not console.is_terminal:
        yield lambda amount=1: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    lasting = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()] if total is None else []
    with Progress(*lasting, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount=1: bar.advance(task, amount)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file for the user. Raises E608 if that fails, and leaves no new file or folder then."""
    there = os.path.lexists(path)
    try:
        with folders_for(path):
            try:
                path.write_bytes(content)
            except BaseException:
                if not there:
                    path.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise _unwritable(path, error) from None


def write_text(path: Path, text: str) -> None:
    """Writes a text in UTF-8. Raises E608 as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def refuse_unwritable(path: Path) -> None:
    """Raises E608 if a file cannot be written, before its contents are computed. Leaves no file."""
    if os.path.exists(path) and path.is_fifo():  # opening and closing it would end the input of its reader
        return
    try:
        with folders_for(path, keep=False):
            there = os.path.exists(path)
            with path.open("ab"):
                pass
            if not there:
                path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ZbcError:
    text = f"cannot write {path}: {unwritten(path, error)}"
    return ZbcError("E608", text, hint="choose a place that can be written")
