"""Context parallelism: the results of one process, gathers in F, sums in B."""

from collections import Counter

import pytest
import torch
from torch.nn import functional

from tests.jobs import tiny_tensors_move
from tests.refusals import refused
from tests.runtime.test_checkpoints import at
from tests.runtime.test_tensor_parallel import GPT, evaluated_alike, hold_parts, in_float64, near, numbers, plan_of
from tests.threads import run_threads, side_by_side
from tests.tiers import few
from zbc.ir import COPY, WHOLE
from zbc.job.model_section import Model
from zbc.runtime.features.context_parallel import Spread, rows_of
from zbc.runtime.features.tensor_parallel import Group
from zbc.runtime.transports.hub import Hub, HubTransport
from zbc.training.models import model as models
from zbc.training.models import sharding

HERE = "tests.runtime.test_context_parallel"
EXPERTS = {"experts": 4, "top_k": 2}
WAYS = {
    "gpipe": ("gpipe", 2, {}, "gpt", {}),
    "one stage": ("1f1b", 1, {}, "gpt", {}),
    "rotary": ("zb-h1", 2, {}, "rotary", {}),
    "four": ("zb-v", 2, {"cp": 4}, "llama", {}),
    "tied": ("interleaved-1f1b", 2, {}, "tied", {}),
    "two pipes": ("chimera", 2, {}, "gpt", {}),
    "groups": ("dualpipe-v", 2, {}, "gpt", {}),
    "braids": ("braid-v", 2, {}, "gpt", {}),
    "stages with replicas": ("replicated-1f1b", 3, {"replicas": [2, 1]}, "gpt", {}),
    "replicas": ("zb-h1", 2, {"dp": 2}, "gpt", {}),
    "window": ("zb-v", 1, {}, "window", {}),
    "norms of heads": ("1f1b", 1, {}, "qwen3", {}),
    "shared layers": ("1f1b", 2, {"tp": 2}, "qwen3", {}),
    "shared layers and sequence": ("zb-h1", 2, {"tp": 2, "tp_sequence": True}, "gpt", {}),
    "recompute": ("zb-h1", 2, {}, "llama", {"memory": {"activations": "recompute"}}),
    "selective": ("1f1b", 2, {}, "llama", {"memory": {"activations": "selective"}}),
    "selective apart": ("zb-h1", 2, {}, "gpt", {"memory": {"activations": "selective"}}),
    "optimizer": ("zb-v", 2, {"shard": "optimizer"}, "tied", {}),
    "gradients": ("zb-v", 2, {"shard": "gradients"}, "gpt", {}),
    "weights": ("zb-h1", 2, {"shard": "weights", "dp": 2}, "gpt", {}),
    "all": ("1f1b", 2, {"shard": "all"}, "llama", {}),
    "one-sided": ("zb-h1", 2, {"exchange": "one-sided", "shard": "weights"}, "gpt", {}),
    "post-validate": ("zb-h1", 2, {}, "gpt", {"optimizer": {"sync": "post-validate"}}),
    "two versions": ("1f1b", 2, {}, "gpt", {"optimizer": {"sync": "two-versions", "clip_grad_norm": None}}),
    "order": ("zb-h1", 2, {"order": [1, 0]}, "gpt", {}),
    "vocabulary": ("zb-h1", 2, {"vocabulary": "shared"}, "gpt", {}),
    "slices": ("zb-h1", 2, {}, "gpt", {"slices": 2}),
    "selective slices": ("zb-v", 2, {}, "llama", {"slices": 3, "model_more": {"seq_len": 24}}),
    "experts": ("1f1b", 2, {}, "llama", {"model_more": EXPERTS}),
    "balance": ("zb-h1", 2, {}, "llama", {"model_more": {**EXPERTS, "balance_loss": 0.5, "router_z_loss": 0.1}}),
    "bias": ("zb-h1", 2, {}, "llama", {"model_more": {**EXPERTS, "balance_rate": 0.01}}),
    "shared experts": ("1f1b", 1, {"dp": 2, "ep": 2}, "llama", {"model_more": {**EXPERTS, "balance_loss": 0.5}}),
    "experts in two pipes": ("chimera", 2, {"dp": 2, "ep": 2, "shard": "all"}, "llama", {"model_more": EXPERTS}),
    "shared experts and layers": ("zb-v", 2, {"dp": 2, "ep": 2, "tp": 2}, "llama", {"model_more": EXPERTS}),
    "shared layers and words": ("zb-h1", 2, {"tp": 2, "vocabulary": "shared"}, "tied", {}),
    "shards of words": ("1f1b", 2, {"vocabulary": "shared", "shard": "optimizer"}, "llama", {}),
    "slices of shared words": ("zb-h1", 2, {"tp": 2, "vocabulary": "shared"}, "gpt", {"slices": 2}),
    "slices of a sequence": ("zb-h1", 2, {"tp": 2, "tp_sequence": True}, "gpt", {"slices": 2}),
    "ramp": ("zb-h1", 2, {}, "gpt", {"schedule_more": {"ramp": [{"steps": 1, "microbatches": 2}]}}),
    "bfloat16": ("zb-h1", 2, {}, "llama", {"model_more": {"dtype": "bfloat16", "parameters": "bfloat16"}}),
    "evaluation": ("1f1b", 2, {}, "gpt", {"train": {"eval_every": 2, "eval_batches": 1}, "data": {"validation": 0.2}}),
    "ignored targets": ("zb-v", 2, {"dp": 2}, "gpt", {"data": {"kind": f"{HERE}:Holes"}}),
}
WAYS["selective slices"][4]["memory"] = {"activations": "selective"}
QUICK = ("rotary", "selective", "slices")


class Holes:
    """Sequences of tokens with some targets that do not count; in some the whole first half does not."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        made = torch.randint(259, (9,), generator=torch.Generator().manual_seed(index))
        target = made[1:].clone()
        target[: index % 5] = -100
        return made[:-1], target


@pytest.mark.parametrize("way", few(WAYS, QUICK))
def test_losses_norms_and_weights_are_those_of_one_process(way, tmp_path):
    kind, pp, more, model, how = WAYS[way]
    more = {"cp": 2, **more}
    options = {"model": model, **how, "model_more": {"layers": 6, **how.get("model_more", {})}}
    found = run_threads(plan_of(tmp_path / "cp", kind, pp=pp, more=more, **options), 3)
    options.pop("schedule_more", None)
    ramp = how.get("schedule_more", {})
    (alone,) = run_threads(plan_of(tmp_path / "one", pp=1, m=4 * more.get("dp", 1), schedule_more=ramp, **options), 3)
    low = "dtype" in options["model_more"]
    assert numbers(found) == near([alone], 2e-2 if low else 1e-5)
    losses = [[loss for loss, _ in numbers(workers)] for workers in (found, [alone])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3 if low else 1e-6)
    if more.get("shard") not in ("weights", "all"):
        hold_parts(found, alone, **({} if low else {"rtol": 1e-4, "atol": 1e-5}))
    evaluated_alike(found, alone)


def test_frozen_layers_and_activations_on_the_host_are_those_of_ranks_with_all_tokens(tmp_path):
    """Frozen layers depend on the times of a plan, so both have the same times."""
    costs = {"f": 1.0, "b": 1.0, "w": 1.0, "offload": 0.1}
    for name, how in (
        ("freeze", {"freeze": {"most": 0.5}}),
        ("offload", {"memory": {"activations": "offload"}, "schedule_more": {"memory_limit": "0.6x"}}),
    ):
        options = {"pp": 2, "model_more": {"layers": 6}, "costs": costs, **how}
        with tiny_tensors_move():
            plans = [plan_of(tmp_path / f"{name} {cp}", "1f1b", more={"cp": cp}, **options) for cp in (1, 2)]
        ops = [[op for op in plan.program.ranks[0] if op.kind.computes or op.kind in COPY] for plan in plans]
        assert ops[0] == ops[1] and any(op.share < WHOLE or op.kind in COPY for op in ops[1])
        whole, shared = (run_threads(plan, 3) for plan in plans)
        assert numbers(shared) == near(whole)


@pytest.mark.parametrize("how", [{}, {"slices": 2}], ids=["whole", "slices"])
def test_two_runs_have_the_same_bits(how, tmp_path):
    plan = plan_of(tmp_path, "zb-v", pp=2, more={"cp": 2}, **how)
    assert numbers(run_threads(plan, 3)) == numbers(run_threads(plan, 3))


def test_each_rank_has_an_early_and_a_late_chunk_of_each_slice():
    assert [rows_of([0, 8], place, 2).tolist() for place in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert rows_of([0, 4, 12], 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
    sizes = [sum(row + 1 for row in rows_of([0, 96], place, 4).tolist()) for place in range(4)]
    assert len({*sizes}) == 1, "keys that queries see"


FAMILIES = {"gpt": {}, "llama": {"family": "llama", "kv_heads": 2}}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_is_exact_to_its_own_rounding(family, ranks):
    """The mean loss and the sum of all gradients."""
    sizes = {"family": "gpt", **GPT, "seq_len": 16, **FAMILIES[family]}
    plans = models.layers(Model.model_validate(sizes), 0)
    tokens, targets = torch.randint(0, 259, (2, 2, 16), generator=torch.Generator().manual_seed(3))
    whole, expected = in_float64(plans, tokens, targets)
    every = tuple(range(ranks))
    hub = Hub(ranks, inside=[every])

    def rank(number):
        spread = Spread(Group(every, number, HubTransport(hub, number)))
        rows, layers = rows_of([0, 16], number, ranks), []
        y = tokens[:, rows]
        for plan in plans:
            layers.append(plan.build(3))
            sharding.spread(layers[-1], spread, rows)
            y = layers[-1].double()(y)
        loss = functional.cross_entropy(y.flatten(0, -2), targets[:, rows].flatten()) / ranks
        loss.backward()
        return loss.item(), layers

    found = side_by_side(ranks, rank)
    assert sum(loss for loss, _ in found) == pytest.approx(expected.item(), abs=1e-14)
    for number, layer in enumerate(whole):
        for name, parameter in layer.named_parameters():
            grads = [layers[number].get_parameter(name).grad for _, layers in found]
            torch.testing.assert_close(sum(grads), parameter.grad, rtol=0, atol=1e-13, msg=name)


EXCHANGES = {
    "apart": ("zb-h1", {}, {"F": (1, 0), "B": (0, 1), "BW": (0, 1)}),
    "recompute": ("1f1b", {"memory": {"activations": "recompute"}}, {"F": (1, 0), "BW": (1, 1)}),
    "selective": ("1f1b", {"memory": {"activations": "selective"}}, {"F": (1, 0), "BW": (1, 1)}),
    "slices": ("zb-h1", {"slices": 2}, {"F": (1, 0), "B": (0, 1), "BW": (0, 1)}),
}


@pytest.mark.parametrize("way", EXCHANGES)
def test_a_block_gathers_once_in_f_sums_once_in_b_and_does_nothing_in_w(way, tmp_path):
    """Keys and values of all tokens, and of all slices together: 2 x 2 x 8 tokens x 32 features x 4 bytes."""
    kind, how, meant = EXCHANGES[way]
    counts, sizes, ops = Counter(), Counter(), Counter()

    def count(worker):
        transport, progress, start = worker.transport, worker.progress, worker.transport.start

        def started(offer, ranks):
            counts[progress.op.split()[0], offer.what] += 1
            sizes[offer.what] += max(offer.source.nbytes, offer.target.nbytes)
            return start(offer, ranks)

        if worker.rank == 1:
            transport.start = started
            ops.update(op.kind.value for op in worker.plan.ops if op.kind.computes)

    run_threads(plan_of(tmp_path, kind, pp=1, more={"cp": 2}, **how), 1, setup=count)
    blocks, per = 3, {}
    for op in ops:
        per[op] = tuple(counts[op, what] / (blocks * ops[op]) for what in ("gather", "scatter"))
    assert {op: pair for op, pair in per.items() if any(pair)} == {op: pair for op, pair in meant.items() if op in ops}
    each = 2 * 2 * 8 * 32 * 4 * blocks * 4
    again = sum(pair[0] for pair in meant.values() if pair[1])
    assert sizes["scatter"] == each and sizes["gather"] == each * (2 if again else 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cp": 2}, {"cp": 1}),
        ({"cp": 1, "tp": 2}, {"cp": 4}),
        ({"cp": 2, "shard": "all"}, {"cp": 2, "tp": 2}),
        ({"cp": 2, "tp": 2, "vocabulary": "shared"}, {"cp": 2}),
        ({"cp": 2, "tp": 2, "dp": 2, "ep": 2}, {"cp": 2, "dp": 2, "shard": "optimizer"}),
    ],
    ids=["to one", "from tp", "to tp", "from shared words", "from shared experts"],
)
def test_a_run_goes_on_with_another_cp(first, second, tmp_path):
    alike = {"train": {"steps": 4}, "optimizer": {"kind": "adamw", "lr": 1e-3}}
    alike |= {"model": "llama", "model_more": EXPERTS} if "ep" in first else {}
    options = {"checkpoint": {"every": 2}, "m": 4 // first.get("dp", 1), **alike}
    before = plan_of(tmp_path / "a", "zb-h1", pp=2, more=first, **options)
    after = plan_of(tmp_path / "b", "1f1b", pp=1, more=second, **options)
    run_threads(before, 2, folder=tmp_path / "before")
    workers = run_threads(after, 4, folder=tmp_path / "after", resume=at(tmp_path / "before", 2))
    alone = run_threads(plan_of(tmp_path / "one", pp=1, **alike), 4)
    assert numbers(workers) == near(alone)[2:]


@pytest.mark.parametrize(
    ("more", "model", "code", "text"),
    [
        ({"cp": 3}, {}, "E119", "2 parallel.cp = 6 chunks of each sequence do not divide model.seq_len = 8"),
        ({"cp": 2, "tp": 2, "tp_sequence": True}, {"seq_len": 12}, "", ""),
        ({"cp": 2}, {"compile": True}, "E110", "parallel.cp.*compiled layers cannot meet others inside"),
        (
            {"cp": 2},
            {"family": "tests.runtime.user_models:shared", "loss": "mse", "hidden": None, "heads": None},
            "E119",
            "for built-in models",
        ),
    ],
)
def test_what_cannot_share_tokens_is_refused(more, model, code, text, tmp_path):
    if not code:
        assert plan_of(tmp_path, pp=1, more=more, model_more=model).manifest.topology.world == 4
        return
    with refused(code, match=text):
        plan_of(tmp_path, pp=1, more=more, model_more=model)


def test_slices_are_cut_at_whole_chunks(tmp_path):
    sizes = {"model_more": {"seq_len": 40}, "more": {"cp": 2}}
    plan = plan_of(tmp_path, "zb-h1", pp=1, slices=3, **sizes)
    assert all(cut % 4 == 0 for cut in plan.manifest.cuts) and plan.manifest.cuts[-1] == 40
    with refused("E103", match="no multiples of 4, as .* ranks that share tokens need them"):
        plan_of(tmp_path, "zb-h1", pp=1, slices=2, schedule_more={"cuts": [18, 22]}, **sizes)


class Short(Holes):
    def __getitem__(self, index):
        x, target = super().__getitem__(index)
        return x[:4], target[:4]


def test_samples_of_another_length_are_refused(tmp_path):
    plan = plan_of(tmp_path, pp=1, more={"cp": 2}, data={"kind": f"{HERE}:Short"})
    with refused("E505", match="no 8 tokens for ranks to share out"):
        run_threads(plan, 1)
