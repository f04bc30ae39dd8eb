"""Weights that are resharded and unsharded within a step: bitwise equal to training with resident weights."""

import itertools
from collections import Counter
from functools import cache

import pytest
import torch

from tests.runtime.small_plans import GPT, make_plan, make_program
from tests.runtime.test_gradients import VECTORS, user
from tests.threads import run_threads, watch
from tests.tiers import few
from zbc.compiler.schedules import SCHEDULES, Request, find
from zbc.errors import ZbcError
from zbc.runtime.features.shards.gathers import Gathers

CLIPPED = {"lr": 1e-2, "clip_grad_norm": 0.5}
STEPS = 3


def freeing(schedule, p, m, resident, v=None, *, tied=False, with_w=False):
    """A program of two replicas that gathers its weights when ops need them."""
    tied = tied and make_program(schedule, p, m, v).placement.stages > 1
    return make_program(schedule, p, m, v, copies=2, sharded=True, tied=tied, resident=resident, with_w=with_w)


def plan_of(schedule, p, m, resident, *, model=GPT, tied=False, v=None, with_w=False, **how):
    if resident:
        program = freeing(schedule, p, m, resident, v, tied=tied, with_w=with_w)
    else:
        ties = tied and make_program(schedule, p, m, v).placement.stages > 1
        program = make_program(schedule, p, m, v, copies=2, tied=ties)
    model = {**model, "layers": max(model["layers"], program.placement.stages), "ties": tied}
    return make_plan(program, model=model, optimizer=how.pop("optimizer", CLIPPED), **how)


def weights(workers):
    """Every element of every weight, from the rank that is responsible for it."""
    found: dict[str, torch.Tensor] = {}
    for worker in workers:
        for optimizer in worker.optimizers.values():
            for held in optimizer.held():
                whole = found.setdefault(held.name, torch.full(held.shape, torch.nan, dtype=held.tensor.dtype))
                part = held.tensor.detach().reshape(-1)
                whole.view(-1)[held.start : held.start + part.numel()] = part
    assert not any(value.isnan().any() for value in found.values())
    return found


def same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        assert [(r.loss, r.grad_norm) for r in mine.results] == [(r.loss, r.grad_norm) for r in theirs.results]
    before, after = weights(one), weights(other)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@cache
def whole(schedule, p, m, dtype):
    return run_threads(plan_of(schedule, p, m, 0, model={**GPT, "dtype": dtype}), STEPS)


MODELS = {
    "W looks at weights": user("convolving"),
    # read by the next stage, or still on its way, when the weights of its own have gone
    "a weight is given": {**user("convolving"), "family": "tests.runtime.zoo:hands_out_weights"},
}
ONE_PIPE = sorted(
    name for name in SCHEDULES if len(find(name).make(Request(2, 4, find(name).default_chunks)).placement.pipes) == 1
)
CASES = [
    (name, resident, dtype)
    for name, dtype in itertools.product(ONE_PIPE, ("float32", "bfloat16"))
    for resident in range(1, len(find(name).make(Request(2, 4, find(name).default_chunks)).placement.stages_of(0)) + 1)
]
SAMPLE = [("breadth-first", 1, "float32"), ("breadth-first", 1, "bfloat16"), ("zb-v", 1, "float32")]
SAMPLE += [("zb-v", 2, "bfloat16"), ("interleaved-1f1b", 1, "bfloat16")]


def plan_of_case(schedule, resident, dtype):
    """The plan; None if a group needs the weights of two stages, with room for one stage only."""
    try:
        return plan_of(schedule, 2, 4, resident, model={**GPT, "dtype": dtype})
    except ZbcError as error:
        assert error.code == "E110" and resident == 1


@pytest.mark.long("zb-v-1-float32", "zb-v-2-bfloat16", "breadth-first-1-bfloat16", "interleaved-1f1b-1-bfloat16")
@pytest.mark.parametrize(("schedule", "resident", "dtype"), few(CASES, SAMPLE))
def test_weights_that_come_and_go_change_no_bit(schedule, resident, dtype):
    plan = plan_of_case(schedule, resident, dtype)
    if plan is not None:
        same(run_threads(plan, STEPS), whole(schedule, 2, 4, dtype))


HOW = {
    **{f"shared: {schedule}": (schedule, {"tied": True}) for schedule in ("zb-v", "breadth-first", "1f1b")},
    "masters of pieces": ("zb-v", {"model": {**GPT, "dtype": "bfloat16", "parameters": "bfloat16"}}),
    "layers run again": ("breadth-first", {"activations": "recompute"}),
    **{
        f"{factory}: {schedule}": (schedule, {"with_w": True, "model": model, **VECTORS})
        for factory, model in MODELS.items()
        for schedule in ("zb-v", "breadth-first" if factory == "W looks at weights" else "interleaved-1f1b")
    },
}


@pytest.mark.long("shared: zb-v", "layers run again", "masters of pieces")
@pytest.mark.parametrize("name", few(HOW, lambda name: name not in ("shared: breadth-first", "shared: 1f1b")))
def test_weights_that_come_and_go_change_no_bit_of_what_else_a_stage_may_have(name):
    schedule, how = HOW[name]
    same(*(run_threads(plan_of(schedule, 2, 4, room, **how), STEPS) for room in (1, 0)))


def test_no_more_weights_are_there_than_there_is_room_for():
    plan, most = plan_of("breadth-first", 2, 4, 1, v=3), Counter()

    def look(worker, op):
        here = [one for one in worker.features.of(Gathers).freed if one.weights._flat and one.weights._flat.bytes]
        most[worker.rank] = max(most[worker.rank], len(here))

    run_threads(plan, 1, setup=lambda worker: watch(worker, after=look))
    assert most == dict.fromkeys(range(4), 1)
