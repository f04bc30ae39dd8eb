"""Random orders with overlap groups: braid-v at random costs, and other schedules with marks at possible places."""

import random
from dataclasses import replace

from tests.check.pairs import Made, displaced
from tests.lowered import lower
from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.errors import ZbcError
from zbc.ir import Kind, Op

MARKED = ("1f1b", "zb-h1", "interleaved-1f1b", "gpipe", "zb-v", "chimera", "bitpipe", "eager-1f1b", "zb-h2")


def with_sums(costs: Costs, a: float) -> Costs:
    """The costs with sums of `a` ms in every F and B."""
    each = (a,) * costs.stages
    waits = costs.each(lambda b, bw: max(0.0, b + a - bw), "b", "bw")
    bw = costs.each(lambda b, bw: max(b + a, bw), "b", "bw")
    f, b = (costs.each(lambda ms: ms + a, name) for name in ("f", "b"))
    return costs.with_ms(f=f, b=b, bw=bw, f_sums=each, b_sums=each, bw_waits=waits)


def draw(seed: int, *, ranks: int, microbatches: int) -> Made:
    """Order number `seed`; with random marks it may deadlock."""
    rng = random.Random(seed)
    name = "braid-v" if rng.random() < 0.5 else rng.choice(MARKED)
    card = SCHEDULES[name]
    p, v = card.ranks_in * rng.randint(1, ranks // card.ranks_in), rng.choice([v for v in (1, 2, 3) if card.allows(v)])
    times = rng.random() + 0.5, rng.random() + 0.5, rng.random() + 0.1, rng.choice((0.0, 0.1))
    costs = with_sums(Costs.uniform(card.placement(p, v), *times), rng.choice((0.0, 0.1, 0.3, 1.0)))
    request = Request(p, rng.randint(1, microbatches), v, costs=None if card.searched else costs)
    program = card.make(request)
    if name != "braid-v":
        program = program.with_ranks([marked(ops, rng, rng.choice((0.1, 0.5))) for ops in program.ranks], by="marked")
    program = replace(program, dp=rng.choice((1, 1, 1, 2)))
    try:
        return Made(name, request, lower(program))
    except ZbcError:  # an order that never finishes has no times to place transfers by
        return Made(name, request, program)


def marked(ops: tuple[Op, ...], rng: random.Random, share: float) -> list[Op]:
    """The order with marks before some of the neighbours that may be groups."""
    found, skip = list[Op](), False
    for i, op in enumerate(ops):
        pair = ops[i : i + 2]
        if skip:
            skip = False
        elif len(pair) == 2 and _may_meet(*pair) and rng.random() < share:
            found.append(Op(Kind.OVERLAP, 0))
            skip = True
        found.append(op)
    return found


def _may_meet(one: Op, other: Op) -> bool:
    return Kind.F in (one.kind, other.kind) and one.mb != other.mb


unmarked = displaced(Kind.OVERLAP)
