"""Muon: equal to torch's for whole matrices and to one process for any partition, and groups by name."""

import pytest
import torch

from tests.composed import apart, planned, settings, trained
from tests.refusals import refused
from tests.runtime.small_plans import LLAMA, hold, make_plan, make_program, reference
from tests.threads import run_threads
from tests.tiers import few
from zbc.job import spec
from zbc.plan import dealing
from zbc.runtime.core.muon import is_matrix
from zbc.runtime.core.optimizer import torch_optimizer

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
