"""All errors that zbc raises on purpose, and their text on a console.

    error[E130] partition: layers do not add up
      --> zbc.toml:14:10   layers_per_stage sums to 31, model.layers is 32

The first digit of a code is its family, and the family decides the exit code of the command.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

EXIT_BUG = 1
MISTYPED = frozenset({"E101", "E102", "E103"})  # a file or value that cannot be read at all
RUN_FAILED = 7
EXIT_INTERRUPTED = 130
_OPTION = re.compile(r"(?<![\w`-])--(?P<name>set|sweep|schedule|profile|budget) (?P<value>'[^']*'|[^\s,;)`]+)")
_SHOWN, _LONGEST = 20, 1200  # most problems at once, and characters of a line, on a console
_LINE = 90  # most characters of a place and a hint that share a line
# family -> exit code: 1 config, 2 program, 3 infeasible, 4 plan files, 5 data and user code, 6 environment, 7 run
_EXIT = {"1": 3, "2": 4, "3": 5, "4": 4, "5": 6, "6": 6, "7": RUN_FAILED}


class ZbcError(Exception):
    """A problem the user can fix. The CLI prints it without a traceback.

    `code` is stable (`zbc explain CODE` has the long text), `where` is `file:line:column` or `rank 2 step 17`,
    `details` are further lines with the evidence, `hint` is a fix that works.
    """

    def __init__(
        self, code: str, message: str, *, where: str | None = None, hint: str | None = None, details: Iterable[str] = ()
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.where, self.hint = code, message, where, hint
        self.details = tuple(details)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by their args alone; errors cross process boundaries in `zbc run --local`.
        return _rebuild, (self.code, self.message, self.where, self.hint, self.details)

    @property
    def errors(self) -> Sequence[ZbcError]:
        """The single problems: for a plain error itself."""
        return (self,)

    @property
    def exit_code(self) -> int:
        return _EXIT.get(self.code[1:2], EXIT_BUG)

    def render(self) -> str:
        """The message as the console shows it, without colour."""
        return self._text(self.hint)

    def in_python(self) -> ZbcError:
        """The same error for callers from Python: keyword arguments in place of options."""
        words = [None if text is None else as_arguments(text) for text in (self.message, self.where, self.hint)]
        return _rebuild(self.code, words[0] or "", words[1], words[2], tuple(map(as_arguments, self.details)))

    def _text(self, hint: str | None) -> str:
        lines = [f"error[{self.code}] {self.message}"]
        beside = bool(hint and self.where) and len(f"{self.where}{hint}") <= _LINE
        if self.where is not None:
            lines.append(f"  --> {self.where}" + (f"   {hint}" if beside else ""))
        lines += [f"   {line}" for line in self.details]
        if hint and not beside:
            lines.append(f"   = {hint}")
        return "\n".join(map(_clipped, lines))

    def as_json(self) -> dict[str, object]:
        return {
            "code": self.code,
            "message": self.message,
            "where": self.where,
            "hint": self.hint,
            "details": list(self.details),
        }

    def __str__(self) -> str:
        """The text in a traceback; the command line prints `render()`."""
        return self.in_python().render()


def as_arguments(text: str) -> str:
    """`--set schedule.chunks=2` as settings=['schedule.chunks=2'], and so on; commands in backticks are unchanged."""
    if text.startswith("--set "):  # a place, which is one setting to its end
        return f"settings=[{text.removeprefix('--set ')!r}]"
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`zbc ") else _OPTION.sub(_argument, part) for part in parts)


def _argument(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if name in ("set", "sweep"):
        quoted = value if value[0] in "\"'" else repr(value)
        return f"{'settings' if name == 'set' else 'sweep'}=[{quoted}]"
    return f"{name}={value if name == 'budget' else repr(value)}"


def _clipped(line: str) -> str:
    """A line without its middle if it is far too long, as with a pasted file for a value."""
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 4 :]}"


def _rebuild(code: str, message: str, where: str | None, hint: str | None, details: tuple[str, ...]) -> ZbcError:
    return ZbcError(code, message, where=where, hint=hint, details=details)


def unwritten(path: Path, error: OSError) -> str:
    """Why `path` cannot be written; names the file if one is in place of a folder above it."""
    above = next((place for place in path.parents if os.path.isfile(place)), None)  # isfile takes too long names
    return error.strerror or str(error) if above is None else f"{above} is a file"


class Problems(ZbcError):
    """Several problems of one input, reported together."""

    def __init__(self, errors: Iterable[ZbcError]) -> None:
        self._errors = tuple(errors)
        first = self._errors[0]
        super().__init__(first.code, first.message, where=first.where, hint=first.hint, details=first.details)

    def __reduce__(self) -> tuple[object, ...]:
        return Problems, (self._errors,)

    @property
    def errors(self) -> Sequence[ZbcError]:
        return self._errors

    def in_python(self) -> ZbcError:
        return Problems(error.in_python() for error in self._errors)

    def render(self) -> str:
        """The texts of all problems; a hint that several in a row share is shown once, with the last."""
        shown = self._errors[:_SHOWN]
        nexts = [*(error.hint for error in shown[1:]), None]
        texts = [
            error._text(error.hint if error.hint != after else None) for error, after in zip(shown, nexts, strict=True)
        ]
        hidden = len(self._errors) - len(shown)
        return "\n".join([*texts, *([f"and {hidden} more problems; --json has all of them"] if hidden else [])])


def raise_all(errors: Iterable[ZbcError]) -> None:
    """Raise nothing, the only problem, or all of them as one `Problems`."""
    problems = tuple(errors)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise Problems(problems)


def raise_found(problems: Iterable[ZbcError]) -> None:
    """Raise the problems of a check: nothing, the only one, or the first eight and the number of the others."""
    rest = iter(problems)
    shown = list(islice(rest, 8))
    count = sum(1 for _ in rest)
    if count:
        last = shown[-1]
        last.details = (*last.details, f"and {count} more problem{'s' if count > 1 else ''}")
    raise_all(shown)
