"""Samples of unequal length: documents of token files, random ones, or a user's dataset."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.runtime.core.tensors import IGNORED
from zbc.runtime.seeding import seed_of
from zbc.training.data.data import Pairs
from zbc.training.data.pairs import Samples
from zbc.training.data.tokens import TokenFile

AT_ONCE = 2**24  # tokens of a file that are scanned at a time
SPREAD = 1.1  # standard deviation of the logarithm of random lengths


class Documents(Samples):
    """A map-style dataset of sequences with lengths known in advance; as `Samples` each is in a row of its own, of
    `room` tokens, with padding behind it."""

    lengths: Tensor  # (samples,) int64
    room: int
    padding: int = IGNORED  # the target of padding, which does not count

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def pair(self, number: int) -> tuple[Tensor, Tensor]:
        """The input and the target of a sample, both (tokens, ...)."""

    def looks(self) -> int:
        """A digest of a few samples that do not depend on files and the seed alone."""
        return 0

    def digest(self) -> int:
        raw = self.lengths.numpy().tobytes() + self.looks().to_bytes(5, "big")
        return int.from_bytes(hashlib.sha256(raw).digest()[:5], "big")

    def rows(self, indices: Sequence[int], which: int) -> Tensor:
        return self.filled([[i] for i in indices], self.room, which)

    def filled(self, rows: Sequence[Sequence[int]], room: int, which: int) -> Tensor:
        """Inputs or targets of rows of several samples, with padding behind them: (rows, room, ...)."""
        parts = [[self.pair(i)[which] for i in row] for row in rows]
        like = next((sample for row in parts for sample in row), None)
        like = self.pair(0)[which] if like is None else like
        found = like.new_full((len(rows), room, *like.shape[1:]), (0, self.padding)[which])
        for target, row in zip(found, parts, strict=True):
            if row:
                joined = torch.cat(row)
                target[: len(joined)] = joined
        return found


class RandomDocuments(Documents):
    """Random tokens of log-normal lengths, made on demand from the sample's number."""

    def __init__(self, vocab: int, longest: int, seed: int, count: int = 2**16) -> None:
        self._vocab, self._seed, self.room = vocab, seed, longest
        source = torch.Generator().manual_seed(seed_of(seed, "lengths"))
        drawn = torch.empty(count, dtype=torch.float64).log_normal_(math.log(longest / 6), SPREAD, generator=source)
        self.lengths = drawn.ceil().clamp(1, longest).long()

    def pair(self, number: int) -> tuple[Tensor, Tensor]:
        index = number % len(self)
        source = torch.Generator().manual_seed(seed_of(self._seed, "noise", index))
        tokens = torch.randint(self._vocab, (int(self.lengths[index]) + 1,), generator=source)
        return tokens[:-1], tokens[1:]


class TokenDocuments(Documents):
    """Documents of token files, in pieces of at most `longest` tokens; a target is its piece shifted by one token.

    Raises E110 for a file without an end-of-document token, E505 for a token outside of the vocabulary.
    """

    def __init__(self, paths: Sequence[str], dtype: str | None, longest: int, vocab: int | None) -> None:
        self._files = [TokenFile(Path(path), dtype, vocab) for path in paths]
        found, self.room = [_pieces(file, longest) for file in self._files], longest
        self._starts = torch.cat([starts for starts, _ in found])
        self.lengths = torch.cat([lengths for _, lengths in found])
        self._firsts = [*accumulate((len(starts) for starts, _ in found), initial=0)]

    def pair(self, number: int) -> tuple[Tensor, Tensor]:
        index = number % len(self)
        file = self._files[bisect_right(self._firsts, index) - 1]
        tokens = file.words(int(self._starts[index]), int(self.lengths[index]) + 1)
        return tokens[:-1], tokens[1:]


def _pieces(file: TokenFile, longest: int) -> tuple[Tensor, Tensor]:
    """The first tokens of pieces of documents in a file, and the numbers of tokens they have to predict."""
    end, tokens = file.about.end, file.about.tokens
    if end is None:
        text = f"data: {file.path} does not say which token ends a document, so its samples have no length"
        raise ZbcError("E110", text, hint='tokenize it with an end token, or set data.balance = "none"')
    ends = [torch.nonzero(file.read(a, min(AT_ONCE, tokens - a)) == end)[:, 0] + a for a in range(0, tokens, AT_ONCE)]
    last = torch.tensor([tokens - 1] * (tokens > 0), dtype=torch.int64)
    stops = torch.tensor(sorted({*torch.cat([*ends, last]).tolist()}), dtype=torch.int64) + 1
    begins = torch.cat([torch.zeros(min(1, len(stops)), dtype=torch.int64), stops[:-1]])
    lengths = stops - begins - 1
    counts = (lengths + longest - 1) // longest
    which = torch.repeat_interleave(torch.arange(len(counts)), counts)
    piece = torch.arange(len(which)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    starts = begins[which] + piece * longest
    return starts, (stops[which] - 1 - starts).clamp(max=longest)


class PairDocuments(Documents):
    """A user's dataset of (input, target) sequences with an attribute `lengths`, one number for each.

    Raises E110 for a dataset without it, or with a sample longer than `longest` tokens, the length of a row.
    """

    def __init__(self, pairs: Pairs, dataset: Any, name: str, longest: int) -> None:
        self._pairs, self._name, self.room = pairs, name, longest
        given = getattr(dataset, "lengths", None)
        if given is None or len(given) != len(pairs):
            found = "has no lengths" if given is None else f"has {len(given)} lengths for {len(pairs)} samples"
            text = f"data: {name} {found}, and data.balance needs one for each sample"
            raise ZbcError("E110", text, hint="give the dataset an attribute lengths: tokens of each sample")
        self.lengths = torch.as_tensor(given).long()
        wrong = torch.nonzero((self.lengths > longest) | (self.lengths < 1))[:, 0]
        if len(wrong):
            first = int(wrong[0])
            text = f"data: sample {first} of {name} has {int(self.lengths[first])} tokens, a row has room for {longest}"
            raise ZbcError("E110", text, hint="cut it, or set a larger model.seq_len")

    def looks(self) -> int:
        return self._pairs.digest()

    def pair(self, number: int) -> tuple[Tensor, Tensor]:
        ((x, y),), index = self._pairs.read([number]), number % len(self)
        wanted = int(self.lengths[index])
        for what, found in (("input", x), ("target", y)):
            if found.dim() == 0 or len(found) != wanted:
                text = f"data: the {what} of sample {index} of {self._name} has shape {list(found.shape)}"
                raise ZbcError("E110", f"{text}, its length is {wanted}", hint="let both have one row for each token")
        for which, found in enumerate((x, y)):
            self._pairs.words.checked(found, which, lambda row: f"sample {index} of {self._name}")
        return x, y


class Some(Documents):
    """The first `count` of `documents`."""

    def __init__(self, documents: Documents, count: int) -> None:
        self._documents, self.padding, self.room = documents, documents.padding, documents.room
        self.lengths = documents.lengths[:count]

    def looks(self) -> int:
        return self._documents.looks()

    def pair(self, number: int) -> tuple[Tensor, Tensor]:
        epoch, index = divmod(number, len(self))
        return self._documents.pair(index + epoch * len(self._documents))
