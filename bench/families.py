"""What each family of candidates is worth: the search with all of them, and with each left out.

    python bench/families.py [--seconds S ...] [--families FAMILY ...]

Families: `keys` (learned gene vectors and the chains that mutate them), `policies`, `patterns` (building blocks of the
V placement), `rounds` (ZB-V's heuristic at real times). Forty random pipelines, larger than those of the tests, and the
settings of the zero bubble paper with the harder limits of bench/search.py. Every search does the work that the
compiled engine does in S seconds: 0 is the fast tier alone, 0.2 what the plain engine does in the usual 4 s. A loss is
the objective without the family over that with all, less one. `seed` leaves out nothing and draws other random numbers:
what differs by chance.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random
from typing import NamedTuple
from unittest.mock import patch

from record import Record, commit
from search import CASES, FRONTIER, PROFILES, M, P

from tests.search.instances import costs, limits, placement
from zbc.compiler.cost.cost import Costs
from zbc.compiler.search import patterns, portfolio
from zbc.compiler.search.candidates import Bench
from zbc.compiler.search.engine import Engine
from zbc.compiler.search.feasible import one_by_one
from zbc.compiler.search.portfolio import Effort, search
from zbc.compiler.search.problem import Problem
from zbc.compiler.search.rounds import Filling
from zbc.compiler.sim.bounds import bounds
from zbc.ir import Placement

RANDOM = 40
FAMILIES = ("seed", "keys", "policies", "patterns", "rounds", "policies+patterns+rounds")
PAPER = [(8, 24), (8, 64), (16, 48), (32, 96)]  # of its tables, those that are searched in a second or two


class Case(NamedTuple):
    name: str
    placement: Placement
    costs: Costs
    m: int
    limits: float | tuple[float, ...] | None
    objective: str


def cases() -> Iterator[Case]:
    """The paper's, the harder ones of bench/search.py, and random ones."""
    for profile in ("1.5B", "6.2B"):
        for p, m in PAPER:
            for kind, share in (("linear", 1.0), ("linear", 2.0), ("V", 1.0)):
                yield _published(profile, kind, p, m, share * p, "span")
    for case in CASES:
        yield _published(case.profile, case.placement, P, M, case.limit * P, case.objective)
    for p, m, units, _ in FRONTIER:
        yield _published("unit", "V", p, m, float(units), "span")
    rng = Random(17)
    for number in range(RANDOM):
        p, v = rng.choice((2, 3, 4, 6, 8)), rng.choice((1, 1, 2, 2, 3))
        m = rng.randint(p, 5 * p)
        where = placement(rng, p, v)
        given = costs(rng, where)
        objective = rng.choice(("span", "makespan", "period"))
        yield Case(
            f"random {number} p={p} v={v} m={m} {objective}", where, given, m, limits(rng, where, given, m), objective
        )


def _published(profile: str, kind: str, p: int, m: int, units: float, objective: str) -> Case:
    where = Placement.linear(p) if kind == "linear" else Placement.vshape(p)
    given = Costs.uniform(where, *PROFILES[profile], 1.0 if profile == "unit" else 0.4)
    return Case(f"{profile} {kind} {p}x{m} {units / p:.3g}x {objective}", where, given, m, units, objective)


def found(case: Case, visits: int, without: str, engine: Engine) -> float:
    """The objective of the best order found, ms."""
    problem = Problem.make(case.placement, case.costs, case.m, case.limits)
    target = bounds(case.placement, case.costs, case.m, case.limits).of(case.objective)
    with ExitStack() as stack:
        for family in filter(None, without.split("+")):
            for change in _left_out(family):
                stack.enter_context(change)
        orders = [("one by one", one_by_one(problem))]
        best = search(
            problem, case.objective, Effort(visits, int(without == "seed")), engine, orders=orders, target=target
        ).best
    return math.inf if best is None else best.cost(case.objective)


def _left_out(family: str) -> list[patch]:
    decode = Bench.decode

    def no_rounds(bench, recipe, origin):
        return None if isinstance(recipe, Filling) else decode(bench, recipe, origin)

    return {
        "seed": [],
        "keys": [
            patch.object(portfolio, "learned", lambda v: []),
            patch.object(portfolio, "_chain", lambda *_, **__: iter(())),
        ],
        "policies": [patch.object(portfolio, "policies", lambda v: [])],
        "patterns": [patch.object(patterns, "orders", lambda problem: iter(()))],
        "rounds": [patch.object(Bench, "decode", no_rounds)],
    }[family]


def main() -> None:
    parser = argparse.ArgumentParser(description="What each family of candidates is worth.")
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0, 0.2, 4.0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    options = parser.parse_args()
    engine, record = Engine(compiled=True), Record("families")
    record(f"# {commit()}")
    names = options.families
    for seconds in options.seconds:
        record()
        record(f"{seconds:g} s: loss in percent without a family")
        record(f"{'':40}{'ms':>10}" + "".join(f"{name:>{_width(name)}}" for name in names))
        losses: dict[str, list[float]] = {name: [] for name in names}
        for case in cases():
            visits = Effort.seconds(seconds, engine).visits
            full = found(case, visits, "", engine)
            for name in names:
                losses[name].append(100 * (found(case, visits, name, engine) / full - 1))
            record(f"{case.name:40}{full:10.3f}" + _line({name: losses[name][-1] for name in names}))
        for what, of in (("geometric mean", _mean), ("worst", max), ("best", min)):
            record(f"{what:50}" + _line({name: of(losses[name]) for name in names}))
    record.write()


def _line(values: dict[str, float]) -> str:
    return "".join(f"{value:{_width(name)}.3f}" for name, value in values.items())


def _width(name: str) -> int:
    return max(10, len(name) + 2)


def _mean(losses: list[float]) -> float:
    return 100 * (math.exp(sum(math.log1p(x / 100) for x in losses) / len(losses)) - 1)


if __name__ == "__main__":
    main()
