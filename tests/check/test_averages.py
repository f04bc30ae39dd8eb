"""Plans whose replicas average weights: proofs and the operational machine agree, as they are and damaged."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.check.pairs import damaged, verdicts
from tests.lowered import lower
from tests.tiers import few
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.ir import Kind, Op, Program

NAMES = ("1f1b", "zb-h1", "interleaved-1f1b", "breadth-first", "zb-v", "gpipe", "eager-1f1b")


def draw(seed: int) -> tuple[str, Program]:
    rng = random.Random(seed)
    name = rng.choice(NAMES)
    card = SCHEDULES[name]
    p, m, v = rng.randint(1, 4), rng.randint(1, 6), rng.choice([v for v in (1, 2, 3) if card.allows(v)])
    made = card.make(Request(p, m, v))
    return name, lower(replace(made, dp=rng.randint(1, 3), averages=rng.choice((1, 2))))


def shifted(program: Program, rng: random.Random) -> Program:
    """The program with an AVERAGE of a rank moved, dropped or repeated."""
    ranks = [list(ops) for ops in program.ranks]
    ops = rng.choice(ranks)
    at = rng.choice([i for i, op in enumerate(ops) if op.kind is Kind.AVERAGE])
    op = ops.pop(at)
    for _ in range(rng.choice((0, 1, 2))):
        ops.insert(rng.randrange(len(ops) + 1), op)
    return replace(program, ranks=tuple(map(tuple, ranks)))


@pytest.mark.parametrize("seed", few(range(200), 25))
def test_random_plans_with_averages_are_proven_and_run(seed):
    name, program = draw(seed)
    assert verdicts(program, seed) == (True, True), name
    for change in (damaged, shifted):
        passes, runs = verdicts(change(program, random.Random(seed)), seed)
        assert passes == runs, f"{name} {change.__name__}"


def test_an_average_has_no_place_where_gradients_are_summed():
    _, program = draw(0)
    summing = replace(lower(replace(SCHEDULES["1f1b"].make(Request(2, 2)), dp=2)))
    ranks = [[Op(Kind.AVERAGE, r), *ops] for r, ops in enumerate(summing.ranks)]
    assert verdicts(summing.with_ranks(ranks, by="test"), 0) == (False, False)
    assert verdicts(replace(program, averages=0), 0) == (False, False)
