"""Random orders that deadlock, made from orders that work."""

from random import Random

from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.simulate import simulate
from zbc.errors import ZbcError
from zbc.ir import Program

NAMED = ["gpipe", "1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-h2", "eager-1f1b", "zb-v"]
SEARCHED = ["v-half", "zb-auto", "looped-zb", "1f1b-v"]


def working(rng: Random, names: list[str], ranks: list[int], microbatches: list[int]) -> Program:
    """An order that works; searched ones are made at unit costs within the memory of 1F1B."""
    card = SCHEDULES[rng.choice(names)]
    p, m = rng.choice(ranks), rng.choice(microbatches)
    costs = Costs.uniform(card.placement(p, card.default_chunks))
    return card.make(Request(p, m, card.default_chunks, costs=costs, memory_limit=float(p)))


def broken(program: Program, rng: Random) -> Program:
    """`program` with ops exchanged, moved or shuffled on some ranks until its order can never finish."""
    how = rng.choice(["exchange", "move", "shuffle"])
    ranks = [list(ops) for ops in program.ranks]
    while True:
        row = rng.choice(ranks)
        a, b = rng.randrange(len(row)), rng.randrange(len(row))
        if how == "exchange":
            row[a], row[b] = row[b], row[a]
        elif how == "move":
            row.insert(b, row.pop(a))
        else:
            rng.shuffle(row)
        found = program.with_ranks(ranks, by="broken")
        if _stuck(found):
            return found


def _stuck(program: Program) -> bool:
    """Whether the order is wrong on one rank, or ranks wait for each other."""
    try:
        check_all(program)
        simulate(program, Costs.uniform(program.placement))
    except ZbcError:
        return True
    return False
