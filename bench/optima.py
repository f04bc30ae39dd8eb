"""Small pipelines and their proven optima, for tests/search/test_optimal.py: writes tests/search/optima.json.

    python bench/optima.py [SECONDS]
    python bench/optima.py --new [COUNT] [--odd] [--minutes N]

Each case gets at most SECONDS (600) of CP-SAT; those not proven within them are named and left out. The cases are fixed
below, independent of search results.

With `--new`, other random cases instead, until COUNT (40) are proven within SECONDS (20) each: how often the search,
with the work that the plain engine does in two seconds, finds the optimum. The record is a dated file; the tests keep
to the cases of the first form. With `--odd` their shapes are less like models: looped placements, a W that takes no
time, transfers longer than ops, stages a hundred times as long as others, a limit for each rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random

from record import Record

from tests.search.exact import solve
from zbc.compiler.cost.cost import Costs
from zbc.compiler.search.engine import Engine, available
from zbc.compiler.search.feasible import least, one_by_one
from zbc.compiler.search.portfolio import PLAIN_RATE, Effort, search
from zbc.compiler.search.problem import Problem
from zbc.compiler.sim.bounds import bounds
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
    """Costs with random numbers for every stage."""
    f, b, w, comm, act_w = PROFILES[rng.choice(("1.5B", "6.2B"))]
    n = where.stages
    v = n / where.ranks
    times = [tuple(round(x / v * rng.uniform(0.7, 1.3), 1) for _ in range(n)) for x in (f, b, w)]
    act_b = tuple(round(rng.uniform(0.7, 1.3) / v, 2) for _ in range(n))
    act_w = tuple(round(a * act_w * rng.uniform(0.7, 1.3), 2) for a in act_b)
    pipe = where.pipes[0]
    links = tuple(round(comm * rng.uniform(0.5, 2), 1) if pipe[s] != pipe[s + 1] else 0.0 for s in range(n - 1))
    return Costs.per_stage(*times, act_b, act_w, (links,))


def fresh(seed: int) -> Iterator[tuple[str, Placement, Costs, int, float, str]]:
    """Endless random cases, as `cases`."""
    rng = Random(seed)
    for number in count():
        kind, p, m = rng.choice(("linear", "V")), rng.randint(2, 4), rng.randint(2, 8)
        where = Placement.linear(p) if kind == "linear" else Placement.vshape(p)
        even = rng.random() < 0.3
        costs = Costs.uniform(where, *PROFILES[rng.choice(sorted(PROFILES))]) if even else uneven(rng, where)
        needs = max(least(Problem.make(where, costs, m, None)))
        limit = round(needs * rng.uniform(1.0, 2.5) + 0.005, 2)
        objective = rng.choice(("span", "makespan"))
        name = f"new {number} {kind} p={p} m={m} {'even' if even else 'uneven'} {objective}"
        yield name, where, costs, m, limit, objective


def odd(seed: int) -> Iterator[tuple[str, Placement, Costs, int, float | tuple[float, ...], str]]:
    """Endless random cases that are not like models."""
    rng = Random(seed)
    for number in count():
        p, kind = rng.randint(2, 4), rng.choice(("linear", "V", "looped"))
        m, v = rng.randint(1, 8 if p == 2 else 6), 1 if kind == "linear" else rng.choice((2, 3)) if p == 2 else 2
        where = {"linear": Placement.linear(p), "V": Placement.vshape(p, v), "looped": Placement.looped(p, v)}[kind]
        n, pipe, spread = where.stages, where.pipes[0], rng.choice(("hundredfold", "uneven", "even"))
        stretch = {"hundredfold": (1, 1, 30, 100), "uneven": (0.3, 0.8, 1.1, 1.7), "even": (1,)}[spread]
        f, b, w = (tuple(float(mean * rng.choice(stretch)) for _ in range(n)) for mean in (2, 2, rng.choice((0, 1))))
        act_b, share = tuple(round(rng.uniform(0.5, 1.5) / v, 2) for _ in range(n)), rng.choice((0, 0.4, 1, 1.4))
        comm = rng.choice((0.0, 0.3, 3.0, 20.0))
        links = tuple(comm if pipe[s] != pipe[s + 1] else 0.0 for s in range(n - 1))
        costs = Costs.per_stage(f, b, w, act_b, tuple(round(a * share, 2) for a in act_b), (links,))
        needs = least(Problem.make(where, costs, m, None))
        limit = tuple(round(need * rng.choice((1, 1.3, 2, 3)) + 0.005, 2) for need in needs)
        objective = rng.choice(("span", "makespan"))
        yield f"odd {number} {kind} p={p} v={v} m={m} {spread} {objective}", where, costs, m, limit, objective


def hit_rate(wanted: int, seconds: float, minutes: float, *, unlike_models: bool) -> None:
    """Records how often a search finds the optimum of a new case, and its gap for the others."""
    record, engine = Record("optima-odd" if unlike_models else "optima-new"), Engine(available())
    gaps: list[float] = []
    tried, stop = 0, time.monotonic() + 60 * minutes
    for name, where, costs, m, limit, objective in odd(2028) if unlike_models else fresh(2027):
        if len(gaps) == wanted or time.monotonic() > stop:
            break
        tried += 1
        problem = Problem.make(where, costs, m, limit)
        bound = getattr(bounds(where, costs, m, limit), objective)
        orders = [("one by one", one_by_one(problem))]
        found = search(problem, objective, Effort(2 * PLAIN_RATE), engine, orders=orders, target=bound).best
        if found is None:
            sys.exit(f"{name}: no order")
        proof = solve(problem, objective, start=found.order, lower=bound, seconds=seconds, workers=1)
        gap = found.cost(objective) / proof.cost - 1
        outcome = "not proven" if not proof.optimal else "optimal" if gap <= 1e-6 else f"{100 * gap:.2f}% above"
        record(f"{name} {limit} units: found {found.cost(objective):.3f}, proven {proof.lower:.3f}: {outcome}")
        gaps += [gap] if proof.optimal else []
    hits = sum(gap <= 1e-6 for gap in gaps)
    record(
        f"{tried} cases, {len(gaps)} of them proven within {seconds:g} s each: the search found {hits} of these optima,"
    )
    record(f"the worst of the rest {100 * max(gaps, default=0.0):.2f}% above (to reach: 90%, 2%)")
    record.write()


def prove(seconds: float) -> None:
    """Writes the file of the tests."""
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
        row |= {key: costs.column(key) for key in ("f", "b", "w")}
        row |= {"act_b": costs.units("kept"), "act_w": costs.units("left")}
        rows.append(row | {"comm": list(costs.links[0].values()), "optimum": round(proof.cost, 6)})
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(f"{len(rows)} proven, in {FILE.name}; not proven: {', '.join(missing) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Proven optima of small pipelines.")
    parser.add_argument("seconds", type=float, nargs="?", help="of the solver, for each case")
    parser.add_argument("--new", type=int, nargs="?", const=40, help="as many new cases instead, for a hit rate")
    parser.add_argument("--odd", action="store_true", help="new cases that are not like models")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no new case later than this")
    options = parser.parse_args()
    if options.new is not None:
        hit_rate(options.new, options.seconds or 20.0, options.minutes, unlike_models=options.odd)
    else:
        prove(options.seconds or 600.0)


if __name__ == "__main__":
    main()
