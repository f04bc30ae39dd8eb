"""Stages that step on their own: the same order of ops in one process has the same bits."""

from dataclasses import replace

import pytest
import torch

from tests.refusals import refused
from tests.runtime import one_by_one
from tests.runtime.small_plans import GPT, make_plan, parameters
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.lowering import Lowering
from zbc.compiler.schedules import Request, find, several
from zbc.compiler.sim.context import Context
from zbc.ir import Kind, Op, repeated
from zbc.plan.lateness import lateness
from zbc.runtime.core.optimizer import torch_optimizer
from zbc.runtime.core.private import unversioned
from zbc.training.building.context import Settings
from zbc.training.data.data import Batches, build_samples
from zbc.training.models import model

SMALL = {**GPT, "layers": 6, "hidden": 16, "vocab": 31}
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "sync": "asynchronous"}
SHAPES = [("1f1b", 2, 2, 1, 1), ("1f1b", 4, 4, 1, 1), ("1f1b", 3, 4, 1, 2), ("interleaved-1f1b", 2, 4, 2, 1)]


def program_of(schedule="1f1b", p=2, m=2, v=1, every=1):
    made = find(schedule).make(Request(p=p, m=m, v=v))
    program = Lowering("asynchronous", every=every, several=several).lower(Context.of(made)).program
    check_all(program)
    return program


def plan_of(schedule="1f1b", p=2, m=2, v=1, every=1, *, optimizer=ADAMW, lookahead=False, **options):
    chosen = {**optimizer, "every": every, "lookahead": lookahead}
    return make_plan(program_of(schedule, p, m, v, every), model=SMALL, optimizer=chosen, **options)


class OneProcess:
    """The ops of all ranks in turn, each as soon as its inputs exist, on plain layers and one set of weights."""

    def __init__(self, plan, steps):
        manifest, self.settings = plan.manifest, Settings.of(plan.manifest)
        options, seed = self.settings.optimizer, self.settings.train.seed
        self.m, self.every = manifest.microbatches, options.every
        samples = build_samples(self.settings.data, self.settings.model, seed)
        self.batches = Batches(samples, seed=seed, microbatches=self.m, size=manifest.microbatch_size)
        layers = one_by_one.built(plan)
        self.stages = [[layers[name] for name in names] for names in manifest.layers]
        self.weights = [[p for layer in stage for p in layer.parameters()] for stage in self.stages]
        self.named = {f"{n}.{local}": p for n, one in layers.items() for local, p in one.named_parameters()}
        named = [{str(k): p for k, p in enumerate(weights)} for weights in self.weights]
        self.optimizers = [torch_optimizer(options, one) for one in named]
        self.before = [[p.data.clone() for p in weights] for weights in self.weights]
        late = {s: n for ops in plan.program.ranks for s, n in lateness(ops).items()}
        self.tau = [late[s] if options.lookahead else 0 for s in range(manifest.stages)]
        self.made, self.stalest = [0] * manifest.stages, [0] * manifest.stages
        self.acts, self.grads, self.kept, self.losses = {}, {}, {}, {}
        ranks = repeated(plan.program, steps).ranks
        self._run([[op for op in ops if op.kind in (Kind.F, Kind.BW, Kind.STEP)] for ops in ranks])

    def _run(self, lists):
        at = [0] * len(lists)
        while any(i < len(ops) for i, ops in zip(at, lists, strict=True)):
            before = list(at)
            for rank, ops in enumerate(lists):
                while at[rank] < len(ops) and self._do(ops[at[rank]]):
                    at[rank] += 1
            assert at != before

    def _do(self, op):
        s, key, last = op.stage, (op.stage, op.mb), len(self.stages) - 1
        if op.kind is Kind.STEP:
            self.before[s] = [p.data.clone() for p in self.weights[s]]
            with unversioned(tuple(self.weights[s])):
                self.optimizers[s].step()
            self.optimizers[s].zero_grad(set_to_none=True)
            self.made[s] += 1
            return True
        if op.kind is Kind.F:
            if s and key not in self.acts:
                return False
            step, mb = divmod(op.mb, self.m)
            x = self.acts.pop(key) if s else self.batches.inputs(step, mb)
            leaf = x.requires_grad_() if s else x
            own = [p.data.clone() for p in self.weights[s]]
            for p, then in zip(self.weights[s], self.before[s], strict=True):
                p.data.add_(p.data - then, alpha=self.tau[s]) if self.tau[s] else None
            y = leaf
            for layer in self.stages[s]:
                y = layer(y)
            if s == last:
                y = model.loss(self.settings.model.loss)(y, self.batches.targets(step, mb))
                self.losses.setdefault(step, []).append(y.item())
            else:
                self.acts[s + 1, op.mb] = y.detach()
            for p, data in zip(self.weights[s], own, strict=True):
                p.data.copy_(data)
            self.kept[key] = leaf, y, self.made[s]
            return True
        if s < last and key not in self.grads:
            return False
        leaf, y, made = self.kept.pop(key)
        y.backward(torch.tensor(1.0 / self.every) if s == last else self.grads.pop(key))
        self.stalest[s] = max(self.stalest[s], self.made[s] - made)
        if s:
            self.grads[s - 1, op.mb] = leaf.grad
        return True


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "p", "m", "v", "every"), few(SHAPES, SHAPES[1:]))
@pytest.mark.parametrize("lookahead", [False, True])
def test_the_same_order_in_one_process_has_the_same_bits(schedule, p, m, v, every, lookahead):
    plan = plan_of(schedule, p, m, v, every, lookahead=lookahead)
    workers, wanted = run_threads(plan, 6), OneProcess(plan, 6)
    for name, parameter in parameters(workers).items():
        assert parameter.detach().equal(wanted.named[name]), name
    means = [sum(wanted.losses[step]) / m for step in range(6)]
    assert losses_of(workers) == pytest.approx(means, rel=1e-12)
    counted = {s: one.stalest for worker in workers for s, one in worker.optimizers.items()}
    late = {s: n for ops in plan.program.ranks for s, n in lateness(ops).items()}
    assert counted == late == dict(enumerate(wanted.stalest))


def test_the_steps_of_a_stage_and_their_lateness_are_those_of_the_order():
    late = [lateness(ops) for ops in program_of("1f1b", 8, 8).ranks]
    assert [one[stage] for stage, one in enumerate(late)] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert [lateness(ops)[s] for s, ops in enumerate(program_of("1f1b", 4, 4, every=4).ranks)] == [1, 1, 1, 0]
    texts = [str(op) for op in program_of("1f1b", 2, 4, every=2).ranks[1] if op.kind is Kind.STEP]
    assert texts == ["STEP s1", "STEP s1 #1"]
    assert [Op.parse(text) for text in texts] == [Op(Kind.STEP, 1), Op(Kind.STEP, 1, 1)]


def test_steps_that_are_not_equally_far_apart_are_found():
    program = program_of("1f1b", 2, 4, every=2)
    ops = list(program.ranks[1])
    step, later = ops.index(Op(Kind.STEP, 1)), ops.index(Op(Kind.BW, 1, 2))
    ops.insert(later, ops.pop(step)) if later < step else ops.insert(later + 1, ops.pop(step))
    with refused("E206"):
        check_all(replace(program, ranks=(program.ranks[0], tuple(ops))))
