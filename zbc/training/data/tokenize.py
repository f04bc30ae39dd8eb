"""`zbc tokenize`: text files to one token file, in pieces; `out.bin.part` until it is whole.

A piece is some bytes of one file, up to the end of a line. A document is a file, or a line of a .jsonl file (its
"text"); each ends with the end token.
"""

from __future__ import annotations

import array
import errno
import fcntl
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from zbc.errors import ZbcError, unwritten
from zbc.host.folders import folders_for
from zbc.training.data.corpus import Tokens, line_at, not_text, sidecar, text_files, unreadable, write_sidecar

PIECE = 2**22  # bytes of text at a time
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_CODES = {"uint16": "H", "uint32": "I"}
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, which JSON can write and UTF-8 cannot


class Bytes:
    """Each byte is a token; NUL, which is not in any text, ends a document."""

    name: str = "bytes"  # identifies the tokenizer
    vocab: int = 256
    end: int | None = 0  # the token after a document; None for none

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [text.encode() for text in texts]


class Json:
    """A tokenizer.json, through the tokenizers library. Adds no special tokens except the end of a document."""

    def __init__(self, path: Path, end: str | None) -> None:
        """`end` names the token after each document; by default a common name in the vocabulary. Raises E501, E602."""
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise ZbcError("E602", "data: tokenizers is not installed", hint="pip install 'zbc[tokenizers]'") from None
        try:
            raw = path.read_bytes()
            self._library = Library.from_buffer(raw)
        except OSError as error:
            hint = "--tokenizer names a tokenizer.json; without it bytes are tokens"
            raise ZbcError("E501", f"data: cannot read {path}: {error.strerror}", hint=hint) from None
        except Exception as error:  # the library raises Exception itself
            text, hint = f"data: {path} is not a tokenizer.json", "take the tokenizer.json of the model's folder"
            raise ZbcError("E501", text, hint=hint, details=[str(error)[:200]]) from None
        self.name = hashlib.sha256(raw).hexdigest()
        self.vocab = max(self._library.get_vocab().values(), default=-1) + 1
        names = _ENDS if end is None else (end,)
        found = [number for name in names if (number := self._library.token_to_id(name)) is not None]
        if not found:
            text = f"data: {path} has no token {' or '.join(names)} to end documents with"
            raise ZbcError("E501", text, hint="name one of its tokens with --end")
        self.end: int | None = found[0]

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [encoding.ids for encoding in self._library.encode_batch(list(texts), add_special_tokens=False)]


Tokenizer = Bytes | Json


def tokenize(
    texts: Sequence[str], out: Path, tokenizer: Tokenizer, *, done: Callable[[int], None] = lambda count: None
) -> Tokens:
    """Writes `out` and its JSON sidecar; calls `done(bytes)` after every piece of text. Raises E501 (the text, or `out`
    exists), E608 (cannot be written)."""
    if os.path.exists(out):
        raise ZbcError("E501", f"data: {out} exists", hint="name another file with -o, or remove this one")
    files = _inputs(texts, out)
    dtype = "uint16" if tokenizer.vocab <= 2**16 else "uint32"
    part, count, documents = out.with_name(out.name + ".part"), 0, 0
    try:
        with folders_for(out), part.open("ab") as target:
            _alone(target, out)
            try:
                target.truncate(0)  # of an attempt that was killed
                for piece in (piece for file in files for piece in _pieces(file)):
                    count += _write(target, piece, tokenizer, dtype)
                    documents += len(piece.texts) if piece.each else int(piece.last)
                    done(piece.size)
                target.flush()
                os.fsync(target.fileno())
            except BaseException:
                part.unlink()
                raise
            made = Tokens(dtype, count, tokenizer.vocab, tokenizer.end, documents, tokenizer.name)
            write_sidecar(out, made)
            os.replace(part, out)
    except OSError as error:
        hint = "choose a place that can be written and has room"
        raise ZbcError("E608", f"cannot write {out}: {unwritten(out, error)}", hint=hint) from None
    return made


def total_bytes(texts: Sequence[str], out: Path) -> int:
    """Bytes of all the text that `tokenize` would read. Raises E501."""
    return sum(_size(file) for file in _inputs(texts, out))


def _inputs(texts: Sequence[str], out: Path) -> list[Path]:
    """The files of `texts`, without those of an earlier attempt."""
    own = {path.resolve() for path in (out.with_name(out.name + ".part"), sidecar(out))}
    return [file for file in text_files(list(texts)) if file.resolve() not in own]


def _alone(target: BinaryIO, out: Path) -> None:
    """Raises E501 if another process is making the same file. Not checked if the file system has no locks."""
    try:
        fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released at the end of the process, however it ends
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            text = f"data: another process is making {out}"
            raise ZbcError("E501", text, hint="wait for it, or name another file with -o") from None


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise unreadable(file, error) from None


@dataclass(frozen=True)
class TextPiece:
    """Texts of consecutive bytes of a file. A document ends after each of them if `each`, after all if `last`."""

    size: int
    texts: list[str]
    each: bool
    last: bool  # the file ends here


def _pieces(file: Path) -> Iterator[TextPiece]:
    """The pieces of a file; an empty one is one piece."""
    lines, start = file.suffix == ".jsonl", 0
    try:
        source = file.open("rb")
    except OSError as error:
        raise unreadable(file, error) from None
    with source:
        size, last = _size(file), False
        while not last:
            raw = _read(source, whole_lines=lines)
            problem = not_text(file, raw, start)
            if problem is not None:
                raise problem
            texts = list(_documents(file, raw, start)) if lines else [raw.decode()]
            start += len(raw)
            last = start >= size or not raw
            yield TextPiece(len(raw), texts, lines, last)


def _read(source: BinaryIO, *, whole_lines: bool) -> bytes:
    """About PIECE bytes, up to the end of a line, or of a character in a text without line ends."""
    raw = source.read(PIECE)
    if len(raw) < PIECE or raw.endswith(b"\n"):
        return raw
    rest = source.readline(-1 if whole_lines else PIECE)
    raw += rest
    while not rest.endswith(b"\n") and (more := source.read(1)):
        if more[0] & 0xC0 != 0x80:  # the first byte of a character
            source.seek(-1, os.SEEK_CUR)
            break
        raw += more
    return raw


def _documents(file: Path, raw: bytes, start: int) -> Iterator[str]:
    """The texts of whole lines; the first one begins at byte `start` of `file`. Raises E501 with the number of one."""
    lines = raw.split(b"\n")
    starts = accumulate((len(line) + 1 for line in lines), initial=start)
    for line, start in ((line, start) for line, start in zip(lines, starts, strict=False) if line.strip()):
        try:
            text = json.loads(line)["text"]
        except (ValueError, RecursionError, KeyError, TypeError):
            text = None
        if not isinstance(text, str) or "\0" in text:
            shown = f'data: {file} has a line that is no object with a "text" without NUL: {line[:60]!r}'
            hint = "one JSON object a line; other text belongs into files with other names"
            raise ZbcError("E501", shown, where=line_at(file, start), hint=hint)
        if (half := _SURROGATE.search(text)) is not None:
            near = text[max(0, half.start() - 20) : half.end()]
            shown = f"data: {file} has a line with half of a character, {half[0]!a}, after {near[:-1]!a}: {line[:60]!r}"
            hint = r"\ud800 to \udfff come in pairs in JSON; drop or replace the ones that are alone"
            raise ZbcError("E501", shown, where=line_at(file, start), hint=hint)
        yield text


def _write(target: BinaryIO, piece: TextPiece, tokenizer: Tokenizer, dtype: str) -> int:
    """Appends the tokens of a piece; returns their number."""
    numbers = array.array(_CODES[dtype])
    for tokens in tokenizer.encode(piece.texts):
        numbers.extend(tokens)
        if tokenizer.end is not None and (piece.each or piece.last):
            numbers.append(tokenizer.end)
    if sys.byteorder == "big":
        numbers.byteswap()
    numbers.tofile(target)
    return len(numbers)
