"""The planner: its candidates, and that no plain schedule on the same layers is faster than its answer."""

import pytest

from tests.jobs import job
from tests.tiers import few
from zbc.compiler.check.memory import check_memory
from zbc.compiler.compile import compile_job
from zbc.compiler.order import glance, order
from zbc.compiler.partition.setup import Setup
from zbc.compiler.planner import planner
from zbc.compiler.planner.best import Best
from zbc.compiler.planner.case import Case
from zbc.compiler.schedules import SCHEDULES, find
from zbc.errors import ZbcError

# Layers of a model on two tensor-parallel ranks; a device that is nearly full; words on all ranks; busy links.
LLAMA = {"family": "llama", "hidden": 256, "heads": 8, "vocab": 8000, "seq_len": 512, "dtype": "bfloat16"}
JOBS = {
    "sums of tensor-parallel ranks": {"parallel": {"tp": 2, "dp": 2}, "memory": {"activations": "auto"}},
    "a shared vocabulary": {"parallel": {"vocabulary": "shared"}},
    "a limit": {"schedule": {"memory_limit": "0.75x"}},
    "gathers of weights": {"parallel": {"dp": 2, "shard": "optimizer"}},
    "waits of the host": {"optimizer": {"sync": "post-validate"}},
}
PAIRS = [("zb-auto", ("1f1b", "zb-h1", "zb-h2")), ("v-auto", ("dualpipe-v",)), ("looped-zb", ("interleaved-1f1b",))]


def case(kind="1f1b", **changes):
    made = job(kind=kind, **changes)
    return Case(made, find(kind), None)


@pytest.mark.long
@pytest.mark.parametrize("what", JOBS)
@pytest.mark.parametrize(("kind", "others"), few(PAIRS, 1))
def test_no_plain_schedule_on_the_same_layers_and_limit_is_faster_than_a_searched_answer(what, kind, others):
    changes = {**JOBS[what], "model": LLAMA, "hardware": {"device": "cuda"}, "layers": 10, "pp": 4, "m": 8}
    found = compile_job(job(kind=kind, **changes), budget=0.05)
    blocks = [sum(name not in ("embed", "head") for name in names) for names in found.layers]
    tried = 0
    for name in others:
        schedule = {**changes.get("schedule", {}), "chunks": found.program.placement.chunks}
        given = {**changes, "schedule": schedule, "partition": {"layers_per_stage": blocks}}
        try:
            plain = compile_job(job(kind=name, **given), suggest=False)
        except ZbcError:
            continue
        tried += 1
        assert found.step_ms <= plain.step_ms * (1 + 1e-9), name
    assert tried or kind != "zb-auto"


@pytest.mark.long("zb-v")
@pytest.mark.parametrize("kind", ["1f1b", "zb-auto", "zb-v"])
def test_no_order_is_shorter_than_the_bound_of_its_choice_known_before_its_costs(kind):
    """Of whole and split backwards, with and without stages that recompute; the bound is near for a busy rank."""
    made = case(kind, layers=12, model=LLAMA, pp=4, m=16, memory={"activations": "auto"}, hardware={"memory_gib": 8})
    for choice in made.starts:
        for near in [choice, *made.neighbours(choice)[:2]]:
            step = made.setup(near).make(0.0).step_ms(made.job)
            assert 0.6 * step < made.least(near) <= step


@pytest.mark.parametrize("kind", ["1f1b", "interleaved-1f1b", "zb-auto"])
def test_what_is_answered_is_no_worse_than_any_look(kind, monkeypatch):
    seen = []
    look = Best.look

    def looked(self, *args, **options):
        found = look(self, *args, **options)
        seen.append(found)
        return found

    monkeypatch.setattr(Best, "look", looked)
    made = job(kind=kind, pp=2, m=6, layers=9, model=LLAMA)
    found = order(made, 0.05)
    steps = [step for over, step in seen if not over]
    assert len(steps) > 1 and found.step_ms(made) == pytest.approx(min(steps), rel=1e-12)


@pytest.mark.always
def test_the_budget_goes_to_the_searched_orders_that_look_best_and_no_more_of_it(monkeypatch):
    """However many limits an order is searched under."""
    looks, searches, look, ordered = [], [], Best.look, Setup._ordered

    def looked(self, case, choice, spent=0.0, **options):
        looks.append((spent, case.two_pipes))
        return look(self, case, choice, spent, **options)

    def searched(self, units, budget, *rest):
        searches.append(budget)
        return ordered(self, units, budget, *rest)

    monkeypatch.setattr(Best, "look", looked)
    monkeypatch.setattr(Setup, "_ordered", searched)
    made = job(kind="auto", pp=4, m=5, layers=8)
    order(made, 0.04)
    assert 0 < sum(searches) <= sum(seconds for seconds, _ in looks) * (1 + 1e-9) <= 0.04 * (1 + 1e-8)
    two_pipes = [two for seconds, two in looks if seconds]
    assert len(two_pipes) <= len(planner.SHARES) and any(two_pipes)


@pytest.mark.long
def test_a_glance_is_what_fits_and_nothing_where_nothing_does():
    made = job(kind="auto", pp=3, m=5, layers=10)
    found = glance(made)
    assert found.step_ms(made) >= order(made, 0.05).step_ms(made) * (1 - 1e-9)
    tight = job(kind="1f1b", pp=3, m=5, layers=10, schedule={"memory_limit": "0.01x"})
    assert glance(tight) is None


def test_every_schedule_enters():
    assert {card.name for card, _ in planner.entrants(job(kind="auto"))} == SCHEDULES.keys()


EXCLUDING = {
    "weights averaged": {"parallel": {"dp": 2, "average": {"every": 1}}},
    "layers frozen": {"freeze": {"most": 0.5}},
}


@pytest.mark.long
@pytest.mark.parametrize("changes", EXCLUDING.values(), ids=EXCLUDING)
def test_auto_takes_the_best_of_the_schedules_that_the_job_leaves(changes):
    with pytest.raises(ZbcError):
        compile_job(job(kind="chimera-zb", **changes), budget=0.0)
    found = compile_job(job(kind="auto", **changes), budget=0.0)
    assert found.step_ms <= compile_job(job(kind="zb-h1", **changes), budget=0.0).step_ms
    assert len(found.program.placement.pipes) == 1


EXPERTS = {"family": "llama", "hidden": 64, "heads": 4, "experts": 8, "ffn_hidden": 64}
WOVEN = {
    "experts": {"model": EXPERTS, "parallel": {"dp": 2, "ep": 2}},
    "sums": {"model": LLAMA, "parallel": {"tp": 2}},
    "none": {"model": LLAMA, "parallel": {"dp": 2}},
}


@pytest.mark.long
@pytest.mark.parametrize("what", WOVEN)
def test_auto_weaves_early_forwards_into_groups_where_that_hides_exchanges(what):
    """It is never worse than the schedule that a user would ask for, and names it."""
    changes = {**WOVEN[what], "layers": 8, "pp": 2, "m": 4}
    found = compile_job(job(kind="auto", **changes), budget=0.0, suggest=False)
    asked = {"early": 1, "overlap": True}
    plain = compile_job(job(kind="interleaved-1f1b", schedule=asked, **changes), budget=0.0, suggest=False)
    assert found.report.makespan_ms <= plain.report.makespan_ms * (1 + 1e-9)
    if what == "none":
        assert found.found.options is None
        assert not [*planner.woven(job(kind="auto", **changes), find("interleaved-1f1b"))]
    elif found.schedule == "interleaved-1f1b" and found.program.grouped:
        assert (found.found.options.early, found.found.options.overlap) == (1, True)
    (woven,) = planner.woven(job(kind="auto", **{**changes, **WOVEN["sums"]}), find("interleaved-1f1b"))
    assert not [*planner.woven(woven, find("interleaved-1f1b"))]  # it leaves nothing open
    assert not [*planner.woven(job(kind="auto", **{**changes, **WOVEN["sums"]}), find("dualpipe"))]


@pytest.mark.long
@pytest.mark.parametrize("limit", ["0.8x", "1.2x", "1.6x"])
def test_what_fits_with_a_shared_vocabulary_fits_as_it_is_planned(limit):
    """Its collectives move backwards, so that a rank holds more than in the order before them."""
    fits = 0
    for kind in ("1f1b", "zb-h1", "gis", "dualpipe-v", "interleaved-1f1b"):
        made = job(
            kind=kind, pp=2, m=4, model=LLAMA, parallel={"vocabulary": "shared"}, schedule={"memory_limit": limit}
        )
        found = glance(made)
        if found is not None:
            check_memory(made, found.memory, found.costs)
            fits += 1
    assert (fits > 0) == (limit != "0.8x")


@pytest.mark.long
def test_moves_count_in_a_budget():
    """A look at two pipes takes some 40 ms. Where moves lead may look better than where they begin, and be worse."""
    asked = job(kind="chimera-zb", pp=4, m=8, layers=14, model=LLAMA, hardware={"device": "cuda"})
    reports = [compile_job(asked, suggest=False, budget=budget).report for budget in (0.0, 0.1, 1.0, 2.0)]
    tried, steps = zip(*((one.cut.tried, one.barrier_ms) for one in reports), strict=True)
    assert tried[0] < tried[1] <= tried[0] + 20 and [*steps] == sorted(steps, reverse=True)
