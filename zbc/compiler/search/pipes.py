"""Orders for placements with two pipes, or with many legs, under real times and a memory limit.

The microbatches of each pipe start at an even pace; a list scheduler follows that order and fills its gaps (follow.py).
Good orders differ in the pace, the delay of the second pipe, the scheduler's look-ahead and its waiting time. The
combinations below were chosen by greedy cover over some hundred cases (p 3-8, m p-4p, even and uneven times, limits of
0.6 to 1.5 times p), and some more at published times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.passes.insert_comm import InsertComm
from zbc.compiler.passes.reduce_grads import ReduceGrads
from zbc.compiler.search import slots
from zbc.compiler.search.follow import Manner, fits, follow
from zbc.compiler.search.shifting import annealed
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.ir import Placement, Program

EPS = 1e-9
LEAST_TRIED, MOST_OPS = 3, 150_000  # of large programs only orders for a few seconds
STARTS = 2  # annealed orders
FAR = 40  # examined ops that amount to no limit
TIMED = 3e-5  # seconds of a budget that count for an op of a whole plan that is timed


class Recipe(NamedTuple):
    """Distance of a pipe's microbatches as a share of the full distance, offset of the second pipe in slots, manner."""

    distance: float
    offset: int
    manner: Manner


_SPLIT = (
    Recipe(0.5, 0, Manner(FAR, 0.5)),
    Recipe(0.75, 0, Manner(8, 0.5)),
    Recipe(0.625, 2, Manner(16, 0.25)),
    Recipe(0.75, 0, Manner(16, 0.25)),
    Recipe(1.0, 0, Manner(16, 0.25)),
    Recipe(0.75, 2, Manner(8, 0.25)),
    Recipe(0.75, 1, Manner(16, 0.5)),
    Recipe(1.0, 2, Manner(FAR, 0.5)),
    Recipe(1.5, 1, Manner(FAR, 0.0)),
    Recipe(1.0, 2, Manner(8, 0.0)),
    Recipe(1.5, 0, Manner(8, 0.5)),
    Recipe(1.25, 1, Manner(16, 0.25)),
    Recipe(0.75, 2, Manner(FAR, 0.5)),
    Recipe(1.0, 0, Manner(FAR, 0.0)),
)
_WHOLE = (
    Recipe(0.75, 0, Manner(8, 0.0)),
    Recipe(0.5, 0, Manner(FAR, 0.0)),
    Recipe(1.0, 0, Manner(8, 0.0)),
    Recipe(1.5, 0, Manner(FAR, 0.0)),
    Recipe(1.5, 1, Manner(8, 0.5)),
    Recipe(1.0, 2, Manner(8, 0.5)),
    Recipe(0.75, 2, Manner(8, 0.5)),
    Recipe(0.5, 2, Manner(8, 0.0)),
)


@dataclass(frozen=True, slots=True)
class TimedOrder:
    """An order that keeps to the limit, and ms of its step."""

    program: Program
    makespan: float
    span: float
    period: float = 0.0  # of consecutive steps; only if that is the objective

    def rank(self, objective: str) -> tuple[float, float]:
        """Sort key: the objective, then another step time."""
        if objective == "period":
            return self.period, self.span
        return (self.makespan, self.span) if objective == "makespan" else (self.span, self.makespan)


def packed(
    placement: Placement,
    m: int,
    costs: Costs,
    limits: Sequence[float],
    name: str,
    *,
    objective: str = "makespan",
    orders: Iterable[Program] = (),
    split: bool = False,
    target: float = 0.0,
    seconds: float = 0.0,
    seed: int = 0,
) -> Program:
    """The best order found; `orders` made elsewhere take part. `limits` are activation units per rank.

    With `split`, B and W are ops of their own, and the best orders are annealed for some `seconds`. Stops at `target`
    ms. Raises E303 if no order keeps to the limits.
    """
    found: list[TimedOrder] = []
    for program in _candidates(placement, m, costs, limits, name, orders, split):
        found.append(_timed(program, costs, objective))
        if found[-1].rank(objective)[0] <= target * (1 + EPS):
            return found[-1].program
        if len(found) >= LEAST_TRIED and len(found) * program.size > MOST_OPS:
            break
    if not found:
        raise ZbcError("E303", f"does not fit: no order of {name} keeps to the limit", hint="raise the memory limit")
    best = _best(found, objective)
    if split and seconds > 0:
        # A longer annealing would not pass through the last order of one that ran out of time. If another objective is
        # annealed, that order might beat all of the longer one's, so it does not count.
        exact = objective != "period" and not any(costs.column("reduce"))
        beside = 0.0 if exact else TIMED * best.program.size
        starts = sorted(found, key=lambda one: one.rank(objective))[:STARTS]
        for start in starts:
            share = seconds / len(starts)
            for order, ended in annealed(
                start.program, costs, limits, objective, share, target=target, beside=beside, seed=seed
            ):
                if ended or exact:
                    best = _best([best, _timed(order, costs, objective)], objective)
            if best.rank(objective)[0] <= target * (1 + EPS):
                break
    return best.program


def _timed(program: Program, costs: Costs, objective: str) -> TimedOrder:
    """The order with its gradient reductions, if they take time: an order that leaves time for them is better."""
    at = Context(program, costs)
    if any(costs.column("reduce")):
        sent = Context(InsertComm().run(program, at), costs)
        at = Context(ReduceGrads().run(sent.program, sent), costs)
    timeline = at.timeline
    period = at.step_ms(objective) if objective == "period" else 0.0
    return TimedOrder(program, timeline.makespan, timeline.span, period)


def _best(found: Iterable[TimedOrder], objective: str) -> TimedOrder:
    """The first order that no other beats by more than rounding."""
    first, *rest = found
    for one in rest:
        (a, next_a), (b, next_b) = one.rank(objective), first.rank(objective)
        first = one if a < b - EPS or (a < b + EPS and next_a < next_b - EPS) else first
    return first


def _candidates(
    placement: Placement,
    m: int,
    costs: Costs,
    limits: Sequence[float],
    name: str,
    orders: Iterable[Program],
    split: bool,
) -> Iterator[Program]:
    recipes = _SPLIT if split else _WHOLE
    for program in orders:
        if fits(program, costs, limits):
            yield program
            yield from (follow(program, costs, limits, manner) for manner in (Manner(2), Manner(8), Manner(FAR, 0.5)))
    full, slowest = slots.full_distance(placement), False
    for recipe in recipes:
        distance = max(1, round(recipe.distance * full))
        base = slots.program(placement, slots.steady(placement, m, distance, recipe.offset), name, split=split)
        if fits(base, costs, limits):
            slowest = True
            yield follow(base, costs, limits, recipe.manner)
    if not slowest:  # little memory: microbatches ever farther apart, finally one after another
        yield from _spread(placement, m, costs, limits, name, split)


def _spread(
    placement: Placement, m: int, costs: Costs, limits: Sequence[float], name: str, split: bool
) -> Iterator[Program]:
    distance, alone = 2 * slots.full_distance(placement), 2 * placement.stages
    pipes = len(placement.pipes)
    while True:
        distance = min(distance, pipes * alone)
        starts = slots.steady(placement, m, distance, distance // pipes)
        base = slots.program(placement, starts, name, split=split)
        if fits(base, costs, limits):
            yield base
            yield from (follow(base, costs, limits, Manner(look, wait)) for look, wait in ((8, 0.0), (FAR, 0.5)))
            return
        if distance == pipes * alone:
            return
        distance = distance * 5 // 4 + 1
