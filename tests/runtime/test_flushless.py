"""Steps without a flush: bitwise equal to one process whose gradients come a step late."""

import math

import pytest
import torch

from tests.composed import planned, settings
from tests.refusals import refused
from tests.runtime.small_plans import (
    GPT,
    LLAMA,
    hold,
    make_plan,
    make_program,
    parameters,
    reference,
)
from tests.runtime.test_gradients import VECTORS, user
from tests.threads import each_parameter, losses_of, run_threads
from tests.tiers import few
from zbc.ir import Kind
from zbc.ops import experts_of
from zbc.runtime.core.ending import leftovers
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.optimizer import InPlace
from zbc.runtime.features.tensor_parallel import SharedLayers
from zbc.runtime.features.unflushed.versions import TwoVersions

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
OPTIMIZERS = {"adamw": ADAMW, "sgd": {"kind": "sgd", "lr": 0.1}}
OPTIMIZERS |= {"momentum": {"kind": "sgd", "lr": 0.05, "momentum": 0.9}}
OPTIMIZERS |= {"rates": {**ADAMW, "schedule": {"kind": "cosine", "warmup_steps": 4}}}
OPTIMIZERS |= {"clipped": {**ADAMW, "clip_grad_norm": 0.4}}
SHAPES = [("1f1b", 2, 3, 1), ("1f1b", 4, 3, 1), ("1f1b", 3, 5, 1), ("1f1b", 1, 2, 1), ("interleaved-1f1b", 2, 4, 2)]
SHAPES += [("interleaved-1f1b", 3, 6, 2), ("gis", 2, 4, 2), ("gis", 3, 6, 2)]
SMALL = {**GPT, "layers": 6, "hidden": 16, "vocab": 31}


def plan_of(schedule="1f1b", p=2, m=3, v=1, *, dp=1, optimizer=ADAMW, **options):
    program = make_program(schedule, p, m, v, sync="two-versions", copies=dp)
    return make_plan(program, optimizer=optimizer, **options)


def check(plan, steps, *, tolerance=0.0, **options):
    wanted = reference(plan, steps, delayed=True)
    workers = run_threads(plan, steps, **options)
    assert [one.step for one in workers[0].results] == list(range(steps))
    hold(workers, wanted, tolerance=tolerance)
    for worker in workers:
        assert leftovers(worker) == []
        assert [one.loss for one in worker.results] == losses_of(workers)
    return workers


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "p", "m", "v"), few(SHAPES, [SHAPES[1], SHAPES[4]]))
def test_fifty_steps_have_the_bits_of_one_process_a_step_late(schedule, p, m, v):
    check(plan_of(schedule, p, m, v, model=SMALL), 50)


MORE = [("interleaved-1f1b", 2, 4, 2, {"activations": "recompute"}), ("interleaved-1f1b", 2, 4, 2, {"model": LLAMA})]
MORE += [("1f1b", 3, 3, 1, {"model": user("residual", dropout=0.3), **VECTORS})]
LOW = [{**SMALL, "dtype": "bfloat16", "parameters": parameters} for parameters in ("float32", "bfloat16")]
MORE += [("interleaved-1f1b", 2, 4, 2, {"model": model}) for model in LOW]
MORE += [("1f1b", 3, 4, 1, {"optimizer": how}) for how in OPTIMIZERS.values()]


@pytest.mark.long("how1", "how3", "how4", "how5", "how8", "how9")
@pytest.mark.parametrize(("schedule", "p", "m", "v", "how"), MORE)
def test_optimizers_models_and_recompute(schedule, p, m, v, how):
    """Dropout draws what its step draws."""
    clipped = "clip_grad_norm" in how.get("optimizer", {})
    check(plan_of(schedule, p, m, v, **how), 6, tolerance=1e-6 if clipped else 0.0)


def test_replicas_sum_each_step():
    workers = check(plan_of("1f1b", 2, 2, dp=2, optimizer=OPTIMIZERS["sgd"]), 5, tolerance=1e-6)
    first, second = parameters(workers[:2]), parameters(workers[2:])
    assert all(first[name].equal(second[name]) for name in first)


# ---- what stands between steps ---------------------------------------------------------------------------------


def evaluating(every):
    data = {"kind": "synthetic", "validation": 0.1}
    return plan_of("1f1b", 3, 4, model=SMALL, data=data, train={"eval_every": every, "eval_batches": 1})


@pytest.mark.long
def test_an_evaluation_changes_nothing():
    """It comes after an epilogue, and the prologue after it begins with the older weights."""
    found = check(evaluating(2), 7)[0].evaluation.results
    assert [one.step for one in found] == [1, 3, 5, 6]
    assert found[0].loss == run_threads(evaluating(2), 2)[0].evaluation.results[0].loss


def test_a_run_that_is_asked_to_stop_ends_with_the_step_that_has_begun():
    plan = plan_of("1f1b", 3, 4, model=SMALL)

    def step(worker):
        return lambda one, number, stop=False: run_step(one, number, stop=stop or (worker.rank == 1 and number == 2))

    workers = run_threads(plan, 20, step=step)
    ran = [one.step for one in workers[0].results]
    assert ran == list(range(5))  # asked in step 3 (from 1), known at the end of step 4, when step 5 has begun
    hold(workers, reference(plan, 5, delayed=True))


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def poisoned(worker, spoils):
    """The gradient of `spoils(worker, op)`, a parameter or None, is NaN in the second step."""
    ending = worker.phase_run.ending
    plain = ending.handlers[Kind.STEP]

    def poison(one, op):
        parameter = spoils(one, op) if one.step == 1 else None
        if parameter is not None:
            parameter.grad.fill_(math.nan)
        plain(one, op)

    ending.handlers = {**ending.handlers, Kind.STEP: poison}


def mine(worker, spoiled):
    """A parameter whose gradient only this rank has: of an expert, or of a shared layer."""
    if spoiled == 0:
        return next(iter(worker.optimizers[experts_of(0)].parameters.values()))
    cut = worker.features.of(SharedLayers).cuts
    return next(p for name, p in worker.stages[0].parameters.items() if name in cut)


EXPERTS = {"model__family": "llama", "model__layers": 4, "model__experts": 4, "model__ffn_hidden": 64}
EXPERTS |= {"parallel__ep": 2, "parallel__dp": 2}
SKIPS = [("", EXPERTS, 0, [2, 3, 2, 3]), ("tp", {}, 1, [2, 2, 3, 3])]


@pytest.mark.long("-more0-0-steps0")
@pytest.mark.parametrize(("trait", "more", "spoiled", "steps"), SKIPS)
def test_ranks_skip_a_step_with_their_stage(trait, more, spoiled, steps):
    """One of two ranks with experts, or with a part, of the first stage has a gradient that is not finite."""
    tables = settings("two versions", *filter(None, (trait,)), parallel__pp=2, schedule__microbatches=4, **more)

    def spoils(worker, op):
        return mine(worker, spoiled) if (worker.rank, op.stage) == (spoiled, 0) else None

    workers = run_threads(planned(tables), 3, setup=lambda worker: poisoned(worker, spoils))
    taken = [
        {int(one["step"]) for optimizer in worker.optimizers.values() for one in optimizer.optimizer.state.values()}
        for worker in workers
    ]
    assert taken == [{one} for one in steps]
    assert all(torch.isfinite(p).all() for _, _, p in each_parameter(workers))


def test_a_stage_whose_gradients_are_not_finite_skips_its_step():
    plan = plan_of("1f1b", 3, 4, model=SMALL)

    def first(worker, op):
        return next(iter(worker.stages[1].parameters.values())) if op.stage == 1 else None

    workers = run_threads(plan, 4, setup=lambda worker: poisoned(worker, first))
    assert [one.skipped for one in workers[0].results] == [False, True, False, False]
    assert all(torch.isfinite(p).all() for p in parameters(workers).values())
    states = [worker.optimizers[stage].optimizer.state for worker in workers for stage in worker.optimizers]
    assert [{int(one["step"]) for one in state.values()} for state in states] == [{4}, {3}, {4}]


def test_weights_that_are_not_here_and_what_a_step_leaves_behind_are_e703():
    with refused("E703"):
        TwoVersions(InPlace({}, None)).before(None, 2)
    # The last backward of a step is missing: the activations of its forward do not belong to the next step.
    program = make_program("1f1b", 2, 3, sync="two-versions")
    plan = make_plan(program, optimizer=ADAMW, keep=lambda op: str(op) != "BW s1 m2")
    with refused("E703"):
        run_threads(plan, 3)


# ---- error feedback: compared with one process by hand ---------------------------------------------------------


def fed(**optimizer):
    found = settings("two versions")
    found["optimizer"] |= {"feedback": 1.0, **optimizer}
    found["parallel"]["pp"] = 2
    return found


@pytest.mark.long
def test_an_update_makes_good_what_the_last_one_was_off_by():
    """In plain gradient descent, step by step: u(t) is -0.3 times the gradient at W(t)."""
    plan = planned(fed(kind="sgd", lr=0.3, weight_decay=0.0))
    workers = run_threads(plan, 5)
    hold(workers, reference(plan, 5, delayed=True, feedback=1.0), tolerance=5e-6, near=1e-6)
