"""The proof of a torch CSV: problems that check/ finds in its order, with rows, columns and torch's names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zbc.compiler.check import check_all
from zbc.errors import Problems, ZbcError
from zbc.interop.torch_csv import Sheet, action, place
from zbc.ir import Op

_TERMS = re.compile(r"rank (?P<rank>\d+)(?: step (?P<at>\d+))?|step (?P<step>\d+)|\b(?P<op>(?:F|BW?|W) s\d+ m\d+)\b")
_CELLS = (re.compile(r"row \d+ column \d+"), re.compile(r"row \d+"))


def check_sheet(sheet: Sheet) -> None:
    """Raises E202, E206 or E201 for a wrong order of a CSV, with row and column of every action. torch accepts a
    repeated action, and hangs in training on an order that can never finish; zbc refuses both."""
    try:
        check_all(sheet.program)
    except ZbcError as error:
        problems = [_Teller(sheet).told(single) for single in error.errors]
        raise problems[0] if len(problems) == 1 else Problems(problems) from None


class _Teller:
    """Rewrites `rank 1 step 3: F s1 m0` as `row 2 column 4: 1F0`; a step without a rank belongs to the last named."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet, self.rank = sheet, 0

    def told(self, error: ZbcError) -> ZbcError:
        where = self._where(error.where)
        details = [self._text(line) for line in error.details]
        message = self._text(error.message.replace("program: ", "csv: ", 1))
        hint = None if error.hint is None else self._text(error.hint)
        where = where or self._nearest([*details, hint or ""])
        return ZbcError(error.code, message, where=where, hint=hint, details=details)

    def _nearest(self, texts: Sequence[str]) -> str:
        """The first cell that the evidence names, else the first row, else the file."""
        named = [match for pattern in _CELLS for text in texts if (match := pattern.search(text))]
        return f"{self.sheet.source}: {named[0][0].replace(' column', ', column')}" if named else self.sheet.source

    def _where(self, where: str | None) -> str | None:
        match = None if where is None else _TERMS.fullmatch(where)
        if match is None or match["at"] is None:
            return where
        self.rank = int(match["rank"])
        return place(self.sheet.source, self.rank, self._column(int(match["at"])))

    def _text(self, text: str) -> str:
        return _TERMS.sub(self._term, text)

    def _term(self, match: re.Match[str]) -> str:
        if match["op"] is not None:
            return action(Op.parse(match["op"]))
        if match["step"] is not None:
            return f"column {self._column(int(match['step'])) + 1}"
        self.rank = int(match["rank"])
        row = f"row {self.rank + 1}"
        return row if match["at"] is None else f"{row} column {self._column(int(match['at'])) + 1}"

    def _column(self, step: int) -> int:
        return self.sheet.columns[self.rank][step]
