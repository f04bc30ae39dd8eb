"""A filler: hashes the pieces of the next data in the time in which ranks wait, to find those that are there twice.

    [filler]
    task = "plans.hashing:make"

Each rank takes its share of the files and writes `hashes/rank-0.tsv`: a line for each piece of 256 lines of text, with
the SHA-256 of its words, its file and the number of its first line. `sort -m` of all files puts equal pieces together.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

LINES = 256  # of a piece: some tenths of a millisecond


class Hashing:
    """`step` hashes one piece; StopIteration when all are done."""

    seconds = 0.001

    def __init__(self, files: list[str], out: Path) -> None:
        self._pieces, self._out = self._read(files), out
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("")

    def step(self) -> None:
        name, line, words = next(self._pieces)
        digest = hashlib.sha256(" ".join(words).encode()).hexdigest()
        with self._out.open("a") as out:
            out.write(f"{digest}\t{name}\t{line}\n")

    @staticmethod
    def _read(files: list[str]) -> Iterator[tuple[str, int, list[str]]]:
        for name in files:
            with open(name, encoding="utf-8", errors="replace") as file:
                line = 1
                while piece := list(islice(file, LINES)):
                    yield name, line, [word for text in piece for word in text.split()]
                    line += len(piece)


def make(rank: int, ranks: int, files: str = "docs/*.md", folder: str = "hashes") -> Hashing:
    """The task of one rank: every `ranks`-th file that the pattern matches. For other files, call it with them."""
    found = sorted(glob.glob(files, recursive=True))
    return Hashing(found[rank::ranks], Path(folder) / f"rank-{rank}.tsv")
