"""Files of training data. Text: the bytes of files that a user names, refused if they are not text. Token files:
consecutive numbers of 2 or 4 bytes, and a JSON sidecar that describes them.

    train.bin        little-endian uint16 (up to 65536 different tokens) or uint32
    train.bin.json   type, number of tokens, size of the vocabulary, the token that ends a document

Files from elsewhere without the JSON can be used, if the job gives their type in `data.dtype`.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from zbc.errors import ZbcError

DEFAULT_BYTES = 16 * 2**20
_AT_ONCE = 2**22  # bytes
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def read(path: str | Sequence[str] | None) -> bytearray:
    """The bytes of a file, of all files below a folder in sorted order, or of a list of both, joined.

    None reads the sources of this Python's standard library, at most 16 MiB of them: real text that needs no download.
    Raises E501 (missing, unreadable, or not UTF-8 text).
    """
    if path is None:
        return standard_library()
    found = bytearray()
    for file in text_files(path):
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise unreadable(file, error) from None
        if (problem := not_text(file, raw)) is not None:
            raise problem
        found += raw
    return found


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


def text_files(path: str | Sequence[str]) -> Iterator[Path]:
    """A file, all files below a folder in sorted order, or a list of both. Raises E501 for an empty folder."""
    for entry in map(Path, [path] if isinstance(path, str) else path):
        found = [entry]
        if os.path.isdir(entry):
            every = (f for f in sorted(entry.rglob("*")) if f.is_file())
            found = [f for f in every if not any(part.startswith(".") for part in f.relative_to(entry).parts)]
        if not found:
            text, hint = f"data: no files below {entry}", "data.path names text files or folders of them"
            raise ZbcError("E501", text, hint=hint)
        yield from found


def unreadable(file: Path, error: OSError) -> ZbcError:
    """E501 for a file of data that cannot be opened."""
    hint = f"a relative path starts at the current directory, {Path.cwd()}"
    return ZbcError("E501", f"data: cannot read {file}: {error.strerror}", hint=hint)


def not_text(file: Path, raw: bytes, start: int = 0) -> ZbcError | None:
    """E501 if `raw`, which begins at byte `start` of `file`, is not text: invalid UTF-8, or NUL."""
    bad = first_bad_byte(raw)
    if bad is None:
        return None
    text = f"data: {file} is not UTF-8 text: byte {start + bad} is 0x{raw[bad]:02x}"
    hint = 'convert it (iconv -t UTF-8), or use data.kind = "package.module:factory"'
    return ZbcError("E501", text, where=line_at(file, start + bad), hint=hint)


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


FORMAT, VERSION = "zbc-tokens", 1
WIDTHS = {"uint16": 2, "uint32": 4}


_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Tokens:
    """The description of a token file. `vocab` is None without a JSON."""

    dtype: Annotated[str, Field(pattern="^uint(16|32)$")]
    tokens: _Count
    vocab: _Count | None = None
    end: _Count | None = None  # the token after each document
    documents: _Count | None = None
    tokenizer: str | None = None  # "bytes", or the sha256 of the tokenizer.json

    @property
    def width(self) -> int:
        return WIDTHS[self.dtype]


def sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def describe(path: Path, dtype: str | None = None) -> Tokens:
    """The description of a token file; `dtype`: its type without a JSON. Raises E501 (unreadable, or damaged)."""
    try:
        size = path.stat().st_size
        if not os.path.isfile(path):
            raise IsADirectoryError(21, "Is a directory")
        text = sidecar(path).read_bytes() if os.path.exists(sidecar(path)) else None
    except OSError as error:
        hint = "`zbc tokenize TEXT... -o FILE` makes one"
        raise ZbcError("E501", f"data: cannot read {path}: {error.strerror}", hint=hint) from None
    if text is None and dtype is None:
        hint = 'set data.dtype = "uint16" if it holds plain numbers of that type, or make it with `zbc tokenize`'
        raise ZbcError("E501", f"data: {sidecar(path)} is missing, which says what {path.name} holds", hint=hint)
    if text is None:
        width = WIDTHS[dtype or "uint16"]
        known = Tokens(dtype or "uint16", size // width)
    else:
        known = _parse(sidecar(path), text)
    if size != known.tokens * known.width:
        shown = f"{known.tokens} tokens of {known.width} bytes, but {size} bytes"
        raise ZbcError("E501", f"data: {path} should be {shown}", hint="it is cut off or was changed: make it again")
    return known


def _parse(path: Path, text: bytes) -> Tokens:
    try:
        data = json.loads(text)
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise ValueError(f"format {data['format']!r} version {data['version']!r}")
        return Tokens(**{key: data.get(key) for key in Tokens.__dataclass_fields__})
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        details = [f"{type(error).__name__}: {error}".replace("\n", " ")[:200]]
        raise ZbcError("E501", f"data: {path} is damaged", details=details, hint="make the file again") from None


def write_sidecar(path: Path, tokens: Tokens) -> None:
    about: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(tokens)}
    sidecar(path).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
