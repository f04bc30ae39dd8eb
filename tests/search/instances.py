"""Random pipelines: uneven times and memory, limits from the least feasible one up."""

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.search.candidates import Bench
from zbc.compiler.search.feasible import least_of, one_by_one
from zbc.compiler.search.portfolio import COMPILED_RATE
from zbc.compiler.search.problem import Problem
from zbc.compiler.sim.bounds import Bounds, bounds
from zbc.ir import Placement, Program

PROFILES = ((1.0, 1.0, 1.0, 0.0), (18.522, 18.086, 9.337, 0.601), (29.718, 29.444, 19.927, 0.527), (1.0, 2.0, 0.5, 0.2))


@dataclass(frozen=True)
class Instance:
    placement: Placement
    costs: Costs
    m: int
    limits: tuple[float, ...] | None

    @property
    def problem(self) -> Problem:
        return Problem.make(self.placement, self.costs, self.m, self.limits)

    @property
    def bounds(self) -> Bounds:
        return bounds(self.placement, self.costs, self.m, self.limits)

    def lower(self, objective: str) -> float:
        return self.bounds.makespan if objective == "makespan" else self.bounds.span

    @property
    def simplest(self) -> list[tuple[str, list[int]]]:
        """One microbatch after another: the order with the least memory."""
        return [("one by one", one_by_one(self.problem))]


def placement(rng: Random, p: int, v: int) -> Placement:
    if v == 1:
        return Placement.linear(p)
    return Placement.vshape(p, v) if rng.random() < 0.6 else Placement.looped(p, v)


def costs(rng: Random, where: Placement, *, digits: int | None = None) -> Costs:
    """Published profiles or random costs, even or uneven; B may leave more than it frees. `digits` rounds them."""

    def rounded(values):
        return tuple(values) if digits is None else tuple(round(x, digits) for x in values)

    n = where.stages
    v = n / where.ranks
    uneven = rng.choice((0.0, 0.2, 0.9))
    f, b, w, comm = rng.choice(PROFILES)
    times = [rounded(x / v * (1 + uneven * rng.uniform(-1, 1)) for _ in range(n)) for x in (f, b, w)]
    kept = rounded((1 + rng.choice((0.0, uneven)) * rng.uniform(-1, 1)) / v for _ in range(n))
    share = rng.choice((0.0, 0.4, 1.0, 1.3))
    left = rounded(a * (share if rng.random() < 0.7 else rng.random()) for a in kept)
    links = [[rng.choice((comm, comm, 2 * comm)) if a != b else 0.0 for a, b in pairwise(p)] for p in where.pipes]
    return Costs.per_stage(*times, kept, left, tuple(map(rounded, links)))


def limits(rng: Random, where: Placement, given: Costs, m: int) -> tuple[float, ...] | None:
    """None, the least feasible limit, or up to the memory of 1F1B, the same for all ranks or one per rank."""
    if rng.random() < 0.15:
        return None
    needs = least_of(where, given)
    most = rng.choice((1.0, 1.3, 2.0, float(where.ranks)))
    if rng.random() < 0.5:
        return (max(needs) * rng.uniform(1.0, most),) * where.ranks
    return tuple(need * rng.uniform(1.0, most) for need in needs)


def instance(
    seed: int, *, ranks: int = 5, chunks: int = 3, microbatches: int = 6, digits: int | None = None
) -> Instance:
    """Instance number `seed`, no larger than asked for."""
    rng = Random(seed)
    p, v, m = rng.randint(1, ranks), rng.randint(1, chunks), rng.randint(1, microbatches)
    where = placement(rng, p, v)
    given = costs(rng, where, digits=digits)
    return Instance(where, given, m, limits(rng, where, given, m))


def odd(seed: int, **sizes: int) -> Instance:
    """An instance in which ops of a stage or kind take no time, almost none, or far more than others."""
    given, rng = instance(seed, **sizes), Random(seed)

    def drawn(ms: tuple[float, ...]) -> tuple[float, ...]:
        usual = rng.choice((0.0, 1e-14, 1e-10, 1.0, 1.0, 100.0))
        return tuple(x * rng.choice((usual, usual, usual, 0.0, 1e-14)) for x in ms)

    times = {name: drawn(given.costs.column(name)) for name in ("f", "b", "w")}
    return replace(given, costs=given.costs.with_ms(**times))


class Recorder(Bench):
    """A bench that remembers every order it was offered, not only the best."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.seen: dict[tuple[int, ...], tuple[float, float, str]] = {}

    def _keep(self, candidate, among, most):
        self.seen[candidate.order] = (candidate.span, candidate.makespan, candidate.origin)
        return super()._keep(candidate, among, most)


def planned(given: Instance, objective: str, visits: int) -> Program:
    """The searched schedule of the instance's placement, with an effort that is the same on every machine."""
    p, v = given.placement.ranks, given.problem.v
    name = "zb-auto" if v == 1 else "v-auto" if given.placement == Placement.vshape(p) else "looped-zb"
    schedule = SCHEDULES[name]
    if schedule.placement(p, v) != given.placement:
        raise ValueError(f"no searched schedule for {given.placement}")
    request = Request(
        p, given.m, v, costs=given.costs, memory_limit=given.limits, objective=objective, budget=visits / COMPILED_RATE
    )
    return schedule.make(request)
