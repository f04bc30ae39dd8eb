"""Slices of microbatches in random schedules, and what they cost a compile: `python bench/slices.py [COUNT] [FIRST]`.

Every program has to pass all checks and to run to its end on the operational machine of the tests; of each a copy with
two slices swapped and a damaged one are judged by both as well, and they have to agree on them. A file `stop` beside
this one ends that part. Then 64 ranks and 512
microbatches are compiled whole and in 4 slices, which are four times the ops; the smaller of two times each.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.pairs import stopped
from bench.record import Record
from tests.check.pairs import damaged, verdicts
from tests.check.slices import draw, swapped
from tests.jobs import toml_text
from zbc.compiler.compile import compile_job, load_job

RANKS, MICROBATCHES, SLICES = 12, 24, 8


def agreement(record: Record, count: int, first: int) -> int:
    """The disagreements of proofs and machine."""
    began, names, ops, disagreements = time.perf_counter(), Counter[str](), 0, 0
    refused, done = Counter[str](), 0
    for seed in range(first, first + count):
        if stopped():
            break
        done += 1
        one = draw(seed, ranks=RANKS, microbatches=MICROBATCHES, slices=SLICES)
        names[one.name] += 1
        ops += one.program.size
        fine = verdicts(one.program, seed)
        broken = {
            change.__name__: verdicts(change(one.program, random.Random(seed)), seed) for change in (swapped, damaged)
        }
        for name, verdict in broken.items():
            refused[name] += verdict == (False, False)
        if fine != (True, True) or any(a != b for a, b in broken.values()):
            disagreements += 1
            record(f"seed {seed}: {one}: check and machine say {fine} as it is, {broken} damaged")
        if (seed - first + 1) % 500 == 0:
            print(f"{seed - first + 1} of {count}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    record(f"# up to {RANKS} ranks, {MICROBATCHES} microbatches, {SLICES} slices; seeds {first} to {first + done - 1}")
    record(", ".join(f"{name} {number}" for name, number in sorted(names.items())))
    record(f"{done} programs of {ops / done:.0f} ops on average: complete, proven and run to their end")
    record(f"refused by both: {refused['swapped']} copies with two slices swapped, {refused['damaged']} damaged")
    record(f"{disagreements} disagreements; {time.perf_counter() - began:.0f} s")
    return disagreements


def compiling(record: Record, p: int, m: int) -> None:
    """CPU seconds to compile a job whole and in 4 slices."""
    for kind in ("1f1b", "zb-h1"):
        took = {}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "zbc.toml"
            path.write_text(toml_text(kind=kind, pp=p, m=m, layers=p, costs={"f": 1.0, "b": 1.0, "w": 1.0}))
            for k in (1, 4) * 2:
                began = time.process_time()
                compile_job(load_job(path, [f"schedule.slices={k}"]), suggest=False, budget=0.0)
                took[k] = min(took.get(k, 1e9), time.process_time() - began)
        record(f"{kind} {p} x {m}: {took[1]:.2f} s of CPU whole, {took[4]:.2f} s in 4 slices: {took[4] / took[1]:.2f}")


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    record = Record("slices")
    wrong = agreement(record, count, first)
    compiling(record, 64, 512)
    record.write()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
