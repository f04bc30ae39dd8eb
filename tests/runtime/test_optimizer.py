"""Weights, masters and state after steps of an optimizer; Muon as torch's; state and weights in bfloat16, rounded."""

import pytest
import torch
from torch import nn

from tests.composed import apart, planned, settings, trained
from tests.jobs import job
from tests.refusals import refused
from tests.runtime.small_plans import GPT, LLAMA, hold, make_plan, make_program, reference
from tests.runtime.test_checkpoints import TWO, at
from tests.threads import losses_of, norms_of, run_threads, side_by_side
from tests.tiers import few
from zbc.compiler.check.memory import ways
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import stepping
from zbc.job import spec
from zbc.plan import dealing
from zbc.runtime.core import rounded
from zbc.runtime.core.muon import is_matrix
from zbc.runtime.core.optimizer import torch_optimizer
from zbc.runtime.core.tensors import lower_precision
from zbc.runtime.features.averaging import meet
from zbc.runtime.transports.hub import Hub

LOW = {**GPT, "dtype": "bfloat16", "parameters": "bfloat16"}


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, True), (torch.complex64, None)])
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
def test_fused_kernels_are_not_for_complex_weights(kind, dtype, fused, monkeypatch):
    """They refuse them in their first step on a GPU; one among others keeps all from it."""
    told = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.optim, kind, lambda groups, **how: told.append(how["fused"]))
    named = {"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.zeros(3, dtype=dtype))}
    torch_optimizer(spec.Optimizer.model_validate({"kind": kind.lower()}), named)
    assert told == [fused]


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "p"), few([("zb-v", 2), ("1f1b", 3), ("zb-h1", 4)], ("zb-v", "1f1b")))
@pytest.mark.parametrize("kind", few(["adamw", "adam"], ("adamw",)))
def test_bfloat16_parameters_train_as_in_one_process(schedule, p, kind):
    optimizer = {"kind": kind, "lr": 0.01, "clip_grad_norm": 1.0}
    plan = make_plan(make_program(schedule, p, 4), model=LOW, optimizer=optimizer)
    hold(run_threads(plan, 3), reference(plan, 3), near=1e-12)


MUON = {"kind": "muon", "lr": [0.01, 0.003]}
ROUNDED = 5e-4  # sums in another order, rounded to bfloat16 by Newton-Schulz


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)], ids=str)
@pytest.mark.parametrize("scale", ["rms", "original"])
def test_a_step_has_the_bits_of_torchs_own(shape, scale):
    torch.manual_seed(1)
    mine = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(mine.detach().clone())
    options = spec.Optimizer(kind="muon", lr=0.02, scale=scale, weight_decay=0.1)
    ours = torch_optimizer(options, {"layers.0.weight": mine})
    how = {"rms": "match_rms_adamw", "original": "original"}[scale]
    other = torch.optim.Muon([theirs], lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn=how)
    for _ in range(3):
        mine.grad = torch.randn(shape)
        theirs.grad = mine.grad.clone()
        ours.step()
        other.step()
    assert mine.detach().equal(theirs)


def test_tables_of_words_and_vectors_are_for_adamw():
    ends = ("embed.tokens.weight", "head.logits.weight", "layers.0.root.model.embed_tokens.weight")
    inner = ("layers.3.qkv.weight", "layers.1.layer.mlp.down_proj.weight", "layers.0.roots.weight", "embedding.weight")
    options, matrix = spec.Optimizer(kind="muon"), torch.zeros(2, 3)
    assert [name for name in (*ends, *inner) if is_matrix(options, name, matrix)] == [*inner]
    assert not is_matrix(options, inner[0], matrix[0])


SCHEDULES = [("1f1b", 3, 4, 1), ("zb-h1", 2, 4, 1), ("zb-v", 2, 4, 2), ("interleaved-1f1b", 2, 4, 2)]


@pytest.mark.parametrize(("schedule", "p", "m", "v"), few(SCHEDULES, [SCHEDULES[0], SCHEDULES[2]]))
@pytest.mark.parametrize("sync", ["before-step", "post-validate"])
def test_any_schedule_has_the_bits_of_one_process(schedule, p, m, v, sync):
    """Vectors have a rate of their own."""
    how = {**MUON, "sync": sync, "schedule": {"kind": "cosine"}}
    plan = make_plan(make_program(schedule, p, m, v, sync=sync), model=LLAMA, optimizer=how, steps=6)
    hold(run_threads(plan, 4), reference(plan, 4))


def tables(*traits, **more):
    given = {f"optimizer__{key}": value for key, value in MUON.items()}
    return settings(*traits, **{**given, "parallel__pp": 2, "model__layers": 4, **more})


CUT = [("tp",), ("tp_sequence",), ("slices",), ("shared vocabulary",), ("one-sided",)]
CUT += [(f"sharded {what}",) for what in ("optimizer", "weights", "gradients", "all")]
CUT += [("tp", "sharded optimizer", "post-validate"), ("tp", "sharded all", "slices")]


@pytest.mark.long
@pytest.mark.parametrize("traits", few([*map(list, CUT)], 1), ids=" x ".join)
def test_however_it_is_cut_up_it_trains_alike(traits):
    assert apart(trained(tables(*traits)), trained(tables(schedule__microbatches=8))) <= ROUNDED


def test_no_rank_is_dealt_much_more_than_others():
    """For llama-8b's blocks, over eight replicas."""
    block = [6144 * 4096, 4096 * 4096, 2 * 14336 * 4096, 14336 * 4096]
    counts = [count for _ in range(8) for count in (*block, 4096, 4096)]
    most, _ = dealing.most(counts, 8, block * 8)
    assert most * 8 / sum(counts) <= 1.2
    pieces = dealing.deal(counts, 8)
    assert most == max(sum(counts[i] for i in share) for share in pieces)


def test_a_group_has_a_rate_and_a_decay_of_its_own():
    groups = [{"names": ["*.bias", "*norm*"], "weight_decay": 0.0}, {"names": ["layers.0.*"], "rate": 0.5}]
    options = spec.Optimizer.model_validate({"lr": 0.1, "weight_decay": 0.2, "groups": groups})
    named = {
        name: torch.nn.Parameter(torch.ones(3)) for name in ("layers.0.a.bias", "layers.0.a.weight", "head.weight")
    }
    made = torch_optimizer(options, named)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in made.param_groups for p in group["params"]}
    assert [found[id(p)] for p in named.values()] == [(0.1, 0.0), (0.05, 0.2), (0.1, 0.2)]


def test_what_no_group_or_optimizer_takes_is_refused(tmp_path):
    plan = planned(tables(optimizer__groups=[{"names": ["layers.*.biass"]}]))
    with refused("E110", match="biass"):
        run_threads(plan, 1)


HALF = {"dtype": "bfloat16", "parameters": "bfloat16"}
SHAPES = {"layers.0.a": (37, 5), "b": (64,), "layers.1.c": (9, 6), "d": (3, 2, 2)}
STATEFUL = {name: {"kind": name, "lr": 0.02} for name in ("adamw", "adam", "muon")}
STATEFUL |= {"momentum": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}}


def made(low=False):
    generator = torch.Generator().manual_seed(3)
    found = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    lower_precision(found.values(), torch.bfloat16 if low else None)
    return found


def drawn(step):
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_a_step_is_the_optimizers_own_of_float32_numbers_rounded(kind, state, low, monkeypatch):
    """In bits; a few parameters at a time."""
    monkeypatch.setattr(dealing, "BATCH", 100)
    types = {"state": torch.bfloat16 if state == "bfloat16" else None, "low": torch.bfloat16 if low else None}
    named, wide = made(low), made()
    for name, p in wide.items():
        p.data = named[name].detach().float().clone()
    optimizer = torch_optimizer(spec.Optimizer.model_validate({**STATEFUL[kind], "state": state}), named)
    plain = torch_optimizer(spec.Optimizer.model_validate(STATEFUL[kind]), wide)
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


CHOICES = {"state": {}, "no masters": {**HALF, "master": False}}
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


def low_tables(*traits, choice="state", **optimizer):
    found = settings(*traits)
    found["parallel"]["pp"] = 2
    found["model"] |= {"layers": 2, "vocab": 64, **CHOICES[choice]}
    found["optimizer"] |= {"state": "bfloat16", **optimizer}
    return found


SHARDS = ["sharded optimizer", "sharded weights", "sharded gradients", "sharded all", "one-sided"]


@pytest.mark.long
@pytest.mark.parametrize("shard", few(SHARDS, SHARDS[:1]))
def test_shards_have_the_bits_of_replicas_without_masters(shard):
    both, plain = low_tables(shard, choice="no masters"), low_tables(choice="no masters")
    plain["parallel"]["dp"], plain["schedule"]["microbatches"] = 2, 4
    assert trained(both) == trained(plain)


@pytest.mark.long("no masters")
@choices
@pytest.mark.parametrize("traits", [[], ["post-validate"]], ids=["barrier", "post-validate"])
def test_scores_are_clipped_once_however_many_parts_a_step_has(traits, choice, monkeypatch):
    how = low_tables(*traits, choice=choice, qk_clip=0.02)
    found = trained(how)
    assert found != trained(low_tables(*traits, choice=choice))
    monkeypatch.setattr(dealing, "BATCH", 1)
    assert trained(how) == found


def test_replicas_that_average_save_means_of_moments_that_are_rounded_once():
    """Before a checkpoint; sums of bfloat16 numbers are float32."""
    torch.manual_seed(5)
    own = [torch.randn(300).bfloat16() for _ in range(3)]
    mean, hub = (sum(one.float() for one in own) / 3).bfloat16(), Hub(3)
    side_by_side(3, lambda rank: meet((0, 1, 2), [own[rank]], hub.end(rank)))
    assert all(one.equal(mean) for one in own)


@pytest.mark.long("bfloat16")
@pytest.mark.parametrize("to", ["float32", "bfloat16"])
def test_a_run_goes_on_with_the_other_choice_and_says_so(to, tmp_path):
    other = {"float32": "bfloat16", "bfloat16": "float32"}[to]
    ways = {
        kind: {"model": {**GPT, **HALF, "master": kind == "float32"}, "optimizer": {"state": kind, "lr": 0.01}}
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


@pytest.mark.long("changes0-named0", "changes1-named1", "changes2-named2")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": SMALL}, ['optimizer.state = "bfloat16"']),
        ({"model": {**SMALL, **HALF}, "optimizer": {"kind": "sgd"}}, ['model.parameters = "bfloat16 alone"']),
        ({"model": {**SMALL, **HALF, "master": False}, "optimizer": {"state": "bfloat16"}}, []),
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
    ways |= {"masters": {"model": HALF}, "none": {"model": {**HALF, "master": False}}}
    jobs = {name: job(**changes) for name, changes in ways.items()}
    bytes_of = {name: stepping.moved(one.optimizer, one.model) for name, one in jobs.items()}
    # STEP and TENTATIVE: gradient, weight and two moments read and written, copies, and weights that are published
    plain = 4 + 2 * 12
    assert bytes_of["plain"] == (plain, plain + 8 + 2 * 12)
    assert bytes_of["state"] == (plain + 2 * 12, plain + 2 * 12 + 8 + 2 * 8)
    assert bytes_of["masters"] == (plain + 6, plain + 6 + 2 * 12)
    assert bytes_of["none"] == (plain + 12, plain + 12 + 4 + 2 * 10)
