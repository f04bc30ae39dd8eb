"""Tasks for fillers, as users write them."""

import time
from pathlib import Path

FOLDER = "."  # of what they count


class Sleeping:
    """Sleeps, and counts in a file; raises at step `fails`."""

    def __init__(self, rank, fails=0):
        self._file, self._fails, self._count = Path(FOLDER) / f"rank-{rank}", fails, 0

    def step(self):
        self._count += 1
        if self._count == self._fails:
            raise ValueError("no more of this")
        time.sleep(1e-3)
        self._file.write_text(str(self._count))


def make(rank, ranks):
    return Sleeping(rank)


def failing(rank, ranks):
    return Sleeping(rank, 2)


def nothing(rank, ranks):
    return None
