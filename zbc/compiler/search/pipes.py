"""Orders for placements with two pipes, or with many legs, under real times and a memory limit.

The microbatches of each pipe start at an even pace; a list scheduler follows that order and fills its gaps (follow.py).
Good orders differ in the pace, the delay of the second pipe, the scheduler's look-ahead and its waiting time. The
combinations in learned.json were chosen by greedy cover over some hundred cases (p 3-8, m p-4p, even and uneven times,
limits of 0.6 to 1.5 times p), and some more at published times.

They begin as orders of slots, turns without a time. With S stages per pipe, a microbatch that starts at slot t runs

    F s at slot  t + s,    B s (or BW s) at slot  t + 2S - 1 - s,    W s right after its B

For any starts, the ops of each rank in the order of their slots are an order without deadlock: an op's inputs from
another rank have smaller slots, and ops that share a slot do not need each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from zbc.compiler.cost.cost import Costs
from zbc.compiler.passes.insert_comm import InsertComm
from zbc.compiler.passes.reduce_grads import ReduceGrads
from zbc.compiler.search.follow import Manner, fits, follow
from zbc.compiler.search.keys import paces
from zbc.compiler.sim.context import Context
from zbc.ir import Op, Placement, Program
from zbc.ops import round_trip

LEAST_TRIED, MOST_OPS = 3, 150_000  # of large programs only orders for a few seconds
FAR = 40  # examined ops that amount to no limit
Start = tuple[int, int]  # the slot at which a microbatch begins, and its pipe


def with_sums(program: Program, costs: Costs, objective: str) -> float:
    """ms of a step with its gradient reductions, by the objective."""
    sent = InsertComm().run(program, Context(program, costs))
    return Context(ReduceGrads().run(sent, Context(sent, costs)), costs).step_ms(objective)


def paced(
    placement: Placement, m: int, costs: Costs, limits: Sequence[float], *, split: bool, orders: Iterable[Program] = ()
) -> Iterator[Program]:
    """Yields orders that keep to the limits, in activation units per rank: of recipes, and of `orders` made elsewhere,
    the given ones and as a list scheduler follows them. With `split`, B and W are ops of their own."""
    found = 0
    for program in chain(_followed(costs, limits, orders), _by_recipes(placement, m, costs, limits, split)):
        yield program
        found += 1
        if found >= LEAST_TRIED and found * program.size > MOST_OPS:
            return
    if not found:
        yield from _spread(placement, m, costs, limits, split)


def _followed(costs: Costs, limits: Sequence[float], orders: Iterable[Program]) -> Iterator[Program]:
    for program in orders:
        if fits(program, costs, limits):
            yield program
            yield from (follow(program, costs, limits, manner) for manner in (Manner(2), Manner(8), Manner(FAR, 0.5)))


def _by_recipes(placement: Placement, m: int, costs: Costs, limits: Sequence[float], split: bool) -> Iterator[Program]:
    full = full_distance(placement)
    for share, offset, window, wait in paces(split=split):
        distance = max(1, round(share * full))
        base = by_slots(placement, steady(placement, m, distance, int(offset)), "paced", split=split)
        if fits(base, costs, limits):
            yield follow(base, costs, limits, Manner(int(window), wait))


def _spread(placement: Placement, m: int, costs: Costs, limits: Sequence[float], split: bool) -> Iterator[Program]:
    """With little memory: microbatches ever farther apart, finally one after another."""
    distance, alone = 2 * full_distance(placement), 2 * placement.stages
    pipes = len(placement.pipes)
    while True:
        distance = min(distance, pipes * alone)
        starts = steady(placement, m, distance, distance // pipes)
        base = by_slots(placement, starts, "paced", split=split)
        if fits(base, costs, limits):
            yield base
            yield from (follow(base, costs, limits, Manner(look, wait)) for look, wait in ((8, 0.0), (FAR, 0.5)))
            return
        if distance == pipes * alone:
            return
        distance = distance * 5 // 4 + 1


# ---- orders of slots -------------------------------------------------------------------------------------------------


def in_units(placement: Placement, m: int, unit: int) -> list[Start]:
    """Units of `unit` microbatches, dealt to the pipes in turn, two slots apart within a pipe. With even p and two
    pipes, or one, a unit of p fills the slots of every rank without two ops in one, and the next unit begins where its
    ops fit into the remaining slots."""
    pipes, stages = len(placement.pipes), placement.stages
    period = max(2 * stages, 2 * stages * unit // placement.ranks)
    starts = []
    for i in range(m):
        number, place = divmod(i, unit)
        j, pipe = divmod(place, pipes)
        starts.append((number * period + 2 * j, pipe))
    return starts


def steady(placement: Placement, m: int, distance: int, offset: int) -> list[Start]:
    """Microbatches of a pipe `distance` slots apart, without units; the second pipe `offset` slots after the first."""
    pipes = len(placement.pipes)
    return [(i // pipes * distance + i % pipes * offset, i % pipes) for i in range(m)]


def full_distance(placement: Placement) -> int:
    """The distance that just fills the slots of a rank, with fused backwards."""
    return 2 * placement.stages * len(placement.pipes) // placement.ranks


def by_slots(placement: Placement, starts: Iterable[Start], name: str, *, split: bool = False) -> Program:
    """The order of slots as a program; microbatch i starts as `starts[i]` says."""
    stages = placement.stages
    slots: list[list[tuple[int, int, Op]]] = [[] for _ in range(placement.ranks)]
    count = 0
    for i, (start, pipe) in enumerate(starts):
        count += 1
        for s in range(stages):
            listed, back = slots[placement.rank_of(s, pipe)], start + 2 * stages - 1 - s
            ops = enumerate(Op(kind, s, i, pipe) for kind in round_trip(split=split))
            listed += [(back if k else start + s, k, op) for k, op in ops]
    return Program(placement, count, tuple(tuple(op for *_, op in sorted(listed)) for listed in slots), (name,))
