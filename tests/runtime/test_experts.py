"""Experts: outputs follow the formula, and a pipeline trains them as one process does."""

import threading
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.composed import TOLERANCE, apart, planned, settings, trained
from tests.jobs import job
from tests.threads import each_layer, run_threads
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import estimate
from zbc.job.profile import LayerBytes
from zbc.job.spec import Model
from zbc.runtime.core.grouped import Groups
from zbc.runtime.features.added import Adding, adding_to
from zbc.training.models.experts import Experts, softmax
from zbc.training.models.model import layers

MODEL = {"family": "llama", "layers": 4, "hidden": 32, "heads": 4, "vocab": 256, "seq_len": 32, "experts": 4}
MODEL |= {"top_k": 2, "ffn_hidden": 48, "shared_hidden": 32, "balance_loss": 0.01, "router_z_loss": 0.001}


def of_one(layer, place, x):
    """What one expert gives."""
    counts = torch.zeros(layer.count, dtype=torch.int64)
    counts[place] = len(x)
    return layer.experts(x, Groups.of(counts, counts.tolist()))


def of_one_token(layer, x):
    """The formula of the page, one token after the other."""
    found = []
    for token in x:
        likely = layer.scores(token @ layer.router.weight.t())
        chosen = (likely if layer.bias is None else likely + layer.bias).topk(layer.top_k).indices
        weights = likely[chosen]
        weights = weights / weights.sum() if layer.normed else weights
        y = sum(w * of_one(layer, int(e), token[None])[0] for w, e in zip(weights, chosen, strict=True))
        if layer.shared is not None:
            y = y + (token @ layer.shared_gate.weight.t()).sigmoid() * layer.shared(token[None])[0]
        found.append(y)
    return torch.stack(found)


SMALL = Model(family="llama", layers=1, hidden=8, ffn_hidden=8, experts=4)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("router", "widths"), [("softmax", 20), ("softmax of all", (20, 24)), ("sigmoid", (20, 24))])
def test_a_token_gets_what_its_experts_give(gated, router, widths):
    """A bias, here of sigmoid scores, chooses experts and weighs none."""
    torch.manual_seed(0)
    how = {"family": "llama" if gated else "gpt", "router": router, "ffn_hidden": widths}
    how |= {"balance_loss": (0.0, 0.1)} if router == "sigmoid" else {}
    layer = Experts(Model(layers=2, hidden=16, experts=6, top_k=3, **how), nn.SiLU()).double()
    for parameter in layer.parameters():
        parameter.data = torch.randn_like(parameter) / 3
    if layer.bias is not None:
        layer.bias.normal_()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x).flatten(0, 1), of_one_token(layer, x.flatten(0, 1)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [{}, {"variant": "gpt2"}, {"family": "llama"}], ids=str)
def test_one_expert_that_all_tokens_meet_is_the_mlp_of_its_family(kind):
    model = Model(layers=2, hidden=16, heads=2, vocab=32, seq_len=8, ffn_hidden=24, **kind)
    torch.manual_seed(0)
    dense = layers(model, 0)[1].make()
    for parameter in dense.parameters():
        parameter.data = torch.randn_like(parameter)
    one = layers(model.model_copy(update={"experts": 1, "top_k": 1}), 0)[1].make()
    for name, parameter in one.named_parameters():
        if "router" not in name:
            parameter.data = dense.get_parameter(name.replace("mlp.experts.", "")).data.view_as(parameter)
    x = torch.randn(2, 8, 16)
    torch.testing.assert_close(one(x), dense(x))


@pytest.mark.parametrize(("router", "scores"), [("softmax", softmax), ("sigmoid", torch.sigmoid)])
def test_added_losses_are_those_of_their_papers(router, scores):
    torch.manual_seed(1)
    how = {"balance_loss": 0.5, "z_loss": (0.0, 0.25), "router": router}
    layer, adding = Experts(SMALL.model_copy(update=how), nn.SiLU()), Adding(0.125)
    x = torch.randn(10, 8)
    with adding_to(adding):
        layer(x)
    logits = x @ layer.router.weight.t()
    likely = scores(logits) / scores(logits).sum(-1, keepdim=True)
    chosen = functional.one_hot(likely.topk(2).indices, 4).sum(1).float()
    wanted = 0.5 * 4 * (chosen.mean(0) / 2 * likely.mean(0)).sum() + 0.25 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(adding.total, (wanted * 0.125).detach())


@pytest.mark.long
@pytest.mark.parametrize("shared", [{}, {"dp": 2, "ep": 2}], ids=str)
def test_a_forward_that_runs_again_goes_by_the_experts_it_chose(monkeypatch, shared):
    """The router chooses differently each time, like one that breaks ties randomly."""
    plain, counts = Experts._chosen, dict[tuple[int, int], int]()

    def wavering(self, likely):
        count = counts[id(self), threading.get_ident()] = counts.get((id(self), threading.get_ident()), 0) + 1
        return (plain(self, likely) + count) % self.count

    monkeypatch.setattr(Experts, "_chosen", wavering)
    way = {"schedule": {"kind": "1f1b", "microbatches": 8 // shared.get("dp", 1)}, "parallel": {"pp": 2} | shared}
    again = trained(tables(way | {"memory": {"activations": "recompute"}}))
    assert apart(again, trained(tables(way))) <= TOLERANCE


def tables(way):
    found = settings() | {"model": dict(MODEL), "parallel": {"pp": 2}}
    for table, keys in way.items():
        found[table] = {key: value for key, value in (found.get(table, {}) | keys).items() if value is not None}
    return found


def biases(workers):
    return {one.name: one.module.mlp.bias for one in each_layer(workers) if one.name.startswith("layers.")}


BIASED = {"model": {"balance_loss": [0.0, 0.05]}}
SHARED_OUT = {"schedule": {"microbatches": 4}, "parallel": {"pp": 2, "dp": 2, "ep": 2}}
RECOMPUTED = {"schedule": {"kind": "zb-v", "slices": 2}, "memory": {"activations": "recompute"}}


@pytest.mark.long
@pytest.mark.parametrize("way", [SHARED_OUT, RECOMPUTED], ids=["shared out", "recomputed in slices"])
def test_loads_are_the_rows_of_each_expert_and_biases_move_towards_even_ones(way):
    """Each token of a step counts once for each of its experts, also if forwards run again."""
    single = run_threads(planned(tables(BIASED | {"parallel": {"pp": 1}})), 3)
    found = run_threads(planned(tables(BIASED | way)), 3)
    rows = [torch.tensor(result.routed).view(4, 4) for result in single[0].results]
    assert all((one.sum(1) == 2 * 8 * 2 * 32).all() for one in rows)  # top_k, microbatches, sequences, tokens
    assert [result.routed for result in found[-1].results] == [result.routed for result in single[0].results]
    wanted = torch.zeros(4, 4)
    for one in rows:
        wanted += 0.05 * (one.mean(1, keepdim=True) - one).sign()
    for workers in (single, found):
        assert all(torch.allclose(bias, wanted[int(name.split(".")[1])]) for name, bias in biases(workers).items())
    numbers = [[(result.loss, result.grad_norm) for result in workers[-1].results] for workers in (found, single)]
    assert apart(*numbers) <= TOLERANCE


@pytest.mark.long
def test_uneven_loads_cost_the_rank_with_most_rows():
    def costs(**model):
        more = {"parallel": {"pp": 2, "dp": 2, "ep": 2}, "hardware": {"tflops": 1e-3, "memory_gbps": 1e6}}
        more["hardware"] |= {"link_gbps": 1e6}
        return compile_job(job(model=MODEL | model, **more), budget=0.0, suggest=False).costs

    even, uneven = costs(), costs(imbalance=2.0)
    experts = 2 * 2 * 3 * 32 * 48 * 2 * 32 * 2 / 1e6  # two blocks, 2 operations a weight of the top_k of 2 x 32 tokens
    assert uneven.of("f") - even.of("f") == pytest.approx(experts, rel=0.05)
    assert uneven.bytes_of("kept")[0] > even.bytes_of("kept")[0]


@pytest.mark.long
def test_a_profile_of_whole_blocks_is_cut_to_the_experts_of_a_rank():
    def layers(ep):
        return estimate.layers(job(model=MODEL, parallel={"pp": 2, "dp": 2, "ep": ep}))

    all_of, some = layers(1)[1], layers(2)[1]
    held = LayerBytes.model_construct(weights=1000, gradients=1000, optimizer=2000)
    one = replace(all_of, step=4.0, held=held)
    found, part = estimate._measured(some, one), some.params / all_of.params
    assert found.params == some.params < all_of.params and found.step == pytest.approx(4.0 * part)
    assert (found.held.weights, found.held.optimizer) == (round(1000 * part), round(2000 * part))


ROUTERS = [*product([1, 2, 3], ["softmax", "sigmoid", "softmax of all"], [0.0, 0.01], ["llama", "gpt"])]


@pytest.mark.parametrize(("top_k", "router", "balance", "family"), ROUTERS)
def test_each_router_gets_a_gradient(top_k, router, balance, family):
    """Of the output and of the loss that its block adds."""
    chosen = {"experts": 4, "top_k": top_k, "router": router, "balance_loss": balance}
    model = Model(family=family, layers=1, hidden=16, heads=2, vocab=32, seq_len=8, ffn_hidden=8, **chosen)
    torch.manual_seed(0)
    block = layers(model, 0)[1].make()
    for parameter in block.parameters():
        parameter.data = torch.randn_like(parameter) / 3
    with adding_to(Adding(1.0)):
        (block(torch.randn(2, 8, 16)) * torch.randn(2, 8, 16)).sum().backward()
    assert block.mlp.router.weight.grad.abs().max() > 1e-5


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
