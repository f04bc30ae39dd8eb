"""Two thousand random jobs under limits in units and in bytes: does every plan keep to both?

    python bench/limits.py [COUNT] [FIRST]

Each job is planned without `hardware.memory_gib`, with far more than it needs, with just what it needs and with less.
Counted is each plan above its units or bytes, and each with a longer step than the first where that would fit.
"""

from __future__ import annotations

import sys
import time
from multiprocessing import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from tests.search.limited import wrong_limits


def main() -> None:
    given = [int(text) for text in sys.argv[1:]]
    count, first = [*given, *(2000, 0)[len(given) :]]
    record, wrong, began = Record("limits"), 0, time.perf_counter()
    seeds = range(first, first + count)
    with Pool() as pool:
        for seed, found in zip(seeds, pool.imap(wrong_limits, seeds, chunksize=4), strict=True):
            if found is not None:
                wrong += 1
                record(f"seed {seed}: {found}")
    record(f"{count} jobs, {wrong} wrong   # {time.perf_counter() - began:.0f} s")
    if len(sys.argv) == 1:
        record.write()
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
