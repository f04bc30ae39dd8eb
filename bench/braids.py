"""Overlap groups in random orders, and braid-v against its bars: `python bench/braids.py [COUNT] [FIRST]`.

Half of the programs are braid-v at random costs, which have to pass all checks and to run to their end on the
operational machine of the tests; the other half are orders of other schedules with marks at random, many of which
deadlock. A copy of each with a moved mark and a damaged copy are checked as well. Checks and machine must always agree.

The bars, of the best known orders, are for chunks of F = B = W = 1 with sums of .3 in each F and B.
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
from tests.check.braids import draw, unmarked, with_sums
from tests.check.pairs import damaged, verdicts
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Kind, Placement, Program, groups

RANKS, MICROBATCHES, SUMS = 8, 24, 0.3
BARS = {
    (4, 12): 78.3,
    (8, 24): 157.9,
    (6, 20): 130.1,
    (3, 9): 58.7,
    (2, 6): 38.5,
    (4, 8): 59.7,
    (4, 5): 40.6,
    (4, 4): 35.3,
    (4, 1): 21.8,
    (8, 8): 72.6,
    (2, 2): 16.4,
}


def agreement(record: Record, count: int, first: int) -> int:
    """The number of disagreements between checks and machine."""
    began, names, ops, wrong, done = time.perf_counter(), Counter[str](), 0, 0, 0
    refused = Counter[str]()
    for seed in range(first, first + count):
        if stopped():
            break
        done += 1
        one = draw(seed, ranks=RANKS, microbatches=MICROBATCHES)
        names[one.name] += 1
        ops += one.program.size
        found = {"as drawn": verdicts(one.program, seed)}
        for change in (unmarked, damaged):
            found[change.__name__] = verdicts(change(one.program, random.Random(seed)), seed)
        for name, verdict in found.items():
            refused[name] += verdict == (False, False)
        sound = one.name != "braid-v" or found["as drawn"] == (True, True)
        if not sound or any(a != b for a, b in found.values()):
            wrong += 1
            record(f"seed {seed}: {one}: check and machine say {found}")
    record(f"# up to {RANKS} ranks, {MICROBATCHES} microbatches; seeds {first} to {first + done - 1}")
    record(", ".join(f"{name} {number}" for name, number in sorted(names.items())))
    record(f"{done} programs of {ops / max(1, done):.0f} ops on average; refused by both: {dict(refused)}")
    record(f"{wrong} disagreements; {time.perf_counter() - began:.0f} s")
    return wrong


def bars(record: Record) -> int:
    """The number of missed bars."""
    missed = 0
    record(f"chunks of F = B = W = 1, sums of {SUMS}: step of rows of p, m; zb-v as it is for comparison")
    for (p, m), bar in BARS.items():
        costs = with_sums(Costs.uniform(Placement.vshape(p), 2.0, 2.0, 2.0), SUMS)
        made, plain = (SCHEDULES[name].make(Request(p, m, 2, costs=costs)) for name in ("braid-v", "zb-v"))
        timeline = simulate(made, costs)
        chunks = max(rank.units for rank in peaks(made, costs)) * 2
        missed += timeline.makespan > bar + 1e-9 or chunks > 4 * p - 1
        most, other = max(exposed(made, costs)), simulate(plain, costs).makespan
        record(
            f"p={p} m={m:2d}  step {timeline.makespan:6.1f}  bar {bar:6.1f}  zb-v {other:6.1f}"
            f"  exposed at most {most:4.1f}, {(2 * p + 1) * SUMS:.1f} by formula  {chunks:.0f} chunks of {4 * p - 1}"
        )
    return missed


def exposed(program: Program, costs: Costs) -> list[float]:
    """ms of each rank in which its ops wait for sums."""
    found = []
    for ops in program.ranks:
        inside, ms = groups(ops), 0.0
        for step, op in enumerate(ops):
            if op.kind is Kind.OVERLAP:
                pair = ops[step + 1], ops[step + 2]
                alone = [costs.duration(one) - costs.sums(one)[1] for one in pair]
                ms += max(0.0, sum(costs.sums(one)[0] for one in pair) - sum(alone))
            elif step not in inside:
                ms += costs.sums(op)[1]
        found.append(ms)
    return found


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    record = Record("braids")
    missed = bars(record)
    wrong = agreement(record, count, first)
    record.write()
    return int(missed > 0 or wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
