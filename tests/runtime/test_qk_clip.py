"""`optimizer.qk_clip`: every way to train has the weights that scores and factors computed by hand give."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.jobs import job
from tests.runtime.test_tensor_parallel import evaluated_alike, hold_parts, near, numbers, plan_of
from tests.threads import each_layer, each_parameter, run_threads
from tests.tiers import few
from zbc.compiler.cost.estimate import layers
from zbc.plan import dealing
from zbc.runtime.core import validate
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.optimizer import Held, Masters, inside
from zbc.runtime.features.added import Adding, adding_to
from zbc.runtime.features.packing import packed
from zbc.runtime.features.qk_clip import Attending
from zbc.runtime.features.slices import slicing
from zbc.runtime.features.slices.slicing import Limits, causal, peaks
from zbc.training.models import gpt, parts

TAU, STEPS = 0.8, 3
GROUPED = {"kv_heads": 2, "seq_len": 16, "layers": 2}
GPT = {"seq_len": 16, "layers": 2}


@pytest.fixture(autouse=True)
def large_scores(monkeypatch):
    """Initial weights for which some heads are beyond TAU; several chunks of queries, and of weights."""
    for module in (parts, gpt):
        monkeypatch.setattr(module, "STD", 0.2)
    monkeypatch.setattr(slicing, "CHUNK", 3)
    monkeypatch.setattr(validate, "CHUNK", 100)
    monkeypatch.setattr(dealing, "CHUNK", 100)
    monkeypatch.setattr(dealing, "BATCH", 1500)


def planned(place, kind="1f1b", tau=TAU, **how):
    how["optimizer"] = {**({} if tau is None else {"qk_clip": tau}), "clip_grad_norm": None, **how.get("optimizer", {})}
    return plan_of(place, kind, **how)


class ByHand:
    """Steps of one process without recompute: all scores, and after each step the scaled weights, head by head."""

    def __init__(self, tau=TAU):
        self.tau, self.scores, self.scaled = tau, {}, set()

    def look(self, worker):
        for block in blocks_of(worker):
            self.scores[block], own = [], block.attend
            block.attend = partial(self.attend, self.scores[block], own)

    def attend(self, told, own, q, k, v, window=None, **limits):
        """Notes the largest score of each head, of the whole square."""
        every = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q.detach().double() @ every.detach().double().mT / math.sqrt(q.shape[-1])
        behind = torch.arange(q.shape[-2])[:, None] - torch.arange(q.shape[-2])
        hidden = (behind < 0) | (behind >= (window or q.shape[-2]))
        told.append(scores.masked_fill(hidden, -math.inf).amax((0, 2, 3)).tolist())
        return own(q, k, v, window=window, **limits)

    def __call__(self, worker):
        return self.step

    def step(self, worker, number, **options):
        for told in self.scores.values():
            told.clear()
        result = run_step(worker, number, **options)
        for block, told in self.scores.items():
            largest = [max(one[head] for one in told) for head in range(block.heads)]
            self.scale(block, [min(1.0, self.tau / one) if one > 0 else 1.0 for one in largest])
        return result

    @torch.no_grad()
    def scale(self, block, factors):
        size, sharing = block.size, block.heads // block.kv_heads
        for tensor in [p for p in (block.qkv.weight, block.qkv.bias) if p is not None]:
            for shared in range(block.kv_heads):
                heads = range(shared * sharing, (shared + 1) * sharing)
                of_key = math.sqrt(min(factors[head] for head in heads))
                for head in heads:
                    tensor[head * size : (head + 1) * size] *= factors[head] / of_key
                    self.scaled.add(factors[head])
                key = block.heads + shared
                tensor[key * size : (key + 1) * size] *= of_key


def blocks_of(*workers):
    return [layer.module for layer in each_layer(workers) if layer.name.startswith("layers.")]


def by_hand(place, **how):
    """The worker of one process whose weights are scaled by hand."""
    hand = ByHand()
    (alone,) = run_threads(planned(place, pp=1, tau=None, **how), STEPS, setup=hand.look, step=hand)
    assert 1.0 in hand.scaled and len(hand.scaled) > 5  # heads beyond TAU, and others
    return alone


LLAMA, BIASED = {"model": "llama", "model_more": GROUPED}, {"model": "gpt", "model_more": GPT}
EVALUATED = {"train": {"eval_every": 1, "eval_batches": 1}, "data": {"validation": 0.2}}
WINDOWS = {"model": "llama", "model_more": {**GROUPED, "window": 5}}
WAYS = {
    "one": ("1f1b", 1, {}, LLAMA),
    "one gpt": ("1f1b", 1, {}, BIASED),
    "zb-v": ("zb-v", 2, {}, LLAMA),
    "stages with replicas": ("replicated-1f1b", 3, {"replicas": [2, 1]}, LLAMA),
    "slices of cp": ("zb-h1", 2, {"cp": 2}, {**BIASED, "slices": 2}),
    "windows": ("1f1b", 1, {}, WINDOWS),
    "windows in slices": ("zb-v", 1, {}, {**WINDOWS, "slices": 4}),
    "gradients": ("1f1b", 2, {"dp": 2, "shard": "gradients"}, BIASED),
    "shards of parts": ("1f1b", 1, {"tp": 2, "dp": 2, "shard": "optimizer"}, LLAMA),
    "vocabulary": ("zb-h1", 2, {"vocabulary": "shared"}, BIASED),
    "experts": ("1f1b", 2, {"dp": 2, "ep": 2}, {**LLAMA, "model_more": {**GROUPED, "experts": 4, "top_k": 2}}),
    "average": ("1f1b", 1, {}, {**LLAMA, "optimizer": {"ema": 0.5}}),
    "muon": ("1f1b", 1, {}, {**LLAMA, "optimizer": {"kind": "muon", "lr": 0.01}}),
    "made again": ("zb-v", 2, {"dp": 2}, {**LLAMA, "optimizer": {"sync": "post-validate", "clip_grad_norm": 0.1}}),
}


AGAIN = [{}, {"activations": "recompute"}, {"activations": "selective", "attention": "again"}]


@pytest.mark.long("{'activations': 'selective', 'attention': 'again'}")
@pytest.mark.parametrize("memory", AGAIN, ids=str)
def test_scores_are_computed_once_for_each_microbatch(memory, tmp_path, monkeypatch):
    plan, calls, own = planned(tmp_path, **LLAMA, memory=memory, **EVALUATED), [], slicing.peaks
    monkeypatch.setattr(slicing, "peaks", lambda *given: calls.append(1) or own(*given))
    run_threads(plan, 2)
    assert len(calls) == 2 * 4 * 2  # steps, microbatches, blocks


@pytest.mark.long("one gpt", "windows", "slices of cp", "shards of parts")
@pytest.mark.parametrize("way", few(WAYS, ("one", "one gpt", "windows", "zb-v", "slices of cp", "shards of parts")))
def test_weights_are_those_of_scores_by_hand(way, tmp_path):
    kind, pp, more, how = WAYS[way]
    found = run_threads(planned(tmp_path / "plan", kind, pp=pp, more=more, **how), STEPS)
    own = {key: value for key, value in how.items() if key not in ("memory", "slices")}
    own["optimizer"] = {key: value for key, value in own.get("optimizer", {}).items() if key != "sync"}
    alone = by_hand(tmp_path / "one", m=4 * more.get("dp", 1), **own)
    rounds = "kind" in own["optimizer"]  # Newton-Schulz, in bfloat16
    assert numbers(found) == near([alone], 1e-4 if rounds else 1e-5)
    if more.get("shard") not in ("weights", "all") and not rounds:
        hold_parts(found, alone, rtol=1e-4, atol=1e-6)
    evaluated_alike(found, alone)


@pytest.mark.long("{'dp': 2, 'shard': 'optimizer'}")
@pytest.mark.parametrize("more", [{}, {"dp": 2, "shard": "optimizer"}], ids=str)
def test_below_the_bound_a_training_keeps_its_bits(more, tmp_path):
    runs = [run_threads(planned(tmp_path / f"{tau}", tau=tau, more=more, **LLAMA), STEPS) for tau in (None, 1e6)]
    assert numbers(runs[0]) == numbers(runs[1])
    assert all(p.equal(q) for p, q in zip(*([*weights(run).values()] for run in runs), strict=True))


def weights(workers):
    return {(worker.rank, name): p.detach().clone() for worker, name, p in each_parameter(workers)}


def test_replicas_that_average_weights_scale_their_own(tmp_path):
    """After one step, before any average, the first of two replicas is one process with its microbatches."""
    hand = ByHand()
    (alone,) = run_threads(planned(tmp_path / "one", pp=1, tau=None, **LLAMA), 1, setup=hand.look, step=hand)
    average = {"dp": 2, "average": {"every": 50, "delay": 1}}
    first, _ = run_threads(planned(tmp_path / "two", pp=1, more=average, **LLAMA), 1)
    mine, wanted = weights([first]), weights([alone])
    assert len(hand.scaled) > 1
    assert not mine[0, "layers.1.qkv.weight"].equal(weights([_])[1, "layers.1.qkv.weight"])
    for name, parameter in mine.items():
        torch.testing.assert_close(parameter, wanted[name], rtol=1e-5, atol=1e-6)


def test_samples_that_share_a_row_have_no_scores_between_them():
    """Nor has padding."""
    q, k, v = (torch.randn(2, 2, 9, 8) for _ in range(3))
    rows, adding = ((3, 4), (9,)), Adding(1.0)
    with adding_to(adding), packed(rows):
        slicing.attention(q, k, v, block=5)
    alone = [peaks(q[:1, :, a:b], k[:1, :, a:b], Limits()) for a, b in ((0, 3), (3, 7))]
    torch.testing.assert_close(adding.peaks[5], torch.stack([*alone, peaks(q[1:], k[1:], Limits())]).amax(0))
    adding.again = True
    with adding_to(adding):
        causal(10 * q, k, v, Limits(block=6))
    assert {*adding.peaks} == {5}


def test_a_step_that_is_skipped_scales_nothing(tmp_path):
    """And the next one does not count its scores."""
    found, large = [], 50.0

    def setup(worker):
        block = blocks_of(worker)[0]
        own = block.attend

        def attend(q, k, v, **limits):
            bad = worker.step == 1
            y = own(q * large if bad else q, k, v, **limits)
            return y * math.nan if bad else y

        block.attend = attend

    def step(worker):
        def run(worker, number, **options):
            result = run_step(worker, number, **options)
            found.append((result.skipped, weights([worker])))
            return result

        return run

    (clipped,) = run_threads(planned(tmp_path / "one", pp=1, **LLAMA), STEPS, setup=setup, step=step)
    assert [skipped for skipped, _ in found] == [False, True, False]
    assert all(p.equal(found[1][1][name]) for name, p in found[0][1].items())
    after = weights([clipped])[0, "layers.0.qkv.weight"]
    assert after.norm() > 0.5 * found[1][1][0, "layers.0.qkv.weight"].norm()


def test_scores_that_are_no_numbers_scale_nothing():
    block = SimpleNamespace(heads=4, kv_heads=2, size=2, limits={})
    weight = torch.nn.Parameter(torch.ones(16, 3))
    weight.grad = torch.zeros_like(weight)
    with torch.no_grad():
        Attending(0, block, [Held("", 0, (16, 3), weight)]).clip(torch.tensor([math.inf, math.nan, 8.0, -9.0]), 2.0)
    assert weight[:, 0].tolist() == [1, 1, 1, 1, 0.5, 0.5, 2, 2, 1, 1, 0.5, 0.5, 1, 1, 1, 1]


@pytest.mark.long
def test_masters_are_scaled_and_the_average_is_of_what_was(tmp_path):
    """In bfloat16 with float32 masters: rows of a head are scaled alike, and working weights are those of masters."""
    low = {"dtype": "bfloat16", "parameters": "bfloat16", **GROUPED}
    how = {"model": "llama", "model_more": low, "pp": 1}
    (plain,) = run_threads(planned(tmp_path / "plain", tau=None, **how), 1)
    (found,) = run_threads(planned(tmp_path / "clipped", **how), 1)
    masters = [inside(worker.optimizers[0], Masters).masters for worker in (found, plain)]
    scaled = set()
    for name in [name for name in masters[0] if name.endswith("qkv.weight")]:
        rows = (masters[0][name] / masters[1][name]).view(4 + 2 + 2, -1)
        torch.testing.assert_close(rows, rows[:, :1].expand_as(rows), rtol=1e-5, atol=0)
        assert rows[-2:].eq(1).all()  # values
        scaled.update(rows[:, 0].tolist())
        assert found.stages[0].parameters[name].equal(masters[0][name].bfloat16())
    assert len(scaled) > 4


@pytest.mark.long
def test_forwards_cost_another_product_of_queries_and_keys_which_recompute_leaves_out(monkeypatch):
    monkeypatch.undo()  # queries in large chunks
    sizes = {"family": "llama", "hidden": 256, "heads": 4, "kv_heads": 2, "layers": 2, "seq_len": 2048, "vocab": 256}
    plain, clipped = (job(model=sizes, optimizer=how) for how in ({}, {"qk_clip": 100.0}))
    before, after = (layers(one)[1] for one in (plain, clipped))
    assert (after.b, after.w) == (before.b, before.w)
    assert after.f > 1.01 * before.f
    assert after.again == pytest.approx(before.again)
    assert plain.planning() == {key: value for key, value in clipped.planning().items() if key} | {
        "optimizer": plain.planning()["optimizer"]
    }
