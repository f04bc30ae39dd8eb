"""Random graphs of stages, judged by proofs and the tests' machine: `python bench/graphs.py [COUNT] [FIRST]`.

Each program, a damaged copy of it and one with a transfer that names another stage are checked, and run on the
operational machine; they have to agree. Up to 10 stages and 8 microbatches; a third of the programs has several stages
on a rank, half have their transfers from the compiler. A file `stop` beside this one ends it.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.pairs import stopped
from bench.record import Record
from tests.check.graphs import confused, draw
from tests.check.pairs import damaged, verdicts

STAGES, MICROBATCHES = 10, 8


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    record, began, found, wrong, ops, done = Record("graphs"), time.perf_counter(), Counter[str](), 0, 0, 0
    for seed in range(first, first + count):
        if stopped():
            break
        program = draw(seed, stages=STAGES, microbatches=MICROBATCHES)
        done, ops = done + 1, ops + program.size
        found["whose stages are no chain"] += program.placement.branches
        for name, change in (("as they are", None), ("damaged", damaged), ("confused", confused)):
            judged = verdicts(program if change is None else change(program, random.Random(seed)), seed)
            found[f"{name}: {'pass' if judged[0] else 'refused'}"] += 1
            if judged[0] != judged[1]:
                wrong += 1
                record(f"seed {seed} {name}: check and machine say {judged}")
    record(f"# up to {STAGES} stages and {MICROBATCHES} microbatches, seeds {first} to {first + done - 1}")
    record(f"{done} programs of {ops / done:.0f} ops on average")
    for name, number in sorted(found.items()):
        record(f"  {name} {number}")
    record(f"{wrong} disagreements; {time.perf_counter() - began:.0f} s")
    record.write()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
