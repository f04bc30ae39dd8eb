"""Text as training data: the bytes of files."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from zbc.errors import ZbcError

DEFAULT_BYTES = 16 * 2**20
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def read(path: str | Sequence[str] | None) -> bytearray:
    """The bytes of a file, of all files below a folder in sorted order, or of a list of both, joined.

    None reads the sources of this Python's standard library, at most 16 MiB of them: real text that needs no download.
    Raises E501 (missing or unreadable) or E503 (not UTF-8 text).
    """
    if path is None:
        return standard_library()
    paths = [path] if isinstance(path, str) else path
    return bytearray(b"".join(_checked(file) for entry in paths for file in _files(Path(entry))))


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        found = [f for f in sorted(path.rglob("*")) if f.is_file() and not _hidden(f, path)]
        if not found:
            raise ZbcError("E501", f"data: no files below {path}", hint="data.path names text files or folders of them")
        yield from found
    else:
        yield path


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _checked(file: Path) -> bytes:
    try:
        raw = file.read_bytes()
    except OSError as error:
        hint = f"data.path is relative to the current directory, {Path.cwd()}"
        raise ZbcError("E501", f"data: cannot read {file}: {error.strerror}", hint=hint) from None
    bad = _first_bad_byte(raw)
    if bad is not None:
        text = f"data: {file} is not UTF-8 text: byte {bad} is 0x{raw[bad]:02x}"
        raise ZbcError("E503", text, hint='convert it (iconv -t UTF-8), or use data.kind = "package.module:factory"')
    return raw


def _first_bad_byte(raw: bytes) -> int | None:
    """The offset of the first byte that cannot be text: invalid UTF-8, or NUL."""
    zero = raw.find(0)
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start if zero < 0 else min(zero, error.start)
    return None if zero < 0 else zero


def standard_library(limit: int = DEFAULT_BYTES) -> bytearray:
    """The .py files of the standard library in sorted order, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = bytearray()
    for file in _sources(root):
        raw = file.read_bytes()
        if _first_bad_byte(raw) is None:
            found += raw
        if len(found) >= limit:
            break
    if not found:
        hint = 'set data.path to a text file, or data.kind = "synthetic"'
        raise ZbcError("E501", f"data: this Python has no library sources in {root}", hint=hint)
    return found[:limit]


def _sources(root: Path) -> Iterator[Path]:
    """Python files in sorted order; installed packages, which may be many, are not even walked."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))
