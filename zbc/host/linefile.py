"""Files that are written during a run and complete at any moment, even if the disk is full."""

from __future__ import annotations

import os
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Literal


class LineFile:
    """A text file that grows by lines. Each write is in the file completely and at once, or not at all."""

    def __init__(self, path: Path, mode: Literal["x", "w", "a"]) -> None:
        """Opens the file as `open` does. Raises OSError."""
        self._path, self._file = path, FileIO(str(path), mode)
        self._end = self._file.seek(0, os.SEEK_END)

    def add(self, text: str) -> None:
        """Appends lines, each with its newline. Raises OSError with the name of the file, which is then unchanged."""
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
            raise _named(error, self._path) from None
        self._end += len(text.encode())

    def close(self) -> None:
        self._file.close()


def no_link(path: str, flags: int) -> int:
    """An opener for `open` that fails on a symbolic link instead of writing to its target."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def replace_text(path: Path, text: str) -> None:
    """Writes a file atomically: completely or not at all. Raises OSError with the name of the file."""
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        with open(part, "w", encoding="utf-8", opener=no_link) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise _named(error, path) from None


def _named(error: OSError, path: Path) -> OSError:
    """The error with `path` as its file name, which errors of a write lack."""
    return OSError(error.errno, error.strerror, str(path))
