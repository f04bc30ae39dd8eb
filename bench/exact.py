"""200 steps without the optimizer's barrier against 200 with it, bit by bit after every step.

    python bench/exact.py [--steps N]

About one step in five is made to be clipped, one in seven has a gradient that is not finite; the first step is one or
the other. Weights, master weights and optimizer state are compared after each step with a run of one process that has
the barrier; the comparison is tests/runtime/test_ahead.py, which runs fewer steps of most combinations.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from record import Record

from tests.runtime.test_ahead import long_run


def main() -> None:
    parser = argparse.ArgumentParser(description="Bits with and without the optimizer's barrier.")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    record = Record("exact")
    record(
        f"{'schedule':9} {'p':>2} {'weights':9} {'steps':>5} {'clipped':>7} {'skipped':>7} {'redone':>6}  equal bits"
    )
    for schedule, low, p in itertools.product(("1f1b", "zb-h1", "zb-v"), (False, True), (2, 4)):
        began = time.perf_counter()
        run = long_run(schedule, p, low, options.steps)  # raises where a bit differs
        skipped, redone = (sum(getattr(result, what) for result in run.results) for what in ("skipped", "redone"))
        weights = "bfloat16" if low else "float32"
        counts = f"{len(run.results):5} {redone - skipped:7} {skipped:7} {redone:6}"
        record(f"{schedule:9} {p:2} {weights:9} {counts}  after every step   # {time.perf_counter() - began:.1f} s")
    record.write()


if __name__ == "__main__":
    main()
