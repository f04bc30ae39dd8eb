"""Steps of many microbatches: ours at the default budget beside the best known of others.

    python bench/long_steps.py [--budget S] [--only NAME] [--truth] [--quick]

References are makespans in ms: of the building blocks of arXiv 2405.15362 expanded at all microbatches with the times
of the 14.6B model (arXiv 2401.10241), of the same with backwards in one piece at unit costs, and of the prototype of
this search after some 20 s (M_W/M_B = 0.4). `--truth` tells whose the gap to the bound is, the order's or the bound's:
of small problems with little memory CP-SAT proves the optimum.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

from record import Record

from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import BUDGET, SCHEDULES, Request
from zbc.compiler.search.engine import Engine, available
from zbc.compiler.search.exact import solve
from zbc.compiler.search.portfolio import Effort, search
from zbc.compiler.search.problem import Problem
from zbc.compiler.sim.bounds import bounds
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Placement

# T_F, T_B, T_W, T_comm in ms and M_W/M_B; the 14.6B ones are those of p = 16 with m = 48 and m = 128, and of p = 24.
TIMES = {
    "14.6B-48": (11.347, 11.248, 8.132, 0.377, 0.4324),
    "14.6B-128": (11.325, 11.308, 8.109, 0.378, 0.4324),
    "14.6B-24": (13.526, 13.938, 10.502, 0.755, 0.4324),
    "14.6B": (11.307, 11.254, 8.101, 0.379, 0.4),
    "1.5B": (18.522, 18.086, 9.337, 0.601, 0.4),
    "unit": (1.0, 1.0, 1.0, 0.0, 1.0),
}
ENOUGH = 1.003  # times a reference


class LongCase(NamedTuple):
    kind: str
    p: int
    m: int
    times: str
    reference: float
    share: float | None = None  # of p units; None: the schedule's own limit


CASES = [
    LongCase("v-min", 16, 256, "14.6B-128", 9591.9),
    LongCase("v-min", 4, 512, "14.6B-128", 18232.9),
    LongCase("v-min", 24, 192, "14.6B-24", 9577.8),
    LongCase("v-half", 32, 256, "14.6B-48", 8507.5),
    LongCase("v-half", 8, 512, "14.6B-48", 15868.7),
    LongCase("1f1b-v", 16, 64, "unit", 229.5, 11 / 16),
    LongCase("1f1b-v", 32, 128, "unit", 460.5, 22 / 32),
    LongCase("1f1b-v", 24, 192, "unit", 636.0, 17 / 24),  # our walks through tiles, as found here first
    LongCase("zb-auto", 32, 128, "14.6B", 7149.2, 0.5),  # ours before bodies were repeated, as the next
    LongCase("v-auto", 32, 128, "14.6B", 4782.1, 0.5),
    LongCase("zb-auto", 8, 64, "1.5B", 5449.34, 0.5),
    LongCase("zb-auto", 8, 64, "1.5B", 3822.32, 0.75),
    LongCase("zb-auto", 8, 128, "14.6B", 6752.92, 0.5),
    LongCase("zb-auto", 8, 128, "14.6B", 4593.13, 0.75),
    LongCase("zb-auto", 16, 64, "14.6B", 3397.21, 0.5),
    LongCase("zb-auto", 16, 64, "14.6B", 2464.15, 0.75),
    LongCase("zb-auto", 16, 128, "1.5B", 10928.37, 0.5),
    LongCase("zb-auto", 16, 128, "1.5B", 7833.8, 0.75),
    LongCase("v-auto", 8, 64, "1.5B", 3847.31, 0.5),
    LongCase("v-auto", 8, 64, "1.5B", 3198.96, 0.625),
    LongCase("v-auto", 8, 128, "14.6B", 4714.8, 0.5),
    LongCase("v-auto", 8, 128, "14.6B", 4067.75, 0.625),
    LongCase("v-auto", 16, 64, "14.6B", 2439.14, 0.5),
    LongCase("v-auto", 16, 64, "14.6B", 2240.98, 0.625),
    LongCase("v-auto", 16, 128, "1.5B", 7035.7, 0.5),
    LongCase("v-auto", 16, 128, "1.5B", 6370.84, 0.625),
]


TRUTH = [("linear", 4, 8, 0.5), ("linear", 4, 12, 0.5), ("linear", 6, 9, 0.5)]
TRUTH += [("V", 2, 10, 0.5), ("V", 3, 9, 2 / 3), ("V", 4, 8, 0.5)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of many microbatches.")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of each search")
    parser.add_argument("--only", default="", help="schedules whose names begin so")
    parser.add_argument("--truth", action="store_true", help="with small problems solved to the end")
    parser.add_argument("--quick", action="store_true", help="write no file")
    options = parser.parse_args()
    record, engine = Record("long-steps"), Engine(available())
    record(f"budget {options.budget:g} s, {'compiled' if engine.compiled else 'plain'}; makespans in ms")
    record("schedule    p    m  times      units  reference      ours   ratio     bound   gap   CPU s")
    above = 0
    for case in CASES:
        if case.kind.startswith(options.only):
            above += _row(record, case, options.budget)
    record(f"{above} above {ENOUGH:g} of the reference")
    if options.truth:
        truth(record, engine)
    if not options.quick:
        record.write()


def _row(record: Record, case: LongCase, budget: float) -> bool:
    card = SCHEDULES[case.kind]
    where = card.placement(case.p, card.default_chunks)
    f, b, w, comm, left = TIMES[case.times]
    costs = Costs.uniform(where, f, b, w, comm, left)
    limit = None if case.share is None else case.share * case.p
    began = time.process_time()
    request = Request(case.p, case.m, card.default_chunks, costs=costs, memory_limit=limit, budget=budget)
    program = card.make(request)
    took = time.process_time() - began
    units = max(rank.units for rank in peaks(program, costs))
    ours = simulate(program, costs).makespan
    held = costs if card.splits_backward else costs.joined()
    least = bounds(where, held, case.m, units if limit is None else limit).makespan
    record(
        f"{case.kind:8} {case.p:4} {case.m:4}  {case.times:9} {units:6.2f} {case.reference:10.1f} {ours:9.1f}"
        f" {ours / case.reference:7.4f} {least:9.1f} {ours / least - 1:5.1%} {took:7.1f}"
    )
    return ours > case.reference * ENOUGH


def truth(record: Record, engine: Engine) -> None:
    record("placement  p   m  limit     bound      ours   optimum  of the gap: the bound's, the order's")
    for name, p, m, share in TRUTH:
        where = Placement.linear(p) if name == "linear" else Placement.vshape(p)
        costs = Costs.uniform(where, 12.0, 12.0, 8.0, 0.0, 0.4)
        problem = Problem.make(where, costs, m, share * p)
        least = bounds(where, costs, m, share * p).makespan
        found = search(problem, "makespan", Effort.seconds(BUDGET, engine), engine, target=least).best
        if found is None:
            raise SystemExit("nothing fits")
        proof = solve(problem, "makespan", start=found.order, lower=least, seconds=120.0)
        best = proof.cost if proof.optimal else proof.lower
        record(
            f"{name:9} {p:2} {m:3} {share:5.2f}x {least:9.1f} {found.makespan:9.1f} {best:9.1f}"
            f"  {best / least - 1:6.1%} {found.makespan / best - 1:6.1%}"
        )


if __name__ == "__main__":
    main()
