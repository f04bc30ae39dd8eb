"""Small pipelines and their proven optima, for tests/search/test_optimal.py: writes tests/search/optima.json.

    python bench/optima.py [SECONDS]

Each case gets at most SECONDS (600) of CP-SAT; those not proven within them are named and left out. Which cases there
are is fixed below, whatever a search finds on them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from zbc.compiler.cost import Costs
from zbc.compiler.search.engine import Engine, available
from zbc.compiler.search.exact import solve
from zbc.compiler.search.feasible import least, one_by_one
from zbc.compiler.search.portfolio import Effort, search
from zbc.compiler.search.problem import Problem
from zbc.ir import Placement

FILE = Path(__file__).parent.parent / "tests" / "search" / "optima.json"
# T_F, T_B, T_W, T_comm in ms and M_W/M_B: the profiles of arXiv 2401.10241, table 9, and unit times.
PROFILES = {
    "1.5B": (18.522, 18.086, 9.337, 0.601, 0.4),
    "6.2B": (29.718, 29.444, 19.927, 0.527, 0.4),
    "unit": (1.0, 1.0, 1.0, 0.0, 1.0),
}
# p, m, memory as a multiple of 1F1B's, objective
LINEAR = [
    (2, 6, 0.5, "span"),
    (3, 5, 2 / 3, "span"),
    (3, 8, 1.0, "makespan"),
    (4, 5, 0.75, "span"),
    (4, 8, 0.5, "makespan"),
    (4, 8, 1.0, "span"),
    (4, 8, 1.5, "span"),
    (4, 8, 2.0, "makespan"),
]
V = [
    (2, 4, 0.5, "makespan"),
    (2, 6, 0.75, "span"),
    (2, 8, 1.0, "span"),
    (3, 5, 0.5, "makespan"),
    (3, 6, 2 / 3, "span"),
    (3, 6, 1.0, "makespan"),
    (4, 6, 0.5, "span"),
    (4, 6, 1.0, "makespan"),
    (4, 8, 0.75, "span"),
]
UNEVEN = 20


def cases() -> Iterator[tuple[str, Placement, Costs, int, float, str]]:
    """Name, placement, costs, microbatches, limit in activation units, objective."""
    for profile, (f, b, w, comm, act_w) in PROFILES.items():
        for kind, sizes in (("linear", LINEAR), ("V", V)):
            for p, m, share, objective in sizes:
                where = Placement.linear(p) if kind == "linear" else Placement.vshape(p)
                name = f"{profile} {kind} p={p} m={m} {share:.3g}x {objective}"
                yield name, where, Costs.uniform(where, f, b, w, comm, act_w), m, round(share * p, 6), objective
    rng = Random(2026)
    for number in range(UNEVEN):
        kind, p, m = rng.choice(("linear", "V")), rng.randint(2, 4), rng.randint(3, 6)
        where = Placement.linear(p) if kind == "linear" else Placement.vshape(p)
        costs = uneven(rng, where)
        needs = max(least(Problem.make(where, costs, m, None)))
        limit = round(needs * rng.uniform(1.0, 2.5) + 0.005, 2)
        objective = rng.choice(("span", "makespan"))
        yield f"uneven {number} {kind} p={p} m={m} {objective}", where, costs, m, limit, objective


def uneven(rng: Random, where: Placement) -> Costs:
    """Every number of every stage its own."""
    f, b, w, comm, act_w = PROFILES[rng.choice(("1.5B", "6.2B"))]
    n = where.stages
    v = n / where.ranks
    times = [tuple(round(x / v * rng.uniform(0.7, 1.3), 1) for _ in range(n)) for x in (f, b, w)]
    act_b = tuple(round(rng.uniform(0.7, 1.3) / v, 2) for _ in range(n))
    act_w = tuple(round(a * act_w * rng.uniform(0.7, 1.3), 2) for a in act_b)
    pipe = where.pipes[0]
    links = tuple(round(comm * rng.uniform(0.5, 2), 1) if pipe[s] != pipe[s + 1] else 0.0 for s in range(n - 1))
    return Costs(*times, act_b, act_w, (links,))


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    engine = Engine(available())
    rows, missing = [], []
    for name, where, costs, m, limit, objective in cases():
        problem = Problem.make(where, costs, m, limit)
        found = search(
            problem, objective, Effort(20_000_000), engine, orders=[("one by one", one_by_one(problem))]
        ).best
        if found is None:
            sys.exit(f"{name}: no order")
        began = time.perf_counter()
        proof = solve(problem, objective, start=found.order, seconds=seconds)
        took = time.perf_counter() - began
        print(
            f"{name}: found {found.cost(objective):.3f}, best {proof.cost:.3f}, proven {proof.lower:.3f}, {took:.0f} s"
        )
        if not proof.optimal:
            missing.append(name)
            continue
        row = {"name": name, "ranks": where.pipes[0], "m": m, "limit": limit, "objective": objective}
        row |= {key: getattr(costs, key) for key in ("f", "b", "w", "act_b", "act_w")}
        rows.append(row | {"comm": costs.comm[0], "optimum": round(proof.cost, 6)})
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(f"{len(rows)} proven, in {FILE.name}; not proven: {', '.join(missing) or 'none'}")


if __name__ == "__main__":
    main()
