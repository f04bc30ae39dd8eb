"""Routers that choose a token's experts among those of a few groups, as DeepSeek-V3's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.composed import TOLERANCE, apart
from tests.jobs import job
from tests.refusals import refused
from tests.runtime.test_exchanges import planned
from tests.runtime.test_expert_parallel import numbers, plan
from tests.threads import run_threads
from zbc.job import trained
from zbc.job.spec import Model
from zbc.training.models.experts import Experts

LIMITED = {"experts": 8, "top_k": 2, "expert_groups": [4, 2]}


@pytest.mark.parametrize(("groups", "limit", "k"), [(8, 4, 8), (4, 1, 3), (16, 2, 4)])
def test_choices_and_weights_are_those_of_transformers(groups, limit, k):
    module = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    sizes = {"hidden_size": 16, "n_routed_experts": 32, "num_experts_per_tok": k, "norm_topk_prob": True}
    config = module.DeepseekV3Config(**sizes, n_group=groups, topk_group=limit, routed_scaling_factor=1.0)
    theirs = module.DeepseekV3TopkRouter(config)
    chosen = {"router": "sigmoid", "balance_loss": (0.0, 0.01), "expert_groups": (groups, limit)}
    layer = Experts(Model(layers=1, hidden=16, ffn_hidden=8, experts=32, top_k=k, **chosen), nn.SiLU())
    torch.manual_seed(1)
    with torch.no_grad():
        theirs.weight.copy_(layer.router.weight.normal_())
        theirs.e_score_correction_bias.copy_(layer.bias.normal_(std=0.2))
        x = torch.randn(200, 16)
        _, weights, chosen = theirs(x)
        likely = layer.router(x).sigmoid()
        ours = layer._chosen(likely)
        weighed = likely.gather(-1, ours)
        dense = [torch.zeros(200, 32).scatter_(1, *some) for some in ((chosen, weights), (ours, weighed))]
        dense[1] /= dense[1].sum(-1, keepdim=True)
    torch.testing.assert_close(*dense)
    assert {len(row.unique()) for row in ours // (32 // groups)} <= {*range(1, limit + 1)}


def test_a_token_has_groups_of_single_experts():
    model = Model(layers=1, hidden=4, ffn_hidden=8, experts=4, expert_groups=(4, 2))
    layer = Experts(model, nn.SiLU())
    likely = torch.rand(20, 4)
    assert torch.equal(layer._chosen(likely), likely.topk(2).indices)


def test_experts_of_a_few_groups_train_over_nodes_as_in_one_process(tmp_path):
    way = {"schedule": {"kind": "1f1b"}, "model": LIMITED}
    found = numbers(run_threads(planned(tmp_path / "all", way, dp=4, ep=4), 3))
    other = numbers(run_threads(plan(tmp_path / "one", {"model": LIMITED}, pp=1), 3))
    assert apart(found, other) <= TOLERANCE
    free = plan(tmp_path / "free", {"model": {"experts": 8, "top_k": 2}}, pp=1)
    assert apart(other, numbers(run_threads(free, 3))) > TOLERANCE


MODEL = {"family": "llama", "hidden": 32, "heads": 4, "vocab": 256, "seq_len": 32, "ffn_hidden": 16}
DENSE = dict.fromkeys(["experts", "top_k", "ffn_hidden"])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"expert_groups": [3, 1]}, "has 3 groups, which does not divide model.experts = 8"),
        ({"expert_groups": [4, 5]}, "model.expert_groups has 5 of 4 groups"),
        ({"expert_groups": [4, 1], "top_k": 3}, "leaves a token 2 experts, and it meets model.top_k = 3"),
        (DENSE, "model.expert_groups is for models with experts"),
    ],
)
def test_groups_that_cannot_be_are_refused(change, text):
    model = {key: value for key, value in {**MODEL, **LIMITED, **change}.items() if value is not None}
    with refused("E110", text):
        job(layers=2, pp=2, model=model)


def test_a_checkpoint_knows_its_groups():
    now = {"model": {**MODEL, **LIMITED, "layers": 2}}
    before = {"model": {key: value for key, value in now["model"].items() if key != "expert_groups"}}
    keys = [one.key for one in trained.differences(before, now)]
    assert keys == ["model.expert_groups"]
