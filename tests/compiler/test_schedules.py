"""Every schedule on every small pipeline; expected values are formulas from the papers, not from the code."""

import pytest

from tests.check.each import check_complete
from tests.compiler.grid import FIXED, MICROBATCHES, RANKS, WAVES, chunk_counts, make, timed, units
from tests.tiers import few
from zbc.compiler.schedules import SCHEDULES, Request, find

every = pytest.mark.parametrize("name", FIXED)
with_p = pytest.mark.parametrize("p", few(RANKS, (1, 3, 4)))


def cases(name):
    return [(m, v) for m in MICROBATCHES for v in chunk_counts(name)]


@pytest.mark.parametrize("name", [*FIXED, *WAVES])
@with_p
def test_each_pipe_takes_its_microbatches_in_order_at_every_stage(name, p):
    """Then weight gradients are summed in the order of one process, and are bitwise equal to its gradients."""
    fits, v = p % SCHEDULES[name].ranks_in == 0, SCHEDULES[name].default_chunks
    for m, v in cases(name) if name in FIXED else [(m, v) for m in (3, 8, 13) if fits]:
        program = make(name, p, m, v)
        for ops in program.ranks:
            last = {}
            for op in ops:
                key = op.kind, op.stage, op.pipe
                assert last.get(key, -1) < op.mb, f"p={p} m={m} v={v}: {op}"
                last[key] = op.mb


# name -> (makespan, span, peak units, from which m on), at T_F = T_B = T_W = 1
CLOSED_FORMS = {
    "gpipe": lambda p, m, v: (3 * m + 3 * (p - 1), 3 * m + 3 * (p - 1), m, 1),
    "1f1b": lambda p, m, v: (3 * m + 3 * (p - 1), 3 * m + 3 * (p - 1), p, p),
    "interleaved-1f1b": lambda p, m, v: (3 * m + 3 * (p - 1) / v, 3 * m + 3 * (p - 1) / v, p + (p - 1) / v, 2 * p),
    "breadth-first": lambda p, m, v: (3 * m + 3 * (p - 1) / v, 3 * m + 3 * (p - 1) / v, m, p),
    "gis": lambda p, m, v: (3 * m + 2 * (p - 1) / v, 3 * m + 2 * (p - 1) / v, p, p),
    "zb-h1": lambda p, m, v: (3 * m + p - 1, 3 * m + p - 1, p, p),
    "zb-h2": lambda p, m, v: (3 * m + p - 1, 3 * m, 2 * p - 1, 2 * p - 1),
    "eager-1f1b": lambda p, m, v: (3 * m + 3 * (p - 1), 3 * m + 3 * (p - 1), 2 * p - 1, 2 * p - 1),
    "zb-v": lambda p, m, v: (3 * m + (p - 1) / 2, 3 * m, p, 2 * p),
}


@pytest.mark.always("6-zb-v")
@pytest.mark.long("4-gis")
@every
@with_p
def test_closed_forms_of_the_papers_hold(name, p):
    for m, v in cases(name):
        makespan, span, peak, least = CLOSED_FORMS[name](p, m, v)
        if m < least or (name in ("interleaved-1f1b", "gis") and m % p):
            continue
        program = make(name, p, m, v)
        timeline = timed(program)
        assert timeline.makespan == pytest.approx(makespan), f"p={p} m={m} v={v}"
        assert timeline.span == pytest.approx(span), f"p={p} m={m} v={v}"
        assert max(units(program)) == pytest.approx(peak), f"p={p} m={m} v={v}"


def test_every_schedule_has_a_closed_form_here():
    assert list(CLOSED_FORMS) == FIXED


@with_p
def test_with_few_microbatches_only_the_way_down_and_up_counts(p):
    """m <= p: 1F1B takes (m+p-1)(T_F+T_B+T_W), zero bubble (m+p-1)(T_F+T_B)+T_W."""
    for m in range(1, p + 1):
        assert timed(make("1f1b", p, m)).makespan == (m + p - 1) * 3
        assert timed(make("zb-h1", p, m)).makespan == (m + p - 1) * 2 + 1
        assert timed(make("zb-h2", p, m)).makespan == (m + p - 1) * 2 + 1


@pytest.mark.parametrize("p", few([2, 3, 4, 6, 8], (2, 3, 4)))
def test_interleaved_rounds_can_be_shorter_than_the_pipeline(p):
    """No deadlock for any count; memory by the formula; a longer round is never slower."""
    make_one = SCHEDULES["interleaved-1f1b"].make
    for v in (1, 2, 3):
        for m in (*range(1, p + 3), 2 * p + 1, 24):
            for group in range(1, p):
                program = make_one(Request(p, m, v, group=group))
                check_complete(program)
                assert max(units(program)) <= m + 1e-9 and timed(program).makespan >= 3 * m + 3 * (p - 1) / v - 1e-9
    for v in (2, 3):
        found = [make_one(Request(p, 24, v, group=g)) for g in (1, 2, 3, 4, 6, 8) if g <= p and 24 % g == 0]
        steps = [timed(program).makespan for program in found]
        assert steps == sorted(steps, reverse=True)
        for program, group in zip(found, (1, 2, 3, 4, 6, 8), strict=False):
            if group < p:
                assert max(units(program)) == pytest.approx(group * (v + 1) / v)


@with_p
def test_memory_per_rank_is_what_the_module_table_claims(p):
    for m in range(2 * p, 25):
        assert units(make("gpipe", p, m)) == [m] * p
        assert units(make("1f1b", p, m)) == [p - r for r in range(p)]
        assert units(make("zb-h1", p, m)) == [p] * p
        assert units(make("zb-h2", p, m)) == [2 * p - 1] * p
        assert units(make("zb-v", p, m)) == pytest.approx([p] * p)


ALIASES = {
    "zbv": "zb-v",
    "ScheduleZBVZeroBubble": "zb-v",
    "ScheduleLoopedBFS": "breadth-first",
    "GPipe": "gpipe",
}


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_paper_names_and_torch_class_names_are_accepted(alias, name):
    assert find(alias).name == name
