"""A thousand random jobs whose steps have no flush: are their periods and peaks those of the unrolled steps?

    python bench/cycles.py [COUNT] [FIRST]

Another unroller and clock (tests/compiler/cycles.py) reads the text of each plan: peaks of 12 steps, and as the period
the mean over 24. Where steps come again after a number that does not divide 24, the mean is over 2,520.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from tests.compiler.cycles import wrong_cycle


def main() -> None:
    given = [int(text) for text in sys.argv[1:]]
    count, first = [*given, *(1000, 0)[len(given) :]]
    record, wrong, again, began = Record("cycles"), 0, 0, time.perf_counter()
    for seed in range(first, first + count):
        if wrong_cycle(seed) is None:
            continue
        again += 1
        found = wrong_cycle(seed, 2520)
        if found is not None:
            wrong += 1
            record(f"seed {seed}: {found}")
    record(f"{count} jobs, {wrong} wrong, {again} clocked for longer   # {time.perf_counter() - began:.0f} s")
    if len(sys.argv) == 1:
        record.write()
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
