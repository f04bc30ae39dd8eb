"""Token files: consecutive numbers of 2 or 4 bytes, and a JSON sidecar that describes them.

    train.bin        little-endian uint16 (up to 65536 different tokens) or uint32
    train.bin.json   type, number of tokens, size of the vocabulary, the token that ends a document

Files from elsewhere without the JSON can be used, if the job gives their type in `data.dtype`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from zbc.errors import ZbcError

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
    """The JSON sidecar that describes a token file."""
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
    """Writes the JSON that `describe` reads."""
    about: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(tokens)}
    sidecar(path).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
