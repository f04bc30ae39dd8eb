"""Random programs from schedules of every kind: proofs and the operational machine agree, whole and damaged."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.check import braids, graphs, operational, pairs, programs, slices, words
from tests.check.pairs import damaged, displaced, verdicts
from tests.listing import listing
from tests.lowered import lower
from tests.refusals import error_of, refused
from tests.tiers import few
from zbc.compiler.check import check_all, survival
from zbc.compiler.cost.cost import Costs
from zbc.compiler.graph import build
from zbc.compiler.lowering import Lowering
from zbc.compiler.passes.gather_weights import GatherWeights
from zbc.compiler.passes.weave import Weave
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.context import Context
from zbc.ir import Kind, Op, Placement, Program, nth, turned

AVERAGED = ("1f1b", "zb-h1", "interleaved-1f1b", "breadth-first", "zb-v", "gpipe", "eager-1f1b")


def averaged(seed: int) -> Program:
    """A plan whose replicas average their weights."""
    rng = random.Random(seed)
    card = SCHEDULES[rng.choice(AVERAGED)]
    p, m, v = rng.randint(1, 4), rng.randint(1, 6), rng.choice([v for v in (1, 2, 3) if card.allows(v)])
    return lower(replace(card.make(Request(p, m, v)), dp=rng.randint(1, 3), averages=rng.choice((1, 2))))


SHARING = ("1f1b", "zb-h1", "interleaved-1f1b", "breadth-first", "zb-v", "looped-zb", "gpipe", "chimera", "bitpipe")


def shared_out(seed: int) -> Program:
    """A complete program of two replicas with sharded weights, gradients, or both; some share a vocabulary."""
    rng = random.Random(seed)
    card = SCHEDULES[rng.choice(SHARING)]
    v = rng.choice([v for v in (1, 2, 3) if card.allows(v)])
    p, m = card.ranks_in * rng.randint(1, 3 // card.ranks_in), rng.randint(1, 5)
    scatters, frees = rng.choice([(True, False), (False, True), (True, True)])
    if len(card.placement(p, v).pipes) > 1:
        scatters, frees = False, True
    order = replace(card.make(Request(p=p, m=m, v=v)), dp=rng.choice([2, 2, 3]), sharded=True, scatters=scatters)
    gather = GatherWeights(rng.randint(1, v), with_w=rng.random() < 0.3) if frees else None
    words = rng.choice((0, 0, 0, 1, 2)) if len(order.placement.pipes) == 1 else 0
    return Lowering("before-step", gather, weave=Weave(words) if words else None).lower(Context.of(order)).program


AVERAGE, SHARES = displaced(Kind.AVERAGE), displaced(Kind.GATHER, Kind.FREE, Kind.SCATTER, Kind.REDUCE)


def ahead(seed: int) -> Program:
    """A random legal schedule, closed without a barrier; small sizes (one rank, one microbatch) are frequent."""
    rng = random.Random(seed)
    place = programs.placement(rng)
    program = programs.any_order(rng, place, rng.choice([1, 1, 2, 3, 4, 6]), rng.choice([1, 1, 1, 2]))
    copies, tied = rng.choice([1, 1, 1, 2]), rng.random() < 0.2 and place.stages > 1
    sharded = random.Random(f"sharded {seed}").random() < 0.3
    return lower(replace(program, dp=copies, tied=tied, sharded=sharded), "post-validate", costs(rng, place))


def costs(rng: random.Random, place: Placement) -> Costs | None:
    """Unit costs, or anything, zero included."""
    if rng.random() < 0.3:
        return None

    def each(*values: float) -> tuple[float, ...]:
        return tuple(rng.choice(values) for _ in range(place.stages))

    found = Costs.uniform(place, comm=rng.choice([0.0, 0.1, 3.0]))
    times = {"f": each(0.0, 1.0, 2.5), "b": each(0.0, 1.0, 4.0), "w": each(0.0, 1.0), "tentative": each(0.0, 0.5)}
    return found.with_ms(**times, hop=(rng.choice([0.0, 0.01, 2.0]),))


def broken_once(program: Program, rng: random.Random) -> Program:
    return programs.broken(rng, program, rng.choice(list(programs.BREAKS))).program


class Drawn(NamedTuple):
    """The generator of programs, their number, those always run, and the damage; groups and graphs can deadlock."""

    draw: Callable[[int], Any]
    seeds: int
    always: int
    changes: tuple[Callable[[Program, random.Random], Program], ...]


DRAWN = {
    "ahead": Drawn(ahead, 1000, 50, (broken_once, broken_once)),
    "averages": Drawn(averaged, 200, 25, (damaged, AVERAGE, AVERAGE)),
    "graphs": Drawn(graphs.draw, 400, 80, (damaged, graphs.confused)),
    "groups": Drawn(lambda seed: braids.draw(seed, ranks=5, microbatches=8), 300, 30, (braids.unmarked, damaged)),
    "shares": Drawn(shared_out, 1000, 25, (damaged, SHARES, SHARES, SHARES)),
    "pairs": Drawn(lambda seed: pairs.draw(seed, ranks=6, microbatches=10), 200, 40, (damaged,)),
    "slices": Drawn(
        lambda seed: slices.draw(seed, ranks=5, microbatches=6, slices=5), 200, 25, (damaged, slices.swapped)
    ),
    "words": Drawn(lambda seed: words.draw(seed, ranks=6, microbatches=8, sliced=4), 150, 40, (damaged, words.crossed)),
}
CASES = [(name, seed) for name, drawn in DRAWN.items() for seed in range(drawn.seeds)]


@pytest.mark.long("slices-4", "words-27", "slices-21")
@pytest.mark.parametrize(("name", "seed"), few(CASES, lambda case: case[1] < DRAWN[case[0]].always))
def test_drawn_programs_are_judged_as_the_machine_runs_them(name, seed):
    one = DRAWN[name].draw(seed)
    program = getattr(one, "program", one)
    passes, runs = verdicts(program, seed)
    assert passes is runs, str(one)
    ways = ({"blocking": True}, {"device": "waits"}, {"device": "queue"})
    if passes:
        said = survival(build(program))
        assert [*said] == [operational.run(program, seed=seed, **way).ok for way in ways], str(one)
    random_order = program.history[-1] != "optimizer-step" if name == "graphs" else name == "groups"
    made = not random_order or getattr(one, "name", None) == "braid-v"
    assert runs or not made, str(one)
    rng = random.Random(-seed)
    for change in DRAWN[name].changes:
        passes, runs = verdicts(change(program, rng), seed)
        assert passes is runs, f"{one} {change.__name__}"
        if change is words.crossed:
            assert not runs or one.request.m == 1


@pytest.mark.repeats
def test_damage_stops_some_programs_and_not_all():
    for name, drawn in DRAWN.items():
        told = set()
        for seed in range(12):
            program = getattr(one := drawn.draw(seed), "program", one)
            told |= {verdicts(change(program, random.Random(seed)), seed)[0] for change in drawn.changes}
        assert told == {True, False}, name


def test_an_average_has_no_place_where_gradients_are_summed():
    summing = replace(lower(replace(SCHEDULES["1f1b"].make(Request(2, 2)), dp=2)))
    ranks = [[Op(Kind.AVERAGE, r), *ops] for r, ops in enumerate(summing.ranks)]
    assert verdicts(summing.with_ranks(ranks, by="test"), 0) == (False, False)
    assert verdicts(replace(averaged(0), averages=0), 0) == (False, False)


@pytest.mark.parametrize(("at", "op", "text"), [(2, "#3", "is number 0 of its"), (99, "", "comes after REDUCE s0")])
def test_sums_of_some_gradients_are_numbered_and_before_the_last(at, op, text):
    order = replace(listing("rank 0: F s0 m0, BW s0 m0"), dp=2, sharded=True, scatters=True)
    ops = [*lower(order).ranks[0]]
    ops.insert(at, Op.parse(f"SCATTER s0 {op}".strip()))
    assert text in str(error_of(check_all, order.with_ranks([ops], by="test")))


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
