"""`auto` beside every named schedule, all with `--budget 0`, on drawn jobs whose steps are timed or weighed in a way of
their own: without a flush, with a shared vocabulary, with offload, with unequal microbatches.

    python bench/choosers.py COUNT .. [--first SEED]

COUNT: of jobs, for all classes or for each, in this order; 0 leaves one out.

Prints a line for each job on which `auto` is more than .1% longer than a named schedule, or has no plan where one has,
and for each class how many jobs were drawn, how many of them `auto` plans, and the CPU seconds of a job.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from tests.choices import CLASSES, NO_PLAN, compared, drawn

BEHIND = 0.001  # of a step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("counts", type=int, nargs="+")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="write no file")
    asked = parser.parse_args()
    counts = asked.counts * len(CLASSES) if len(asked.counts) == 1 else asked.counts
    record = Record("choosers")
    for what, count in zip(CLASSES, counts, strict=True):
        behind, planned, began = list[float](), 0, time.process_time()
        for seed in range(asked.first, asked.first + count):
            tables = drawn(what, seed)
            result = compared(tables)
            planned += result.auto < NO_PLAN
            if result.behind > BEHIND:
                behind.append(result.behind)
                named = f"{result.best} takes {result.named[result.best]:.3f} ms"
                record(f"{what} {seed}: auto {result.taken} {result.auto:.3f} ms, {named}: {100 * result.behind:+.2f}%")
        if not count:
            continue
        took = (time.process_time() - began) / count
        most = f", by {100 * max(behind):.2f}% at most" if behind else ""
        record(f"{what}: {count} jobs, {planned} planned, auto behind in {len(behind)}{most}; {took:.2f} CPU s each")
    if not asked.quick:
        record.write()


if __name__ == "__main__":
    main()
