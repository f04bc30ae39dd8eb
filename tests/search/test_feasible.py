"""The least memory that any order needs, limits in units and bytes, and the error whose suggested limit works."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest

from tests.jobs import job
from tests.refusals import refused
from tests.search.instances import costs, instance
from tests.tiers import dealt, few
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.search.feasible import least_of, one_by_one
from zbc.compiler.shapes import load_job
from zbc.errors import ZbcError
from zbc.ir import Placement

KINDS = [("zb-auto", 1), ("v-auto", 2), ("1f1b-v", 2), ("looped-zb", 2), ("looped-zb", 3)]


def least_by_trying(keep_b, keep_w, m):
    """The smallest peak over all orders of one rank's ops, stages from the first to the last of its path."""
    v = len(keep_b)

    @cache
    def peak(f, b, w):
        """The least peak of the orders that continue after f, b, w microbatches of each stage."""
        if all(count == m for count in w):
            return 0.0
        held = sum(keep_b[s] * (f[s] - b[s]) + keep_w[s] * (b[s] - w[s]) for s in range(v))
        rest = []
        for s in range(v):
            after = tuple(count + (k == s) for k, count in enumerate(f))
            if f[s] < m and (s == 0 or f[s - 1] > f[s]):
                rest.append(peak(after, b, w))
            after = tuple(count + (k == s) for k, count in enumerate(b))
            if b[s] < (f[s] if s == v - 1 else b[s + 1]):
                rest.append(peak(f, after, w))
            after = tuple(count + (k == s) for k, count in enumerate(w))
            if w[s] < b[s]:
                rest.append(peak(f, b, after))
        return max(held, min(rest))

    return peak((0,) * v, (0,) * v, (0,) * v)


@pytest.mark.parametrize("v", [1, 2, 3])
def test_the_least_memory_is_the_least_over_all_orders(v):
    for seed in range(30):
        rng = Random(seed)
        where = Placement.looped(1, v)
        given = costs(rng, where)
        m = rng.randint(1, 4 - v // 2)
        assert least_of(where, given) == pytest.approx([least_by_trying(given.units("kept"), given.units("left"), m)])


def test_one_microbatch_after_another_needs_no_more():
    for seed in range(200):
        given = instance(seed, ranks=8)
        program = given.problem.program(one_by_one(given.problem), "one by one")
        used = [rank.units for rank in peaks(program, given.costs)]
        assert used == pytest.approx(least_of(given.placement, given.costs), abs=1e-9)


def needs(name, asked):
    """The least memory per rank of a schedule for its request."""
    given = asked.costs
    where = SCHEDULES[name].placement(asked.p, asked.v)
    if not SCHEDULES[name].splits_backward:  # then nothing is kept for W
        return [sum(given.units("kept")[s] for s in where.stages_of(r)) for r in range(asked.p)]
    return least_of(where, given)


def random_request(name, v, rng):
    p, m, objective = rng.randint(1, 4), rng.randint(1, 6), rng.choice(("span", "makespan"))
    return Request(p, m, v, costs=costs(rng, SCHEDULES[name].placement(p, v)), objective=objective)


@pytest.mark.parametrize(("name", "v"), few(KINDS, [("1f1b-v", 2), ("looped-zb", 3)]))
def test_searched_schedules_plan_at_the_least_memory(name, v):
    for seed in range(10):
        asked = random_request(name, v, Random(seed))
        limits = tuple(needs(name, asked))
        program = SCHEDULES[name].make(replace(asked, memory_limit=limits))
        used = [rank.units for rank in peaks(program, asked.costs)]
        assert all(units <= limit + 2e-6 for units, limit in zip(used, limits, strict=True))


@pytest.mark.parametrize(("name", "v"), few(KINDS, [("1f1b-v", 2), ("looped-zb", 3)]))
def test_below_the_least_memory_the_error_names_a_limit_that_works(name, v):
    for seed in range(10):
        rng = Random(seed)
        asked = random_request(name, v, rng)
        make, p = SCHEDULES[name].make, asked.p
        limits = needs(name, asked)
        short = rng.randrange(p)
        limits[short] -= 1e-3
        with refused("E303", f"rank {short} ") as caught:
            make(replace(asked, memory_limit=tuple(limits)))
        share = float(re.search(r'"([\d.]+)x"', caught.value.hint)[1])
        program = make(replace(asked, memory_limit=share * p))
        assert max(rank.units for rank in peaks(program, asked.costs)) <= share * p + 2e-6
        with pytest.raises(ZbcError, match="does not fit"):
            make(replace(asked, memory_limit=share * p - 1e-3))


@pytest.mark.parametrize(
    ("kind", "asked"),
    few(
        dealt(["zb-auto", "v-auto", "1f1b-v", "looped-zb", "auto"], ["0.001x", "0.000001 GiB"]),
        lambda case: case[0] != "auto",
    ),
)
def test_a_job_with_too_little_memory_is_told_how_much_works(kind, asked):
    def planned(limit):
        return compile_job(job(kind=kind, schedule={"memory_limit": limit}), budget=0.0)

    with refused("E303") as caught:
        planned(asked)
    enough = re.search(r'memory_limit = "([^"]+)"', caught.value.hint)[1]
    planned(enough)
    amount, unit = re.fullmatch(r"([\d.]+)( GiB|x)", enough).groups()
    with pytest.raises(ZbcError, match="does not fit"):
        planned(f"{float(amount) * 0.999:.9f}{unit}")


@pytest.mark.parametrize("name", few(["v-half", "v-min"], ("v-min",)))
def test_v_half_and_v_min_keep_to_their_memory(name):
    for p in range(1, 7):
        for m in (1, p, 2 * p + 1):
            program = SCHEDULES[name].make(Request(p, m, 2))
            used = peaks(program, Costs.uniform(program.placement))
            assert max(rank.units for rank in used) <= OWN[name](p) + 1e-6


PAPER = Path(__file__).parent.parent.parent / "plans" / "paper-1.5b.toml"


OWN = {"zb-v": lambda p: p, "v-half": lambda p: (p + 2) // 2, "v-min": lambda p: (p + 4) // 3}


def limited_job(seed):
    """A job with given op times; activations given or counted; a schedule with its own limit or the job's."""
    rng = Random(seed)
    kind = rng.choice((*OWN, "v-auto", "zb-auto", "1f1b-v"))
    p, m = rng.randint(2, 5), rng.randint(2, 12)
    costs = {"f": rng.uniform(1, 3), "b": rng.uniform(1, 3), "w": rng.uniform(0.5, 2), "comm": rng.choice((0.0, 0.2))}
    if rng.random() < 0.6:
        costs |= {"act_b": 1.0, "act_w": rng.choice((0.4, 0.9, 1.0))}
    schedule = {"objective": rng.choice(("makespan", "span"))}
    if kind not in OWN or rng.random() < 0.3:
        schedule["memory_limit"] = f"{rng.uniform(1.0, 2.0):.3f}x"
    model = {"vocab": rng.choice((256, 5000)), "seq_len": 32}
    return job(kind=kind, pp=p, m=m, layers=2 * p * rng.randint(1, 3), model=model, costs=costs, schedule=schedule)


@pytest.mark.long("3", "4", "7", "11", "12")
@pytest.mark.parametrize("seed", few(range(48), 16))
def test_plans_keep_to_units_and_to_bytes(seed):
    """On devices of any size, compared with the plan without one."""
    made, rng = limited_job(seed), Random(-seed)
    free = compile_job(made, suggest=False, budget=0.0)
    most = max(rank.bytes for rank in free.memory)
    own, asked, p = OWN.get(made.schedule.kind or ""), made.schedule.memory_limit, made.parallel.pp
    units = min(own(p) if own else 1e9, float(asked[:-1]) * p if asked else 1e9)
    for share in (1000.0, 1.0 + 1e-9, rng.uniform(0.6, 1.0)):
        device = made.memory_for(most * share)
        small = replace(made, hardware=made.hardware.model_copy(update={"memory_gib": device}))
        try:
            plan = compile_job(small, suggest=False, budget=0.0)
        except ZbcError:
            assert share < 1
            continue
        assert max(rank.units for rank in plan.memory) <= units + 1e-6
        assert max(rank.bytes for rank in plan.memory) <= small.room
        assert share < 1 or plan.step_ms <= free.step_ms * (1 + 1e-9)  # other partitions are tried, too
        limits = plan.report.limits
        assert (limits.activation_units or 0.0) == pytest.approx(units, abs=1e-9)
        assert limits.device_bytes == pytest.approx(small.room, abs=1)


@pytest.mark.long
@pytest.mark.parametrize("kind", few(["zb-v", "v-half", "v-min"], ("v-half",)))
def test_a_device_with_room_changes_no_plan(kind):
    free, roomy = (
        compile_job(load_job(PAPER, more, kind), budget=0.0) for more in ((), ("hardware.memory_gib=100000",))
    )
    assert roomy.program == free.program
    assert roomy.report.limits.activation_units == free.report.limits.activation_units
    assert (free.report.limits.device_bytes, roomy.report.limits.device_bytes) == (None, roomy.job.room)
