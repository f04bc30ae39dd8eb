"""Copies of the pipeline train like one with all their microbatches, and stay equal; two pipes as well."""

import sysconfig
import threading
from pathlib import Path

import pytest
import torch

from tests.lowered import lower
from tests.runtime.small_plans import GPT, hold, make_plan, make_program, make_worker, parameters, reference
from tests.runtime.test_gradients import check_gradients, without_step
from tests.threads import each_parameter, run_threads, watch
from tests.tiers import few
from tests.uneven import FOLD, FORK, THREE, eager
from zbc.compiler.check import check_all
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement
from zbc.runtime.core.bucket import Bucket
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.optimizer import primary
from zbc.runtime.features.shards.sharded import Sharded
from zbc.runtime.transports.hub import Hub

TEXT = {"kind": "text", "path": str(Path(sysconfig.get_paths()["stdlib"], "argparse.py"))}
REAL = {"model": {**GPT, "layers": 4, "vocab": 256}, "data": TEXT}
CLIPPED = {"lr": 1e-2, "clip_grad_norm": 0.5}


def copies_of(schedule, p, m, copies, *, tied=False, keep=lambda op: True, v=None, **how):
    """The plan of a GPT on real text, or with changes `how`."""
    chosen = how.get("optimizer", {})
    ties = {"tied": tied and make_program(schedule, p, m, v).placement.stages > 1}
    sync, sharded = chosen.get("sync", "before-step"), chosen.get("zero1", False)
    program = make_program(schedule, p, m, v, sync=sync, copies=copies, sharded=sharded, **ties)
    options = {**REAL, "optimizer": CLIPPED, **how}
    return make_plan(program, keep=keep, **{**options, "model": {**options["model"], "ties": tied}})


def alike(workers):
    """Asserts that all copies of a parameter are bitwise equal; returns the parameters by name."""
    found = parameters(workers)
    for worker, name, parameter in each_parameter(workers):
        assert torch.equal(parameter, found[name]), (worker.rank, name)
    return found


def results(workers):
    every = [[(r.loss, r.grad_norm) for r in worker.results] for worker in workers]
    assert all(one == every[0] for one in every)
    return every[0]


def same(one, other):
    """Asserts bitwise equal losses, norms and weights; returns the weights by name."""
    assert results(one) == results(other)
    before, after = alike(one), alike(other)
    assert all(torch.equal(before[name], after[name]) for name in before)
    return after


def test_copies_train_as_one_process_with_the_microbatches_of_all():
    plan = copies_of("zb-v", 2, 4, 2, optimizer={"kind": "sgd", "lr": 0.1, "clip_grad_norm": 0.5})
    hold(run_threads(plan, 3), reference(plan, 3), tolerance=1e-5)


SKIPS = [(False, "before-step"), (True, "before-step"), (True, "post-validate")]


@pytest.mark.always("True-post-validate")
@pytest.mark.parametrize(("zero1", "sync"), few(SKIPS, [(True, "post-validate")]))
def test_a_gradient_that_is_not_finite_on_one_copy_skips_the_step_on_all(zero1, sync):
    plan = copies_of("zb-h1", 2, 2, 2, optimizer={**CLIPPED, "zero1": zero1, "sync": sync})

    def poison(worker):
        stage = worker.stages[worker.plan.rank]
        forward, parameter = stage.forward, next(iter(stage.parameters.values()))

        def broken(x, step, mb, *rest):
            if (worker.rank, step, mb) == (3, 1, 3):  # the last microbatch of the second copy
                parameter.grad = torch.full_like(parameter, torch.nan)
            return forward(x, step, mb, *rest)

        stage.forward = broken

    one, two, three = (run_threads(plan, steps, setup=poison) for steps in (1, 2, 3))
    assert [[r.skipped for r in worker.results] for worker in three] == [[False, True, False]] * 4
    before, after = alike(one), alike(two)
    assert all(torch.equal(before[name], after[name]) for name in before), "the skipped step left no trace"
    assert not all(torch.equal(before[name], p) for name, p in alike(three).items())


def test_a_rank_goes_on_computing_while_its_sum_waits_for_another_copy():
    """The second copy starts its sum only after the first copy has computed more ops after its own."""
    plan, computed, late = copies_of("zb-v", 2, 4, 2), threading.Event(), []

    def wrap(worker):
        ops = [op for _, op, _ in worker.script]
        first = next(i for i, op in enumerate(ops) if op.kind is Kind.REDUCE)
        behind = next(op for op in ops[first:] if op.kind.computes)
        if worker.rank == 0:
            watch(worker, after=lambda worker, op: computed.set(), of=lambda op: op == behind)
        elif worker.rank == 2:
            watch(worker, before=lambda worker, op: late.append(computed.wait(60)), of=lambda op: op == ops[first])

    workers = run_threads(plan, 1, setup=wrap)
    assert late == [True] and results(workers) == results(run_threads(plan, 1))


def test_a_parameter_without_a_gradient_on_one_rank_gets_the_sum_and_on_all_ranks_none():
    hub, found = Hub(2), []
    for rank, grads in enumerate([{"b": 1.0}, {"b": 2.0, "c": 4.0}]):
        named = {name: torch.nn.Parameter(torch.zeros(2, 3)) for name in "ac"}
        named["b"] = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))  # a vector of its own
        for name, value in grads.items():
            named[name].grad = torch.full_like(named[name], value)
        found.append((named, Bucket([*named.values()], (0, 1))))
        found[-1][1].start(hub.end(rank))
    for named, bucket in found:
        bucket.finish()
        assert named["a"].grad is None and named["c"].grad.tolist() == [[4.0] * 3] * 2
        assert named["b"].grad.tolist() == [3.0] * 4 and named["b"].grad.dtype is torch.float64


def test_a_sum_that_is_started_twice_or_never_used_is_an_error():
    hub = Hub(1)
    bucket = Bucket([torch.nn.Parameter(torch.ones(3))], (0,))
    bucket.start(hub.end(0))
    with pytest.raises(ZbcError, match="started twice"):
        bucket.start(hub.end(0))
    plan = copies_of("1f1b", 1, 1, 2)
    program = plan.program.with_ranks([[*ops[:-1], Op(Kind.REDUCE, 0)] for ops in plan.program.ranks], by="test")
    hub = Hub(2)
    worker = make_worker(type(plan)(plan.manifest, program), 0, hub)
    worker.finish_sums = lambda: None
    worker.all_reduce = lambda tensor, ranks: None
    with pytest.raises(ZbcError, match="a sum of gradients was started"):
        run_step(worker, 0)


ON_A_NODE = [("zb-h1", {}, False), ("zb-v", {"zero1": True}, True), ("1f1b", {"sync": "post-validate"}, True)]
ON_A_NODE += [("chimera", {"zero1": True}, False)]


@pytest.mark.long("zb-v-optimizer1-True")
@pytest.mark.parametrize(("schedule", "optimizer", "tied"), few(ON_A_NODE, ("zb-v", "chimera")))
def test_copies_that_share_a_node_train_alike(schedule, optimizer, tied):
    """Ranks 0 and 1 are two copies of the first rank of the pipeline. Bitwise equal if sums have only two terms."""
    options = {"optimizer": {**CLIPPED, **optimizer}, "tied": tied}
    plain, mixed = (run_threads(copies_of(schedule, 2, 4, 2, node=node, **options), 3) for node in ((), (1, 2)))
    assert [(w.replica, w.plan.rank) for w in mixed] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    before, after, tolerance = alike(plain), alike(mixed), 0.0 if schedule.startswith("zb") else 1e-6
    for one, two in zip(results(plain), results(mixed), strict=True):
        assert one == pytest.approx(two, rel=tolerance, abs=0)
    for name in before:
        torch.testing.assert_close(before[name], after[name], rtol=0, atol=10 * tolerance)
    assert sorted(n for w in mixed for n in primary(w)) == sorted(n for w in plain for n in primary(w))


SHARED_OUT = [(kind, 2, 2, False) for kind in ("1f1b", "zb-h1", "zb-v", "breadth-first")]
SHARED_OUT += [("chimera", 2, 1, False), ("dualpipe", 2, 2, True)]
SHARED_OUT = [(*one, "before-step", True, 0.5) for one in SHARED_OUT]
AHEAD = [("1f1b", 2, 2, False, False), ("zb-h1", 2, 1, True, False), ("zb-v", 2, 2, True, False)]
AHEAD += [("interleaved-1f1b", 2, 2, True, False), ("1f1b", 2, 2, False, True), ("zb-v", 2, 2, True, True)]
AHEAD += [("zb-h2", 2, 3, False, True), ("chimera", 2, 1, False, True), ("dualpipe", 2, 2, True, True)]
AHEAD = [(*one, "post-validate", *how) for *one, zero1 in AHEAD for how in ((zero1, 0.5), (zero1, 1e6))]
OFTEN = [SHARED_OUT[n] for n in (0, 2, 5)] + [AHEAD[n] for n in (0, 11, 14)]


@pytest.mark.long("chimera-2-1-False-post-validate-True-0.5")
@pytest.mark.parametrize(
    ("schedule", "p", "copies", "tied", "sync", "zero1", "largest"), few(SHARED_OUT + AHEAD, OFTEN)
)
def test_sharing_out_the_optimizer_and_no_barrier_change_no_bit(schedule, p, copies, tied, sync, zero1, largest):
    """Loss, norm and weights, clipped in every step, and never; also sharded over both pipes of a schedule."""
    ways = ({**CLIPPED, "clip_grad_norm": largest, **how} for how in ({}, {"sync": sync, "zero1": zero1}))
    plain, other = (run_threads(copies_of(schedule, p, 4, copies, tied=tied, optimizer=how), 4) for how in ways)
    assert all(isinstance(o, Sharded) is zero1 for w in other for o in w.optimizers.values())
    same(plain, other)


@pytest.mark.long("pipes1")
@pytest.mark.parametrize("pipes", [FORK, FOLD, THREE])
@pytest.mark.parametrize("split", few([False, True], (True,)))
def test_ranks_may_hold_different_numbers_of_stages_and_pipes_leave_some_out(pipes, split):
    program = lower(eager(Placement(pipes), 5, split=split))
    check_all(program)
    check_gradients(make_plan(program, keep=without_step), tolerance=1e-6)


@pytest.mark.long("dualpipe-v-2")
@pytest.mark.parametrize(("name", "v"), [("dualpipe", 1), ("dualpipe-v", 2)])
def test_groups_run_one_op_after_the_other_where_there_is_one_stream(name, v):
    program = lower(SCHEDULES[name].make(Request(4, 8, v, overlap=True)))
    assert any(op.kind is Kind.OVERLAP for ops in program.ranks for op in ops)
    check_gradients(make_plan(program, keep=without_step), tolerance=1e-6)
