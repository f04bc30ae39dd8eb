"""Random schedules of slices of microbatches, with slices of random lengths."""

import random
from dataclasses import replace

from tests.check.pairs import Made
from tests.lowered import lower
from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.ir import Kind, Program

NAMES = tuple(name for name, card in SCHEDULES.items() if not card.whole)
BY_HAND = tuple(name for name in NAMES if not SCHEDULES[name].searched)
SEARCHED = tuple(name for name in NAMES if SCHEDULES[name].searched)
UNITS = 200  # slices times stages of a search, which takes longer to make


def draw(seed: int, *, ranks: int, microbatches: int, slices: int) -> Made:
    """Schedule number `seed`."""
    rng = random.Random(seed)
    name = rng.choice(SEARCHED if rng.random() < 0.25 else BY_HAND)
    card = SCHEDULES[name]
    while True:
        p, m, k = rng.randint(1, ranks), rng.randint(1, microbatches), rng.randint(1, slices)
        v = rng.choice([v for v in (1, 2, 3) if card.allows(v)])
        if not card.searched or p * m * k * v <= UNITS:
            break
    placement = card.placement(p, v)
    costs = Costs.uniform(placement, rng.random() + 0.5, rng.random() + 0.5, rng.random(), rng.choice((0.0, 0.1)))
    if k > 1:
        rows, later = (shares(rng, k) for _ in range(2))
        costs = costs.cut(rows, f=later, b=later, w=rows)
    group = rng.randint(1, p) if "group" in card.options and rng.random() < 0.3 else None
    if card.groups is not None and group is not None:
        group = rng.choice(card.groups(p))
    request = Request(p, m, v, group=group, costs=costs, slices=k)
    return Made(name, request, lower(replace(card.make(request), dp=rng.choice((1, 1, 1, 2)))))


def swapped(program: Program, rng: random.Random) -> Program:
    """The program with two backwards of slices of one microbatch swapped; unchanged if no rank has two."""
    places = [
        (rank, i, j)
        for rank, ops in enumerate(program.ranks)
        for i, op in enumerate(ops)
        if op.kind in (Kind.B, Kind.BW) and op.slice
        for j in range(i + 1, len(ops))
        if ops[j][1:4] == op[1:4] and ops[j].kind in (Kind.B, Kind.BW)
    ]
    if not places:
        return program
    rank, i, j = rng.choice(places)
    ranks = [list(ops) for ops in program.ranks]
    ranks[rank][i], ranks[rank][j] = ranks[rank][j], ranks[rank][i]
    return replace(program, ranks=tuple(map(tuple, ranks)))


def shares(rng: random.Random, count: int) -> list[float]:
    each = [rng.random() + 0.2 for _ in range(count)]
    return [one / sum(each) for one in each]
