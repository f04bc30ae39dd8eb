"""Random schedules with a shared vocabulary, of whole microbatches or slices, whole and damaged."""

import random
from dataclasses import replace

from tests.check import slices
from tests.check.pairs import Made
from tests.lowered import lower
from zbc.compiler.cost.cost import Costs
from zbc.compiler.passes.weave import Weave
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.context import Context
from zbc.ir import Op, Program


def draw(seed: int, *, ranks: int, microbatches: int, sliced: int) -> Made:
    """Schedule number `seed`: costs, transfers and times of collectives are random, too."""
    rng = random.Random(seed)
    name = rng.choice(slices.SEARCHED if rng.random() < 0.2 else slices.BY_HAND)
    card = SCHEDULES[name]
    while True:
        p, m = rng.randint(1, ranks), rng.randint(1, microbatches)
        k = rng.choice((1, 1, rng.randint(1, sliced)))
        v = rng.choice([v for v in (1, 2, 3) if card.allows(v)])
        if not card.searched or p * m * k * v <= slices.UNITS:
            break
    placement = card.placement(p, v)
    costs = Costs.uniform(placement, rng.random() + 0.5, rng.random() + 0.5, rng.random(), rng.choice((0.0, 0.1)))
    if k > 1:
        rows = slices.shares(rng, k)
        costs = costs.cut(rows, f=rows, b=rows, w=rows)
    own = {name: (rng.choice((0.0, rng.random() / k)),) * p for name in ("s", "t", "i", "e")}
    own |= {
        name: (rng.choice((0.0, rng.random() / (4 * k))),) * p for name in ("spread", "meet", "sum", "give", "take")
    }
    priced = costs.with_ms(**own)
    request = Request(p, m, v, costs=costs, slices=k)
    made, late = replace(card.make(request), dp=rng.choice((1, 1, 1, 2))), rng.choice((1, 1, 2, 4))
    woven = Weave(rng.choice((1, 2)), late).run(made, Context(made, priced))
    return Made(name, request, lower(woven, costs=priced))


def crossed(program: Program, rng: random.Random) -> Program:
    """The program with two neighbouring collectives of units swapped on one rank; unchanged if it has none."""
    rank = rng.randrange(len(program.ranks))
    ops = list(program.ranks[rank])
    places = [i for i, op in enumerate(ops) if op.kind.unit_wide and op.kind.is_collective]
    if len(places) < 2:
        return program
    n = rng.randrange(len(places) - 1)
    i, j = places[n], places[n + 1]
    ops[i], ops[j] = ops[j], ops[i]
    ranks: list[tuple[Op, ...]] = [*program.ranks]
    ranks[rank] = tuple(ops)
    return replace(program, ranks=tuple(ranks))
