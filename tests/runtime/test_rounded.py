"""Moments in bfloat16, and weights without masters: by hand, for any partition and schedule, and over a restart."""

import pytest
import torch
from torch import nn

from tests.composed import settings, trained
from tests.jobs import job
from tests.runtime.small_plans import GPT, make_plan, make_program
from tests.runtime.test_checkpoints import TWO, at
from tests.threads import losses_of, norms_of, run_threads, side_by_side
from tests.tiers import few
from zbc.compiler.check.memory import ways
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import stepping
from zbc.job import spec
from zbc.plan import dealing
from zbc.runtime.core import rounded
from zbc.runtime.core.optimizer import torch_optimizer
from zbc.runtime.core.tensors import lower_precision
from zbc.runtime.features.averaging import meet
from zbc.runtime.transports.hub import Hub

LOW = {"dtype": "bfloat16", "parameters": "bfloat16"}
SHAPES = {"layers.0.a": (37, 5), "b": (64,), "layers.1.c": (9, 6), "d": (3, 2, 2)}
KINDS = {name: {"kind": name, "lr": 0.02} for name in ("adamw", "adam", "muon")}
KINDS |= {"momentum": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}}


def made(low=False):
    generator = torch.Generator().manual_seed(3)
    found = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    lower_precision(found.values(), torch.bfloat16 if low else None)
    return found


def drawn(step):
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def numbers(optimizer, named):
    return {name: {key: value.clone() for key, value in optimizer.state[p].items()} for name, p in named.items()}


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_optimizers_own_of_float32_numbers_rounded(kind, state, low, monkeypatch):
    """In bits; a few parameters at a time."""
    monkeypatch.setattr(dealing, "BATCH", 100)
    types = {"state": torch.bfloat16 if state == "bfloat16" else None, "low": torch.bfloat16 if low else None}
    named, wide = made(low), made()
    for name, p in wide.items():
        p.data = named[name].detach().float().clone()
    optimizer = torch_optimizer(spec.Optimizer.model_validate({**KINDS[kind], "state": state}), named)
    plain = torch_optimizer(spec.Optimizer.model_validate(KINDS[kind]), wide)
    for step in range(4):
        for name, grad in drawn(step).items():
            if name != "b" or step != 1:  # a parameter without a gradient stays
                named[name].grad, wide[name].grad = grad, grad.clone()
        rounded.step(optimizer)
        plain.step()
        for name, p in wide.items():
            p.data = p.data.to(types["low"] or p.dtype).float()
            moments = {key: value for key, value in plain.state[p].items() if key != "step"}
            plain.state[p].update({key: v.to(types["state"] or v.dtype).float() for key, v in moments.items()})
            assert named[name].detach().float().equal(p.detach()), name
            assert (p.grad is None) == (named[name].grad is None)
            for key, value in plain.state[p].items():
                mine = optimizer.state[named[name]][key]
                assert mine.float().equal(value), (name, key)
                assert mine.dtype == (torch.bfloat16 if state == "bfloat16" and key in moments else torch.float32)
            p.grad = named[name].grad = None


CHOICES = {"state": {}, "no masters": {**LOW, "master": False}}
WAYS = [("1f1b", 2, 1), ("zb-h1", 2, 1), ("zb-v", 2, 2)]
choices = pytest.mark.parametrize("choice", CHOICES)


@choices
@pytest.mark.parametrize("sync", ["before-step", "post-validate"])
@pytest.mark.parametrize(("kind", "p", "v"), few(WAYS, [WAYS[2]]))
def test_any_schedule_has_the_bits_of_one_rank(kind, p, v, sync, choice):
    asked = {"kind": "adamw", "lr": 0.01, "state": "bfloat16", "clip_grad_norm": 0.5}
    one, many = (
        run_threads(
            make_plan(make_program(*how, sync=of), model={**GPT, **CHOICES[choice]}, optimizer={**asked, "sync": of}), 4
        )
        for how, of in ((("1f1b", 1, 4, 1), "before-step"), ((kind, p, 4, v), sync))
    )
    assert losses_of(many) == losses_of(one) and norms_of(many) == norms_of(one)


def tables(*traits, choice="state", **optimizer):
    found = settings(*traits)
    found["parallel"]["pp"] = 2
    found["model"] |= {"layers": 2, "vocab": 64, **CHOICES[choice]}
    found["optimizer"] |= {"state": "bfloat16", **optimizer}
    return found


SHARDS = ["sharded optimizer", "sharded weights", "sharded gradients", "sharded all", "one-sided"]


@pytest.mark.parametrize("shard", few(SHARDS, SHARDS[:1]))
def test_shards_have_the_bits_of_replicas_without_masters(shard):
    both, plain = tables(shard, choice="no masters"), tables(choice="no masters")
    plain["parallel"]["dp"], plain["schedule"]["microbatches"] = 2, 4
    assert trained(both) == trained(plain)


@choices
@pytest.mark.parametrize("traits", [[], ["post-validate"]], ids=["barrier", "post-validate"])
def test_scores_are_clipped_once_however_many_parts_a_step_has(traits, choice, monkeypatch):
    how = tables(*traits, choice=choice, qk_clip=0.02)
    found = trained(how)
    assert found != trained(tables(*traits, choice=choice))
    monkeypatch.setattr(dealing, "BATCH", 1)
    assert trained(how) == found


def test_replicas_that_average_save_means_of_moments_that_are_rounded_once():
    """Before a checkpoint; sums of bfloat16 numbers are float32."""
    torch.manual_seed(5)
    own = [torch.randn(300).bfloat16() for _ in range(3)]
    mean, hub = (sum(one.float() for one in own) / 3).bfloat16(), Hub(3)
    side_by_side(3, lambda rank: meet((0, 1, 2), [own[rank]], hub.end(rank)))
    assert all(one.equal(mean) for one in own)


@pytest.mark.parametrize("to", ["float32", "bfloat16"])
def test_a_run_goes_on_with_the_other_choice_and_says_so(to, tmp_path):
    other = {"float32": "bfloat16", "bfloat16": "float32"}[to]
    ways = {
        kind: {"model": {**GPT, **LOW, "master": kind == "float32"}, "optimizer": {"state": kind, "lr": 0.01}}
        for kind in (to, other)
    }
    first, then = (make_plan(make_program("1f1b", 2, 4), checkpoint=TWO, **ways[kind]) for kind in (other, to))
    before = run_threads(first, 4, folder=tmp_path / "a")
    told = []
    after = run_threads(then, 4, folder=tmp_path / "b", resume=at(tmp_path / "a", 2), tell=told.append)
    assert losses_of(after)[0] == pytest.approx(losses_of(before)[2], rel=2e-2)
    assert any(f"optimizer.state = {other}, this job has {to}" in line for line in told)
    assert any("model.parameters = " in line for line in told)


SMALL = {"hidden": 64, "seq_len": 4}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": SMALL}, ['optimizer.state = "bfloat16"']),
        ({"model": {**SMALL, **LOW}, "optimizer": {"kind": "sgd"}}, ['model.parameters = "bfloat16 alone"']),
        ({"model": {**SMALL, **LOW, "master": False}, "optimizer": {"state": "bfloat16"}}, []),
        ({"model": {"hidden": 32, "seq_len": 128}}, []),  # activations are the largest part
    ],
)
def test_what_would_not_fit_is_told_of_them_where_they_are_the_largest_part(changes, named):
    compiled = compile_job(job(**changes))
    found = [
        way for way in ways(compiled.job, compiled.memory[1]) if way.startswith(("optimizer.", "model.parameters"))
    ]
    assert found == named


def test_the_time_of_a_step_follows():
    """Copies to float32 and back move more bytes than the smaller numbers save."""
    ways = {"plain": {}, "state": {"optimizer": {"state": "bfloat16"}}}
    ways |= {"masters": {"model": LOW}, "none": {"model": {**LOW, "master": False}}}
    jobs = {name: job(**changes) for name, changes in ways.items()}
    bytes_of = {name: stepping.moved(one.optimizer, one.model) for name, one in jobs.items()}
    # STEP and TENTATIVE: gradient, weight and two moments read and written, copies, and weights that are published
    plain = 4 + 2 * 12
    assert bytes_of["plain"] == (plain, plain + 8 + 2 * 12)
    assert bytes_of["state"] == (plain + 2 * 12, plain + 2 * 12 + 8 + 2 * 8)
    assert bytes_of["masters"] == (plain + 6, plain + 6 + 2 * 12)
    assert bytes_of["none"] == (plain + 12, plain + 12 + 4 + 2 * 10)
