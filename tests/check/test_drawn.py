"""Random programs from schedules of every kind: proofs and the operational machine agree, whole and damaged."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.check import braids, graphs, pairs, slices, words
from tests.check.pairs import damaged, verdicts
from tests.lowered import lower
from tests.refusals import refused
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.ir import Kind, Op, Program, nth, turned

AVERAGED = ("1f1b", "zb-h1", "interleaved-1f1b", "breadth-first", "zb-v", "gpipe", "eager-1f1b")


def averaged(seed: int) -> Program:
    """A plan whose replicas average their weights."""
    rng = random.Random(seed)
    card = SCHEDULES[rng.choice(AVERAGED)]
    p, m, v = rng.randint(1, 4), rng.randint(1, 6), rng.choice([v for v in (1, 2, 3) if card.allows(v)])
    return lower(replace(card.make(Request(p, m, v)), dp=rng.randint(1, 3), averages=rng.choice((1, 2))))


def shifted(program: Program, rng: random.Random) -> Program:
    """The program with an AVERAGE of a rank moved, dropped or repeated."""
    ranks = [list(ops) for ops in program.ranks]
    ops = rng.choice(ranks)
    at = rng.choice([i for i, op in enumerate(ops) if op.kind is Kind.AVERAGE])
    op = ops.pop(at)
    for _ in range(rng.choice((0, 1, 2))):
        ops.insert(rng.randrange(len(ops) + 1), op)
    return replace(program, ranks=tuple(map(tuple, ranks)))


class Drawn(NamedTuple):
    """The generator of programs, their number, those always run, and the damage; groups and graphs can deadlock."""

    draw: Callable[[int], Any]
    seeds: int
    always: Any
    changes: tuple[Callable[[Program, random.Random], Program], ...]


DRAWN = {
    "averages": Drawn(averaged, 200, 25, (damaged, shifted)),
    "graphs": Drawn(graphs.draw, 400, 80, (damaged, graphs.confused)),
    "groups": Drawn(lambda seed: braids.draw(seed, ranks=5, microbatches=8), 300, 30, (braids.unmarked, damaged)),
    "pairs": Drawn(lambda seed: pairs.draw(seed, ranks=6, microbatches=10), 200, 40, (damaged,)),
    "slices": Drawn(
        lambda seed: slices.draw(seed, ranks=5, microbatches=6, slices=5), 200, 25, (damaged, slices.swapped)
    ),
    "words": Drawn(
        lambda seed: words.draw(seed, ranks=6, microbatches=8, sliced=4), 150, range(40), (damaged, words.crossed)
    ),
}
CASES = [
    pytest.param(name, *case.values, marks=case.marks, id=f"{name}-{case.values[0]}")
    if hasattr(case, "marks")
    else pytest.param(name, case, id=f"{name}-{case}")
    for name, drawn in DRAWN.items()
    for case in few(range(drawn.seeds), drawn.always)
]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_drawn_programs_are_judged_as_the_machine_runs_them(name, seed):
    one = DRAWN[name].draw(seed)
    program = getattr(one, "program", one)
    passes, runs = verdicts(program, seed)
    assert passes is runs, str(one)
    assert runs or name == "graphs" or (name == "groups" and one.name != "braid-v"), str(one)
    for change in DRAWN[name].changes:
        passes, runs = verdicts(change(program, random.Random(seed)), seed)
        assert passes is runs, f"{one} {change.__name__}"
        if change is words.crossed:
            assert not runs or one.request.m == 1


def test_an_average_has_no_place_where_gradients_are_summed():
    summing = replace(lower(replace(SCHEDULES["1f1b"].make(Request(2, 2)), dp=2)))
    ranks = [[Op(Kind.AVERAGE, r), *ops] for r, ops in enumerate(summing.ranks)]
    assert verdicts(summing.with_ranks(ranks, by="test"), 0) == (False, False)
    assert verdicts(replace(averaged(0), averages=0), 0) == (False, False)


def test_backwards_run_slices_in_reverse():
    assert [turned(n, 3) for n in range(6)] == [2, 1, 0, 5, 4, 3]
    assert nth(Kind.F, 1, 4, 3) == Op(Kind.F, 1, 1, 0, 1)
    assert nth(Kind.B, 1, 4, 3) == Op(Kind.B, 1, 1, 0, 1)
    assert nth(Kind.W, 1, 3, 3) == Op(Kind.W, 1, 1, 0, 2)


@pytest.mark.parametrize("name", few(slices.NAMES, ("1f1b", "zb-v")))
def test_swapped_slices_are_named_with_both_ops_and_the_fix(name):
    """A slice's backward needs the gradients of its keys and values from later slices."""
    card = SCHEDULES[name]
    program = lower(card.make(Request(2, 3, card.default_chunks, slices=3)))
    broken = slices.swapped(program, random.Random(0))
    assert broken != program
    with refused("E206") as caught:
        check_all(broken)
    first = caught.value.errors[0]
    words = [first.message, first.hint or "", *first.details]
    assert any(("m" in word and ".1" in word) or ".2" in word for word in words)
