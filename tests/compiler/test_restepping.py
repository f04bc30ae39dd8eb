"""`schedule.renumber = "steps"`: numbers of microbatches for the lengths of each step."""

import random

import pytest

from tests.compiler.test_lengths import GIVEN
from tests.jobs import job
from tests.refusals import refused
from zbc.compiler import recall
from zbc.compiler.compile import compile_job
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.restepping import Restepper
from zbc.compiler.sim.simulate import simulate
from zbc.plan.directory import StoredPlan

PLANNED = [2048, 1024, 512, 256, 128, 64]
DEALT = {"kind": "synthetic", "balance": "tokens"}


def plan_of(kind, *, costs=GIVEN["costs"], **hardware):
    schedule = {"tokens": PLANNED, "renumber": "steps", "microbatches": 6, "microbatch_size": 1}
    model = {"family": "llama", "seq_len": 2048, "hidden": 64}
    made = job(kind=kind, pp=3, schedule=schedule, data=DEALT, model=model, costs=costs, hardware=hardware)
    compiled = compile_job(made, suggest=False, budget=0.0)
    return StoredPlan(compiled.assemble()[0], compiled.program)


def drawn(count=6, middle=300):
    source = random.Random(count)
    for _ in range(count):
        yield [min(2048, max(16, round(middle * source.lognormvariate(0, 1)))) for _ in PLANNED]


def apart(plan, tokens):
    """ms of a step whose microbatches have these tokens, and the memory of its ranks."""
    made = recall.job_of(plan.manifest).with_tokens(tokens)
    costs = recall.costs_for(made, plan.manifest)
    timeline = simulate(plan.program, costs)
    ms = timeline.span if made.objective == "span" else timeline.makespan
    return ms, [rank.bytes for rank in peaks(plan.program, costs, timeline)]


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_a_step_is_never_longer_than_with_the_numbers_of_the_plan(kind):
    plan = plan_of(kind)
    restepper, gains = Restepper(plan), []
    for tokens in drawn():
        numbers, ms, given = restepper.of(tokens)
        assert sorted(numbers) == [*range(len(PLANNED))]
        (wanted, _), (plain, _) = apart(plan, [tokens[k] for k in numbers]), apart(plan, tokens)
        assert (ms, given) == (pytest.approx(wanted), pytest.approx(plain))
        gains.append(given / ms)
    assert min(gains) >= 1 and max(gains) > 1.01


def test_no_rank_exceeds_its_limit_for_a_shorter_step():
    """Or by no more than with the numbers of the plan."""
    free = plan_of("zb-h1")
    limit, over = 1.02 * max(apart(free, free.manifest.tokens)[1]), 0
    tight = plan_of("zb-h1", memory_gib=limit / 2**30)
    sides = Restepper(free), Restepper(tight)
    for tokens in drawn(8, 900):
        most = max(limit, *apart(free, tokens)[1])
        wanted, held = (max(apart(free, [tokens[k] for k in side.of(tokens)[0]])[1]) for side in sides)
        assert held <= most
        over += wanted > most
    assert over  # without a limit some hold more


def test_an_answer_depends_on_the_plan_and_the_tokens_alone():
    plan = plan_of("zb-h1")
    first, second, steps = Restepper(plan), Restepper(plan), list(drawn())
    forwards = [first.of(tokens) for tokens in steps]
    assert forwards == [second.of(tokens) for tokens in steps[::-1]][::-1]


def test_short_steps_get_a_few_tries_only():
    quick = {name: ms / 1e4 for name, ms in GIVEN["costs"].items()}
    plan, tokens = plan_of("1f1b", costs=quick), next(drawn())
    few, many = Restepper(plan), Restepper(plan_of("1f1b"))
    assert (few._tries, few._tries < many._tries) == (10, True)
    assert few.of(tokens)[2] / few.of(tokens)[1] <= many.of(tokens)[2] / many.of(tokens)[1] * (1 + 1e-9)


def test_samples_that_are_not_dealt_by_tokens_have_the_numbers_of_the_plan():
    with refused("E110", match='renumber = "steps" orders samples', hint='set data.balance = "tokens"'):
        job(schedule={"tokens": PLANNED[:4], "renumber": "steps", "microbatches": 4}, model={"seq_len": 2048})
