"""Text as training data: the bytes of files."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from zbc.errors import ZbcError
from zbc.training.data.textfiles import first_bad_byte, not_text, text_files, unreadable

DEFAULT_BYTES = 16 * 2**20
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def read(path: str | Sequence[str] | None) -> bytearray:
    """The bytes of a file, of all files below a folder in sorted order, or of a list of both, joined.

    None reads the sources of this Python's standard library, at most 16 MiB of them: real text that needs no download.
    Raises E501 (missing or unreadable) or E503 (not UTF-8 text).
    """
    if path is None:
        return standard_library()
    return bytearray(b"".join(_checked(file) for file in text_files(path)))


def _checked(file: Path) -> bytes:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from None
    problem = not_text(file, raw)
    if problem is not None:
        raise problem
    return raw


def standard_library(limit: int = DEFAULT_BYTES) -> bytearray:
    """The .py files of the standard library in sorted order, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = bytearray()
    for file in _sources(root):
        raw = file.read_bytes()
        if first_bad_byte(raw) is None:
            found += raw
        if len(found) >= limit:
            break
    if not found:
        hint = 'set data.path to a text file, or data.kind = "synthetic"'
        raise ZbcError("E501", f"data: this Python has no library sources in {root}", hint=hint)
    return found[:limit]


def _sources(root: Path) -> Iterator[Path]:
    """Python files in sorted order; does not walk installed packages, which may be many."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))
