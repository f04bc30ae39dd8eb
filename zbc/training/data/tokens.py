"""Training data from token files: windows read on demand.

A window is read with one call from the file; the page cache works as for a mapping. The file is not mapped, because a
mapped file that gets shorter kills the process with SIGBUS, whereas a read returns an error.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.training.data.corpus import describe
from zbc.training.data.pairs import Samples

_TYPES = {"uint16": torch.uint16, "uint32": torch.uint32}


class TokenFile:
    """One token file, open for reading. Raises E501 when opened or read."""

    def __init__(self, path: Path, dtype: str | None, vocab: int | None) -> None:
        """`vocab`: of the model, for `words`."""
        self.path, self.about, self._vocab = path, describe(path, dtype), vocab
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ZbcError("E501", f"data: cannot read {path}: {error.strerror}") from None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def read(self, start: int, count: int) -> Tensor:
        """Tokens `start` to `start + count` as int64."""
        width = self.about.width
        try:
            raw = os.pread(self._file, count * width, start * width)
        except OSError as error:
            raise ZbcError("E501", f"data: cannot read {self.path}: {error.strerror}") from None
        if len(raw) < count * width:
            end = os.fstat(self._file).st_size
            text = f"data: {self.path} ends at byte {end}, token {start + count - 1} lies after it"
            raise ZbcError("E501", text, hint="the file became shorter while it was read: make it again")
        return torch.frombuffer(bytearray(raw), dtype=_TYPES[self.about.dtype]).long()

    def words(self, start: int, count: int) -> Tensor:
        """The same. Raises E505 for a token that the model does not have."""
        tokens = self.read(start, count)
        largest = int(tokens.max())
        if self._vocab is not None and largest >= self._vocab:
            where = start + int(tokens.argmax())
            text = f"data: token {where} of {self.path} is {largest}, model.vocab is {self._vocab}"
            raise ZbcError("E505", text, hint="tokenized for another model, damaged, or data.dtype is wrong")
        return tokens


class TokenWindows(Samples):
    """Consecutive windows of `seq_len` tokens within each file; a target is its window shifted by one token. Raises
    E505 for a token outside of the model's vocabulary."""

    def __init__(self, paths: Sequence[str], dtype: str | None, seq_len: int, vocab: int | None) -> None:
        self._files = [TokenFile(Path(path), dtype, vocab) for path in paths]
        self._seq_len = seq_len
        counts = [max(0, (file.about.tokens - 1) // seq_len) for file in self._files]
        self._starts = list(accumulate(counts, initial=0))
        for file in self._files:
            known = file.about.vocab
            if vocab is not None and known is not None and known > vocab:
                text = f"data: {file.path} has tokens up to {known - 1}, model.vocab is {vocab}"
                raise ZbcError("E505", text, hint=f"set model.vocab = {known} or more and plan again")

    def __len__(self) -> int:
        return self._starts[-1]

    def rows(self, indices: Sequence[int], which: int) -> Tensor:
        return torch.stack([self._window(index, which) for index in indices])

    def _window(self, number: int, shift: int) -> Tensor:
        index = number % len(self)
        place = bisect_right(self._starts, index) - 1
        return self._files[place].words((index - self._starts[place]) * self._seq_len + shift, self._seq_len)
