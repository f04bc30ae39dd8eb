"""A progress line on a terminal, overwritten in place between the permanent lines."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

_EVERY_S = 0.1


class Screen:
    """`show` overwrites its last text on `stream`; `say` clears it and passes a permanent line to `emit`."""

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
