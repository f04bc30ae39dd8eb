"""Groups whose ops take turns, on 2 x 2 ranks as processes: what that gains where sums are slow.

    python bench/braids_run.py [--schedules A,B] [--steps N] [--quick]

Stages have four units of 25 ms for each of F, B and W, as two blocks have, which meet once in F and once in B, over
gloo; a sum that is over sooner is held back until it has taken 20 ms. The same plan runs with the ops of a group in
turn and one after the other, both twice, and the gain is measured beside the one that is predicted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from ranks import results
from record import Record
from shared_run import RANKS, plan_of, rank_main

from zbc.compiler.cost.cost import Costs
from zbc.compiler.sim.shared import sums_of
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Program
from zbc.plan.directory import StoredPlan

TIMES = (25.0, 25.0, 25.0, 20.0)  # ms of F, B and W of a layer, and of a sum
UNITS, MICROBATCHES = 16, 6
GOAL = 0.8  # of the predicted gain
SCHEDULES = {"braid-v": "", "dualpipe-v": "overlap = true"}


def apart(program: Program, costs: Costs) -> float:
    """ms of the step if the ops of its groups run one after the other, each with its sums."""
    ranks = [[op for op in ops if not op.kind.is_mark] for ops in program.ranks]
    return simulate(program.with_ranks(ranks, by="apart"), costs).makespan


def measured(plan: StoredPlan, steps: int, port: int) -> tuple[float, float]:
    """Median ms of a step with the ops of groups in turn, and one after the other."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for number, turns in enumerate((True, False, False, True)):
        run = partial(rank_main, turns=turns)
        arguments, preload = (port + number, plan, steps), ("zbc.training.worker",)
        (ms,) = results(run, arguments, ranks=RANKS, count=1, preload=preload, limit=300)
        found[turns] += ms
    return statistics.median(found[True]), statistics.median(found[False])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="one step, and write no file")
    given = parser.parse_args()
    record, short = Record("braids-run"), 0
    record(f"# {UNITS} units of {TIMES[0]} ms for F, B and W and sums of {TIMES[3]} ms; {MICROBATCHES} microbatches")
    record(
        "schedule     in turn: predicted  measured    apart: predicted  measured    gain: predicted  measured  share"
    )
    with tempfile.TemporaryDirectory() as folder:
        for number, kind in enumerate(given.schedules.split(",")):
            plan, made = plan_of(kind, Path(folder), m=MICROBATCHES, count=UNITS, times=TIMES, more=SCHEDULES[kind])
            found = made.compiled
            together, one_by_one = found.timeline.makespan, apart(found.program, found.costs)
            ms, other = measured(plan, 1 if given.quick else given.steps, 29700 + 10 * number)
            share = (other - ms) / (one_by_one - together)
            sums = sums_of(found.timeline, found.costs)
            hidden = 0.0 if sums is None else sums.hidden
            record(
                f"{kind:11} {together:19.1f} {ms:9.1f} {one_by_one:19.1f} {other:9.1f}"
                f" {one_by_one - together:18.1f} {other - ms:9.1f}  {share:5.3f}  ({hidden:.0%} hidden, predicted)"
            )
            short += share < GOAL
    if not given.quick:
        record.write()
    return int(short > 0)


if __name__ == "__main__":
    sys.exit(main())
