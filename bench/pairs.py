"""Many random pairs of a bidirectional or wave schedule and a size: `python bench/pairs.py [COUNT] [FIRST]`.

Every program has to pass all checks and to run to its end on the operational machine of the tests; checks and machine
also have to agree on a damaged copy of each. Sizes go up to 12 ranks and 48 microbatches.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from tests.check.pairs import damaged, draw, verdicts

RANKS, MICROBATCHES = 12, 48


def stopped() -> bool:
    """Whether there is a file `stop` next to this one: then the bench ends and records its results so far."""
    return (Path(__file__).parent / "stop").exists()


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    record, began = Record("pairs"), time.perf_counter()
    record(f"# up to {RANKS} ranks and {MICROBATCHES} microbatches, seeds {first} to {first + count - 1}")
    good = refused = disagreements = ops = 0
    names: dict[str, int] = {}
    done = 0
    for seed in range(first, first + count):
        if stopped():
            break
        done += 1
        pair = draw(seed, ranks=RANKS, microbatches=MICROBATCHES)
        names[pair.name] = names.get(pair.name, 0) + 1
        ops += pair.program.size
        fine = verdicts(pair.program, seed)
        broken = verdicts(damaged(pair.program, random.Random(seed)), seed)
        good += fine == (True, True)
        refused += broken == (False, False)
        if fine != (True, True) or broken[0] != broken[1]:
            disagreements += 1
            record(f"seed {seed}: {pair}: check and machine say {fine} as it is, {broken} damaged")
        if (seed - first + 1) % 1000 == 0:
            print(f"{seed - first + 1} of {count}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    record(", ".join(f"{name} {number}" for name, number in sorted(names.items())))
    record(f"{done} programs of {ops / done:.0f} ops on average: {good} complete, deadlock-free and run to their end")
    record(f"{done} damaged copies: {refused} refused by both, {done - refused - disagreements} harmless to both")
    record(f"{disagreements} disagreements; {time.perf_counter() - began:.0f} s")
    record.write()
    return 1 if disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
