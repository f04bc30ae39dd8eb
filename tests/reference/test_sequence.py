"""Slices of microbatches against published orders, closed forms and the orders of a prototype; see README.md."""

import re
from itertools import pairwise

import pytest

from tests.compiler.test_paper_tables import rows
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.lowering import Lowering
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request, find
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Placement
from zbc.job.cuts import balanced, share

OURS = {
    "seq1f1b": "1f1b",
    "sliced-zb": "zb-auto",
    "sliced-zb-v": "v-auto",
    "sliced-v-half": "v-auto",
    "seq1f1b-interleaved": "interleaved-1f1b",
}
ROUNDED = 1e-6  # of the tables


def sliced(placement: Placement, k: int, *, f=1.0, b=1.0, w=1.0, attention=0.0, comm=0.0) -> Costs:
    """Unit costs of even slices; `attention`: its share of F and B."""
    even = [1 / k] * k
    later = [(1 - attention) / k + attention * (2 * q + 1) / k**2 for q in range(k)]
    return Costs.uniform(placement, f, b, w, comm).cut(even, f=later, b=later, w=even)


def found(name, p, m, k, v=None, *, limit=None, budget=0.0, **times):
    """(makespan, peak of the fullest rank) of an order that is proven."""
    card = SCHEDULES[name]
    v = v or card.default_chunks
    costs = sliced(card.placement(p, v), k, **times)
    request = Request(p, m, v, slices=k, costs=costs, memory_limit=limit, budget=budget)
    program = card.make(request)
    assert program.slices == k and program.microbatches == m
    check_all(Lowering().lower(Context(program, costs)).program)
    return simulate(program, costs).makespan, max(rank.units for rank in peaks(program, costs))


TABLE = rows("sequence_orders.csv")


@pytest.mark.long("9", "225", "288")
@pytest.mark.parametrize("number", few(range(len(TABLE)), range(0, len(TABLE), 9)))
def test_no_order_is_worse_than_the_published_one_or_the_prototypes(number):
    """If the published order deadlocks, ours must still be complete."""
    variant, _, p, m, k, chunks, *times, status, makespan, peak = TABLE[number].values()
    given = dict(zip(("f", "b", "w", "comm", "attention"), map(float, times), strict=True))
    limit = float(peak) if OURS[variant] in ("zb-auto", "v-auto") else None
    step, held = found(OURS[variant], *map(int, (p, m, k, chunks)), limit=limit, **given)
    if status == "ok":
        assert step <= float(makespan) + ROUNDED
        assert held <= float(peak) + ROUNDED


SIZES = few([(p, m, k) for p in (1, 2, 3, 5, 8) for m in (1, 2, 7, 24) for k in (2, 3, 4, 8)], {(3, 7, 2), (8, 24, 4)})


@pytest.mark.parametrize(("p", "m", "k"), SIZES)
def test_closed_forms_of_one_stage_per_rank(p, m, k):
    """As many more units warm up as a microbatch has slices beyond the first: bubble and memory shrink with k."""
    full = m * k >= p + k - 1  # as many units as the fullest rank may hold
    for name in ("1f1b", "zb-h1", "zb-auto"):
        limit = (p + k - 1) / k if name == "zb-auto" else None
        step, held = found(name, p, m, k, limit=limit)
        bubble = (3 if name == "1f1b" else 1) * (p - 1) / k
        assert step <= 3 * m + bubble + ROUNDED or not full
        if name == "1f1b":
            assert step == pytest.approx(3 * m + bubble)
        if full:
            assert held == pytest.approx((p + k - 1) / k) if name != "zb-auto" else held <= limit + ROUNDED


@pytest.mark.parametrize(("p", "m", "k"), SIZES)
def test_interleaved_runs_at_any_number_of_slices_and_microbatches(p, m, k):
    v, group = 2, k * -(-p // k)
    step, held = found("interleaved-1f1b", p, m, k, v)
    if m * k % group == 0:
        assert step == pytest.approx(3 * m + 3 * (p - 1) / (k * v))
        if k >= p > 1 and m > 1:
            assert held <= (p + k - 1) / k + (group - k) / k + ROUNDED
    for name in ("gis", "breadth-first"):
        found(name, p, m, k, v)


def test_interleaved_at_the_published_size():
    assert found("interleaved-1f1b", 8, 24, 4, 2) == pytest.approx((74.625, 3.25))
    assert found("interleaved-1f1b", 4, 5, 8, 2) == pytest.approx((15.5625, 1.375))


# slices, limit in microbatches, the step to reach, seconds of search
FRONTIER = [(4, 2.75, 72.875, 0.0), (4, 2.0, 74.75, 0.0), (4, 1.75, 81.75, 0.0)]
FRONTIER += [(2, 3.0, 77.0, 0.0), (8, 1.5, 73.19, 1.0)]


@pytest.mark.long
@pytest.mark.parametrize(("k", "limit", "step", "seconds"), few(FRONTIER, {FRONTIER[0], FRONTIER[1]}))
def test_frontier_of_the_v_placement(k, limit, step, seconds):
    """p = 8, m = 24; without slices the same placement takes 80.5 at 5 units."""
    reached, held = found("v-auto", 8, 24, k, limit=limit, budget=seconds)
    assert reached <= step + ROUNDED
    assert held <= limit + ROUNDED


@pytest.mark.long("zb-v", "v-half")
@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
def test_limits_by_name_are_one_slice_more_for_each_that_comes_before_the_first_goes_back(name):
    base = {"zb-v": 8, "v-half": 5, "v-min": 4}[name]
    step, held = found(name, 8, 24, 4)
    assert held <= (base + 3) / 4 + ROUNDED
    assert step <= {"zb-v": 72.875, "v-half": 74.75, "v-min": 81.75}[name] + ROUNDED


@pytest.mark.parametrize("row", rows("sequence_cuts.csv"), ids=lambda row: f"{row['hidden']} {row['length']}")
def test_balanced_cuts_are_even_in_time(row):
    hidden, ffn, length, k = (int(row[key]) for key in ("hidden", "ffn", "length", "k"))
    linear, attend = 8 * hidden**2 + 4 * hidden * ffn, 4 * hidden
    cuts = balanced(length, k, linear, attend)
    assert [b - a for a, b in pairwise(cuts)] == [int(part) for part in row["balanced_lengths"].split()]
    assert k * max(share(cuts, linear, attend)) <= 1.0005
    tiles = balanced(length, k, linear, attend, 128)
    assert all(place % 128 == 0 for place in tiles)
    assert k * max(share(tiles, linear, attend)) <= 1 + 128 / min(b - a for a, b in pairwise(tiles))


@pytest.mark.long("8-24-4-zb-v", "8-24-8-zb-v", "8-16-2-zb-v", "8-16-2-gpipe", "8-24-4-breadth-first")
@pytest.mark.parametrize("name", [name for name, card in SCHEDULES.items() if card.sliced])
@pytest.mark.parametrize(("p", "m", "k"), [(4, 8, 1), (4, 8, 2), (4, 8, 4), (8, 24, 4), (8, 24, 8), (8, 16, 2)])
def test_cards_say_what_slices_do(name, p, m, k):
    """The formulas printed on cards, at unit costs."""
    card = find(name)
    v = card.default_chunks
    program = card.make(Request(p=p, m=m, v=v, slices=k))
    costs = Costs.uniform(program.placement).cut([1 / k] * k)

    def number(form):
        return eval(re.sub(r"(\d)(?=[a-z(])", r"\1*", form), {}, {"p": p, "m": m, "v": v, "k": k})

    bubble = number(card.makespan) - 3 * m
    assert simulate(program, costs).makespan == pytest.approx(3 * m + bubble / k)
    assert max(one.units for one in peaks(program, costs)) == pytest.approx(number(card.sliced))


@pytest.mark.parametrize(("length", "k", "multiple"), [(1000, 7, 128), (1024, 8, 128), (9, 9, 1), (5000, 3, 128)])
def test_few_tokens_leave_some_for_every_slice(length, k, multiple):
    cuts = balanced(length, k, 1.0, 10.0, multiple)
    assert cuts[0] == 0 and cuts[-1] == length and all(a < b for a, b in pairwise(cuts)) and len(cuts) == k + 1
    assert all(place % multiple == 0 for place in cuts[:-1])
