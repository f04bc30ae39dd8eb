"""How many randomly deadlocked orders `zbc check --suggest` repairs, and how much slower they are than they were."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from tests.interop.deadlocked import NAMED, SEARCHED, broken, working
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.sim.simulate import simulate
from zbc.interop.repair import repair

COUNT = 200
RANKS, MICROBATCHES = [2, 3, 4, 6, 8], [4, 6, 8, 12, 16]


def measure(record: Record, title: str, names: list[str], seed: int) -> None:
    """COUNT orders of the schedules `names`, broken in three ways."""
    rng, ratios, seconds, moved = Random(seed), [], [], []
    for _ in range(COUNT):
        program = working(rng, names, RANKS, MICROBATCHES)
        costs = Costs.uniform(program.placement)
        wrong = broken(program, rng)
        began = time.perf_counter()
        found = repair(wrong, costs)
        seconds.append(time.perf_counter() - began)
        check_all(found.program)
        ratios.append(found.makespan / simulate(program, costs).makespan)
        moved.append(found.moved / program.size)
    close = sum(ratio <= 1.05 + 1e-9 for ratio in ratios)
    record(f"{title}: {', '.join(names)}")
    record(f"  repaired {COUNT} of {COUNT}; within 5% of the original step: {close} ({100 * close / COUNT:.1f}%)")
    record(f"  step over the original's: mean {sum(ratios) / COUNT:.3f}, worst {max(ratios):.3f}")
    record(f"  actions moved: mean {100 * sum(moved) / COUNT:.1f}%")
    record(f"  seconds: mean {sum(seconds) / COUNT:.2f}, longest {max(seconds):.2f}")


def main() -> None:
    record = Record("repair")
    record(f"# p in {RANKS}, m in {MICROBATCHES}, F = B = W = 1; ops exchanged, moved or shuffled until it deadlocks")
    measure(record, "named schedules", NAMED, seed=1)
    measure(record, "searched orders", SEARCHED, seed=2)
    record.write()


if __name__ == "__main__":
    main()
