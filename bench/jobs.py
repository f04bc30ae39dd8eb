"""Hundreds of random jobs, each run in a random way and by one rank, in double precision.

    python bench/jobs.py [COUNT] [FIRST]

What differs, or fails once training has begun, is printed with its seed, and ends this with 1. What varies is said in
tests/runtime/random_jobs.py.
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from record import Record

from tests.runtime.random_jobs import tried


def main() -> None:
    given = [int(text) for text in sys.argv[1:]]
    count, first = [*given, *(400, 0)[len(given) :]]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # what layers without elements are told
    record, found, began = Record("jobs"), Counter[str](), time.perf_counter()
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[tried(seed, Path(folder))] += 1
            except Exception:
                found["wrong"] += 1
                record(f"seed {seed}\n{traceback.format_exc()}")
    took, same, refused = time.perf_counter() - began, found["same"], found["refused"]
    record(f"{count} jobs: {same} as one rank, {refused} refused, {found['wrong']} wrong   # {took:.0f} s")
    if len(sys.argv) == 1:
        record.write()
    sys.exit(found["wrong"] > 0)


if __name__ == "__main__":
    main()
