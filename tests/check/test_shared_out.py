"""Sharded weights and gradients: the checks and the operational machine agree."""

import random
from dataclasses import replace

import pytest

from tests.check import operational
from tests.check.pairs import damaged, verdicts
from tests.listing import listing, show
from tests.lowered import lower
from tests.refusals import error_of
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.lowering import Lowering
from zbc.compiler.passes.gather_weights import GatherWeights
from zbc.compiler.passes.weave import Weave
from zbc.compiler.schedules import Request, find
from zbc.compiler.sim.context import Context
from zbc.ir import Kind, Op, Program

NAMES = ("1f1b", "zb-h1", "interleaved-1f1b", "breadth-first", "zb-v", "looped-zb", "gpipe", "chimera", "bitpipe")
PROGRAMS = 1000
BATCHES = [range(start, start + 100) for start in range(0, PROGRAMS, 100)]


def drawn(seed: int) -> Program:
    """A complete program of two replicas with sharded weights, gradients, or both; some share a vocabulary."""
    rng = random.Random(seed)
    card = find(rng.choice(NAMES))
    v = rng.choice([v for v in (1, 2, 3) if card.allows(v)])
    p, m = card.ranks_in * rng.randint(1, 3 // card.ranks_in), rng.randint(1, 5)
    scatters, frees = rng.choice([(True, False), (False, True), (True, True)])
    if len(card.placement(p, v).pipes) > 1:
        scatters, frees = False, True
    order = replace(card.make(Request(p=p, m=m, v=v)), dp=rng.choice([2, 2, 3]), sharded=True, scatters=scatters)
    gather = GatherWeights(rng.randint(1, v), with_w=rng.random() < 0.3) if frees else None
    words = rng.choice((0, 0, 0, 1, 2)) if len(order.placement.pipes) == 1 else 0
    return Lowering("before-step", gather, weave=Weave(words) if words else None).lower(Context.of(order)).program


SHARING = (Kind.GATHER, Kind.FREE, Kind.SCATTER, Kind.REDUCE)


def displaced(program: Program, rng: random.Random) -> Program:
    """The program with one op of sharding moved by a few places, dropped, repeated or renamed."""
    ranks = [list(ops) for ops in program.ranks]
    places = [(r, i) for r, ops in enumerate(ranks) for i, op in enumerate(ops) if op.kind in SHARING]
    if not places:
        return damaged(program, rng)
    r, i = rng.choice(places)
    ops, draw = ranks[r], rng.random()
    j = min(len(ops) - 1, max(0, i + rng.choice((-3, -2, -1, -1, 1, 1, 2, 3))))
    if draw < 0.6:
        ops.insert(j, ops.pop(i))
    elif draw < 0.7:
        del ops[i]
    elif draw < 0.85:
        ops.insert(j, ops[i]._replace(mb=ops[i].mb + (ops[i].kind is not Kind.REDUCE and rng.random() < 0.7)))
    else:
        ops[i] = ops[i]._replace(stage=rng.randrange(program.placement.stages))
    return replace(program, ranks=tuple(map(tuple, ranks)))


@pytest.mark.parametrize(("at", "op", "text"), [(2, "#3", "is number 0 of its"), (99, "", "comes after REDUCE s0")])
def test_sums_of_some_gradients_are_numbered_and_before_the_last(at, op, text):
    order = replace(listing("rank 0: F s0 m0, BW s0 m0"), dp=2, sharded=True, scatters=True)
    ops = [*lower(order).ranks[0]]
    ops.insert(at, Op.parse(f"SCATTER s0 {op}".strip()))
    assert text in str(error_of(check_all, order.with_ranks([ops], by="test")))


@pytest.mark.parametrize("seeds", few(BATCHES, 1), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_a_program_that_shares_out_passes_exactly_if_it_runs(seeds):
    told = [0, 0]
    for seed in seeds:
        program, rng = drawn(seed), random.Random(-seed)
        assert verdicts(program, seed) == (True, True), show(program)
        for how in (damaged, displaced, displaced, displaced):
            broken = how(program, rng)
            passes, runs = verdicts(broken, seed)
            assert passes is runs, f"seed {seed}\n{show(broken)}\n{operational.run(broken, seed=seed)}"
            told[passes] += 1
    assert told[0] > told[1] > 0
