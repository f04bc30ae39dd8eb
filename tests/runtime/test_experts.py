"""Experts: outputs follow the formula, and a pipeline trains them as one process does."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.composed import TOLERANCE, apart, settings, toml, trained
from tests.jobs import job
from tests.runtime.test_checkpoints import at
from tests.threads import run_threads
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import estimate
from zbc.compiler.shapes import load_job
from zbc.job.profile import LayerBytes
from zbc.job.spec import Model
from zbc.plan.directory import StoredPlan
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
        weights, chosen = likely.topk(layer.top_k)
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
    torch.manual_seed(0)
    how = {"family": "llama" if gated else "gpt", "router": router, "ffn_hidden": widths}
    layer = Experts(Model(layers=2, hidden=16, experts=6, top_k=3, **how), nn.SiLU()).double()
    for parameter in layer.parameters():
        parameter.data = torch.randn_like(parameter) / 3
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


def test_an_expert_that_nobody_chose_has_a_gradient_of_zero():
    layer = Experts(SMALL.model_copy(update={"top_k": 1}), nn.SiLU())
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([5.0, 0, 0, 0])[:, None].expand(4, 8))
    layer(torch.ones(3, 8)).sum().backward()
    assert layer.experts.down.weight.grad[0].abs().sum() > 0
    assert not layer.experts.down.weight.grad[1:].any()


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


SLICED = {"schedule": {"kind": "zb-v", "slices": 2}, "model": {"balance_loss": 0.0, "router_z_loss": 0.0}}
OFFLOADED = {"schedule": {"kind": "gis", "memory_limit": "0.7x"}, "memory": {"activations": "offload"}}
OFFLOADED["hardware"] = {"host_gbps": 20.0}
WAYS = [
    {"schedule": {"kind": "zb-v"}},
    {"schedule": {"kind": "zb-h1"}, "memory": {"activations": "recompute"}},
    {"schedule": {"kind": "interleaved-1f1b"}},
    {"schedule": {"kind": "chimera"}},
    {"schedule": {"kind": "zb-h1"}, "model": {"router": "sigmoid"}},
    {"schedule": {"kind": "zb-v"}, "parallel": {"vocabulary": "shared"}},
    SLICED,
    {"schedule": {"kind": "1f1b", "microbatches": 4}, "parallel": {"dp": 2, "shard": "all"}},
    {"schedule": {"kind": "zb-v"}, "model": {"family": "gpt"}},
    {"schedule": {"kind": "zb-v"}, "model": {"dtype": "bfloat16"}},
    {"schedule": {"kind": "zb-v"}, "optimizer": {"sync": "post-validate"}},
    *(
        {"schedule": {"kind": kind, "slices": slices}, "parallel": {"tp": 2, "tp_sequence": True}, "model": model}
        for kind, slices, model in (
            ("1f1b", 1, {"router_z_loss": 0.01, "balance_loss": 0.01}),
            ("zb-v", 2, {"shared_hidden": 32, "balance_loss": 0.0}),
            ("zb-h1", 1, {"family": "gpt"}),
        )
    ),
    OFFLOADED,
]


def tables(way):
    found = settings() | {"model": dict(MODEL), "parallel": {"pp": 2}}
    for table, keys in way.items():
        found[table] = {key: value for key, value in (found.get(table, {}) | keys).items() if value is not None}
    return found


@pytest.mark.parametrize(
    "way", few(WAYS, 1), ids=lambda way: " ".join(str(v) for t in way.values() for v in t.values())
)
def test_experts_in_a_pipeline_train_as_in_one_process(way):
    single = tables({"model": way.get("model", {})})
    single["parallel"]["pp"] = 1
    assert apart(trained(tables(way)), trained(single)) <= TOLERANCE


def run(tables, **how):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "zbc.toml"
        path.write_text(toml(tables))
        compile_job(load_job(path), budget=0.0, suggest=False).write(Path(folder) / "plan")
        return run_threads(StoredPlan.read(Path(folder) / "plan"), 3, **how)


def biases(workers):
    layers = (layer for worker in workers for stage in worker.stages.values() for layer in stage.layers)
    return {layer.name: layer.module.mlp.bias for layer in layers if layer.name.startswith("layers.")}


BIASED = {"model": {"balance_loss": 0.0, "balance_rate": 0.05}}
SHARED_OUT = {"schedule": {"microbatches": 4}, "parallel": {"pp": 2, "dp": 2, "ep": 2}}
RECOMPUTED = {"schedule": {"kind": "zb-v", "slices": 2}, "memory": {"activations": "recompute"}}


@pytest.mark.parametrize("way", [SHARED_OUT, RECOMPUTED], ids=["shared out", "recomputed in slices"])
def test_loads_are_the_rows_of_each_expert_and_biases_move_towards_even_ones(way):
    """Each token of a step counts once for each of its experts, also if forwards run again."""
    single = run(tables(BIASED | {"parallel": {"pp": 1}}))
    found = run(tables(BIASED | way))
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


def test_a_bias_chooses_experts_and_weighs_none():
    layer = Experts(SMALL.model_copy(update={"balance_loss": (0.0, 0.1)}), nn.SiLU())
    layer.bias.copy_(torch.tensor([9.0, 9.0, 0, 0]))
    x = torch.randn(5, 8)
    likely = (x @ layer.router.weight.t()).softmax(-1)[:, :2]
    likely = likely / likely.sum(-1, keepdim=True)
    wanted = sum(likely[:, e, None] * of_one(layer, e, x) for e in (0, 1))
    torch.testing.assert_close(layer(x), wanted)


def test_a_run_with_biases_goes_on_from_its_checkpoint(tmp_path):
    keeps = {"checkpoint": {"every": 2}, "train": {"steps": 3, "seed": 3}}
    whole = run(tables(BIASED | SHARED_OUT | keeps), folder=tmp_path / "run")
    after = run(tables(BIASED | keeps), folder=tmp_path / "after", resume=at(tmp_path / "run", 2))
    assert after[-1].results[0].routed == whole[-1].results[2].routed
    assert after[-1].results[0].loss == pytest.approx(whole[-1].results[2].loss, rel=1e-6)


def test_uneven_loads_cost_the_rank_with_most_rows():
    def costs(**model):
        more = {"parallel": {"pp": 2, "dp": 2, "ep": 2}, "hardware": {"tflops": 1e-3, "memory_gbps": 1e6}}
        more["hardware"] |= {"link_gbps": 1e6}
        return compile_job(job(model=MODEL | model, **more), budget=0.0, suggest=False).costs

    even, uneven = costs(), costs(imbalance=2.0)
    experts = 2 * 2 * 3 * 32 * 48 * 2 * 32 * 2 / 1e6  # two blocks, 2 operations a weight of the top_k of 2 x 32 tokens
    assert uneven.of("f") - even.of("f") == pytest.approx(experts, rel=0.05)
    assert uneven.bytes_of("kept")[0] > even.bytes_of("kept")[0]


def test_a_profile_of_whole_blocks_is_cut_to_the_experts_of_a_rank():
    def layers(ep):
        return estimate.layers(job(model=MODEL, parallel={"pp": 2, "dp": 2, "ep": ep}))

    all_of, some = layers(1)[1], layers(2)[1]
    held = LayerBytes.model_construct(weights=1000, gradients=1000, optimizer=2000)
    one = replace(all_of, step=4.0, held=held)
    found, part = estimate._measured(some, one), some.params / all_of.params
    assert found.params == some.params < all_of.params and found.step == pytest.approx(4.0 * part)
    assert (found.held.weights, found.held.optimizer) == (round(1000 * part), round(2000 * part))


@examples(max_examples=40, deadline=None)
@given(
    top_k=st.integers(1, 3),
    router=st.sampled_from(["softmax", "sigmoid", "softmax of all"]),
    balance=st.sampled_from([0.0, 0.01]),
    family=st.sampled_from(["llama", "gpt"]),
)
def test_each_router_gets_a_gradient(top_k, router, balance, family):
    """Of the output and of the loss that its block adds."""
    chosen = {"experts": 4, "top_k": top_k, "router": router, "balance_loss": balance}
    model = Model(family=family, layers=1, hidden=16, heads=2, vocab=32, seq_len=8, ffn_hidden=8, **chosen)
    torch.manual_seed(0)
    block, adding, x = layers(model, 0)[1].make(), Adding(1.0), torch.randn(2, 8, 16)
    for parameter in block.parameters():
        parameter.data = torch.randn_like(parameter) / 3
    with adding_to(adding):
        (block(x) * torch.randn(2, 8, 16)).sum().backward()
    (routed,) = (p.grad for name, p in block.named_parameters() if "router.weight" in name)
    assert routed is not None and routed.abs().max() > 1e-5
