"""Tasks for fillers, as users write them."""

import time
from pathlib import Path

FOLDER = "."  # of what they count


class Sleeping:
    """Sleeps, and counts in a file; raises from step `fails` on, and ends after `ends`."""

    def __init__(self, rank, ranks, folder, ms, fails, ends):
        self.seconds, self._file = ms / 1e3, Path(folder) / f"rank-{rank}"
        self._fails, self._ends, self._count = fails, ends, 0

    def step(self):
        self._count += 1
        if self._count == self._fails:
            raise ValueError("no more of this")
        if self._ends and self._count > self._ends:
            raise StopIteration
        time.sleep(self.seconds)
        self._file.write_text(str(self._count))


def make(rank, ranks):
    return Sleeping(rank, ranks, FOLDER, 1.0, 0, 0)


def failing(rank, ranks):
    return Sleeping(rank, ranks, FOLDER, 1.0, 2, 0)


def nothing(rank, ranks):
    return None
