"""One line on a terminal that is written over: how far the run is, between the lines that stay."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

_EVERY_S = 0.1


class Screen:
    """`show` writes over what it wrote last on `stream`; `say` clears it before a line that stays, for `emit`."""

    def __init__(self, emit: Callable[[str], None], stream: TextIO) -> None:
        self._emit, self._stream, self._shown, self._last = emit, stream, False, -_EVERY_S

    def say(self, text: str) -> None:
        self.clear()
        self._emit(text)

    def show(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last < _EVERY_S:
            return
        self._last, self._shown = now, True
        width = shutil.get_terminal_size((100, 24)).columns - 1
        self._write(f"\r\x1b[2K{text[:width]}")

    def clear(self) -> None:
        if self._shown:
            self._write("\r\x1b[2K")
            self._shown = False

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the terminal may be gone
            self._stream.write(text)
            self._stream.flush()
