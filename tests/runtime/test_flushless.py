"""Steps without a flush: bitwise equal to one process whose gradients come a step late."""

import math
from dataclasses import replace

import pytest
import torch

from tests.refusals import refused
from tests.runtime.small_plans import GPT, LLAMA, hold, make_plan, make_program, parameters, reference
from tests.runtime.test_checkpoints import at, same, tensors
from tests.runtime.test_gradients import VECTORS, user
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.ir import NEXT, Kind, Op
from zbc.runtime.core.ending import leftovers
from zbc.runtime.core.optimizer import InPlace
from zbc.runtime.features.unflushed import cycle
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
    return make_plan(program, optimizer={**optimizer, "sync": "two-versions"}, **options)


def check(plan, steps, *, tolerance=0.0, **options):
    wanted = reference(plan, steps, delayed=True)
    workers = run_threads(plan, steps, **options)
    assert [one.step for one in workers[0].results] == list(range(steps))
    hold(workers, wanted, tolerance=tolerance)
    for worker in workers:
        assert leftovers(worker) == []
        assert [one.loss for one in worker.results] == losses_of(workers)
    return workers


@pytest.mark.parametrize(("schedule", "p", "m", "v"), few(SHAPES, [SHAPES[1], SHAPES[4]]))
def test_fifty_steps_have_the_bits_of_one_process_a_step_late(schedule, p, m, v):
    check(plan_of(schedule, p, m, v, model=SMALL), 50)


def test_steps_without_a_flush_are_another_training():
    plan = plan_of(model=SMALL)
    assert reference(plan, 6, delayed=True).losses != reference(plan, 6).losses
    assert reference(plan, 2, delayed=True).losses[0] == reference(plan, 2).losses[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    tolerance = 1e-6 if name == "clipped" else 0.0
    check(plan_of("1f1b", 3, 4, optimizer=OPTIMIZERS[name]), 6, tolerance=tolerance)


def test_a_limit_for_each_stage_is_no_limit_for_all():
    plan = plan_of("1f1b", 3, 4, optimizer=OPTIMIZERS["clipped"])
    assert min(reference(plan, 4, delayed=True).norms) > 0.4 * math.sqrt(3)  # each stage is clipped
    free = reference(plan_of("1f1b", 3, 4), 4, delayed=True)
    assert free.losses[-1] != reference(plan, 4, delayed=True).losses[-1]


@pytest.mark.parametrize("how", [{"activations": "recompute"}, {"model": LLAMA}])
def test_recompute_and_other_models(how):
    check(plan_of("interleaved-1f1b", 2, 4, 2, **how), 5)


def test_dropout_draws_what_its_step_draws():
    check(plan_of("1f1b", 3, 3, model=user("residual", dropout=0.3), **VECTORS), 5)


def test_replicas_sum_each_step():
    workers = check(plan_of("1f1b", 2, 2, dp=2, optimizer=OPTIMIZERS["sgd"]), 5, tolerance=1e-6)
    first, second = parameters(workers[:2]), parameters(workers[2:])
    assert all(first[name].equal(second[name]) for name in first)


# ---- what stands between steps ---------------------------------------------------------------------------------


def evaluating(every, **how):
    data = {"kind": "synthetic", "validation": 0.1}
    return plan_of("1f1b", 3, 4, model=SMALL, data=data, train={"eval_every": every, "eval_batches": 1}, **how)


def test_an_evaluation_changes_nothing():
    """It comes after an epilogue, and the prologue after it begins with the older weights."""
    plain = reference(evaluating(50), 7, delayed=True)
    workers = check(evaluating(2), 7)
    assert [one.step for one in workers[0].evaluation.results] == [1, 3, 5, 6]
    assert losses_of(workers) == pytest.approx(plain.losses, rel=1e-6)
    assert workers[0].evaluation.results[0].loss == pytest.approx(
        run_threads(evaluating(2), 2)[0].evaluation.results[0].loss, abs=0.0
    )


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_run_that_goes_on_has_the_same_bits(tmp_path, name):
    checkpoint = {"every": 3, "keep": 9}
    options = {"optimizer": OPTIMIZERS[name], "model": SMALL}
    whole = run_threads(
        plan_of("1f1b", 3, 4, checkpoint={**checkpoint, "every": 9}, **options), 9, folder=tmp_path / "a"
    )
    run_threads(plan_of("1f1b", 3, 4, checkpoint=checkpoint, **options), 6, folder=tmp_path / "b")
    again = plan_of("interleaved-1f1b", 2, 4, 2, checkpoint=checkpoint, **options)  # other stages, too
    rest = run_threads(again, 9, folder=tmp_path / "b", resume=at(tmp_path / "b", 3))
    assert losses_of(rest) == losses_of(whole)[3:]
    same(at(tmp_path / "a", 9), at(tmp_path / "b", 9))
    kept = tensors(at(tmp_path / "b", 9))
    assert any(name.endswith(".older") for name in kept)


def test_other_ways_to_step_go_on_from_its_checkpoints(tmp_path):
    """And vice versa: from a checkpoint with one version the first step has no delay."""
    checkpoint = {"every": 2}
    mine = plan_of(model=SMALL, checkpoint=checkpoint)
    other = make_plan(make_program("1f1b", 2, 3), model=SMALL, checkpoint=checkpoint, optimizer=ADAMW)
    run_threads(mine, 2, folder=tmp_path / "a")
    run_threads(other, 4, folder=tmp_path / "b", resume=at(tmp_path / "a", 2))
    assert not any(name.endswith(".older") for name in tensors(at(tmp_path / "b", 4)))
    run_threads(mine, 6, folder=tmp_path / "c", resume=at(tmp_path / "b", 4))


def test_a_run_that_is_asked_to_stop_ends_with_the_step_that_has_begun():
    plan = plan_of("1f1b", 3, 4, model=SMALL)

    def step(worker):
        def run(one, number, *, stop=False):
            return cycle_step(one, number, stop=stop or (worker.rank == 1 and number == 2))

        return run

    from zbc.runtime.core.execute import run_step as cycle_step

    workers = run_threads(plan, 20, step=step)
    ran = [one.step for one in workers[0].results]
    assert ran == list(range(5))  # asked in step 3 (from 1), known at the end of step 4, when step 5 has begun
    wanted = reference(plan, 5, delayed=True)
    for name, p in parameters(workers).items():
        assert p.detach().equal(wanted.weights[name]), name


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def poisoned(worker, step, stage):
    """Makes a gradient of a stage NaN in one step."""

    def run(one, number, *, stop=False):
        from zbc.runtime.core.execute import run_step

        return run_step(one, number, stop=stop)

    if stage in worker.stages:
        plain = worker.phase_run.ending.handlers[Kind.STEP]

        def poison(one, op):
            if one.step == step and op.stage == stage:
                next(iter(one.stages[stage].parameters.values())).grad.fill_(math.nan)
            plain(one, op)

        worker.phase_run.ending.handlers = {**worker.phase_run.ending.handlers, Kind.STEP: poison}
    return run


def test_a_stage_whose_gradients_are_not_finite_skips_its_step():
    plan = plan_of("1f1b", 3, 4, model=SMALL)
    workers = run_threads(plan, 4, step=lambda worker: poisoned(worker, 1, 1))
    assert [one.skipped for one in workers[0].results] == [False, True, False, False]
    assert all(torch.isfinite(p).all() for p in parameters(workers).values())
    states = [worker.optimizers[stage].optimizer.state for worker in workers for stage in worker.optimizers]
    assert [{int(one["step"]) for one in state.values()} for state in states] == [{4}, {3}, {4}]


def broken(plan, monkeypatch, how):
    wanted = reference(plan, 6, delayed=True)
    how(monkeypatch)
    found = parameters(run_threads(plan, 6))
    return any(not p.detach().equal(wanted.weights[name]) for name, p in found.items())


def test_a_version_that_is_switched_for_forwards_only_is_noticed(monkeypatch):
    """A layer that uses its weights in backward would read weights of another step."""

    def break_it(patch):
        plain = cycle._of_this

        def only_forwards(handler, *given):
            return plain(handler, *given) if handler is cycle_forward else handler(*given)

        patch.setattr(cycle, "_of_this", only_forwards)

    from zbc.runtime.core.ops import forward as cycle_forward

    plan = plan_of("1f1b", 3, 4, model=SMALL, activations="recompute")
    assert not broken(plan, monkeypatch, lambda patch: None)
    assert broken(plan, monkeypatch, break_it)


def test_a_backward_before_the_step_of_the_step_before_is_wrong_without_a_word():
    """Norms and biases get their gradients in B. The check finds it (E210); a run would be silently wrong."""
    program = make_program("1f1b", 3, 3, sync="two-versions")
    ops = []
    for op in program.ranks[1]:
        halves = [op._replace(kind=Kind.B), op._replace(kind=Kind.W)]
        ops += halves if op.kind is Kind.BW else [op]
    late = Op(Kind.W, 1, 2)
    first, buffer = (next(op for op in ops if op.kind is kind and op.mb % NEXT == 0) for kind in (Kind.B, Kind.RECV_B))
    ops = [op for op in ops if op not in (first, buffer)]
    at = ops.index(late)
    early = [buffer._replace(mb=NEXT), first._replace(mb=NEXT)]
    ranks = (program.ranks[0], (*ops[:at], *early, *ops[at:]), program.ranks[2])
    broken = replace(program, ranks=ranks)
    with refused("E210"):
        check_all(broken)
    plan = make_plan(broken, model=SMALL, optimizer={**ADAMW, "sync": "two-versions"})
    wanted, weights = reference(plan, 4, delayed=True).weights, parameters(run_threads(plan, 4))
    wrong = {name for name, p in weights.items() if not p.detach().equal(wanted[name])}
    assert {name.rpartition(".")[2] for name in wrong} >= {"weight", "bias"}


def test_a_step_that_forgets_to_copy_is_noticed(monkeypatch):
    plan = plan_of("1f1b", 3, 4, model=SMALL)
    copies = "zbc.runtime.features.unflushed.versions.copy_all"
    assert broken(plan, monkeypatch, lambda patch: patch.setattr(copies, lambda *_: None))


def test_an_op_on_weights_that_are_not_here_is_refused():
    with refused("E703"):
        TwoVersions(InPlace(_options(), {})).before(None, 2)


def _options():
    from zbc.job import spec

    return spec.Optimizer()


def test_what_a_step_leaves_behind_is_found():
    """The last backward of a step is missing: the activations of its forward do not belong to the next step."""
    program = make_program("1f1b", 2, 3, sync="two-versions")
    plan = make_plan(program, optimizer={**ADAMW, "sync": "two-versions"}, keep=lambda op: str(op) != "BW s1 m2")
    with refused("E703"):
        run_threads(plan, 3)


def test_forwards_of_the_next_step_run_in_this_one():
    plan = plan_of("1f1b", 3, 4, model=SMALL)
    ahead = [sum(op.mb >= NEXT for op in ops if op.kind is Kind.F) for ops in plan.program.ranks]
    assert ahead == [2, 1, 0]
