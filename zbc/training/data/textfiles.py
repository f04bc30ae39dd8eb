"""Text files named by a user: finds them and refuses files that are not text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from zbc.errors import ZbcError

_AT_ONCE = 2**22  # bytes


def text_files(path: str | Sequence[str]) -> Iterator[Path]:
    """A file, all files below a folder in sorted order, or a list of both. Raises E501 for an empty folder."""
    for entry in [path] if isinstance(path, str) else path:
        yield from _files(Path(entry))


def _files(path: Path) -> Iterator[Path]:
    if os.path.isdir(path):
        found = [f for f in sorted(path.rglob("*")) if f.is_file() and not _hidden(f, path)]
        if not found:
            raise ZbcError("E501", f"data: no files below {path}", hint="data.path names text files or folders of them")
        yield from found
    else:
        yield path


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def unreadable(file: Path, error: OSError) -> ZbcError:
    """E501 for a file of data that cannot be opened."""
    hint = f"a relative path starts at the current directory, {Path.cwd()}"
    return ZbcError("E501", f"data: cannot read {file}: {error.strerror}", hint=hint)


def not_text(file: Path, raw: bytes, start: int = 0) -> ZbcError | None:
    """E503 if `raw`, which begins at byte `start` of `file`, is not text: invalid UTF-8, or NUL."""
    bad = first_bad_byte(raw)
    if bad is None:
        return None
    text = f"data: {file} is not UTF-8 text: byte {start + bad} is 0x{raw[bad]:02x}"
    hint = 'convert it (iconv -t UTF-8), or use data.kind = "package.module:factory"'
    return ZbcError("E503", text, where=line_at(file, start + bad), hint=hint)


def line_at(file: Path, byte: int) -> str:
    """`FILE:LINE` of a byte of a file, the line counted from 1; only the file if it can no longer be read."""
    line, left = 1, byte
    try:
        with file.open("rb") as source:
            while left > 0 and (raw := source.read(min(left, _AT_ONCE))):
                line, left = line + raw.count(b"\n"), left - len(raw)
    except OSError:
        return str(file)
    return f"{file}:{line}"


def first_bad_byte(raw: bytes) -> int | None:
    """The offset of the first byte that cannot be text."""
    zero = raw.find(0)
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start if zero < 0 else min(zero, error.start)
    return None if zero < 0 else zero
