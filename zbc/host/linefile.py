"""Files that are written while a run lasts, and whole at any moment: also where the disk is full."""

from __future__ import annotations

import os
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Literal


class LineFile:
    """A text file that grows by lines. Every line is in it as soon as it is written, or nothing of it is."""

    def __init__(self, path: Path, mode: Literal["x", "w", "a"]) -> None:
        """Open as `open` does. Raises OSError."""
        self._path, self._file = path, FileIO(str(path), mode)
        self._end = self._file.seek(0, os.SEEK_END)

    def add(self, text: str) -> None:
        """Write lines, each with its end. Raises OSError, with the name of the file, which is then as it was."""
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
    """For `open`: fails where somebody has put a link in the place of the file, rather than write to what it names."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def replace_text(path: Path, text: str) -> None:
    """Write a file that is there in full, or as it was before. Raises OSError, with the name of the file."""
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
    """The same of `path`: what a write raises does not say of which file."""
    return OSError(error.errno, error.strerror, str(path))
