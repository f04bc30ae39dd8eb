"""Tensor parallelism: the results of one process, two sums in F and B of a block, none in W; context parallelism."""

from dataclasses import replace

import pytest
import torch

import zbc
from tests.jobs import toml_text
from tests.refusals import refused
from tests.runtime.small_plans import make_plan, make_program
from tests.runtime.test_gradients import VECTORS
from tests.threads import each_parameter, numbers, run_threads
from zbc.errors import ZbcError
from zbc.plan.directory import StoredPlan
from zbc.runtime.features.context_parallel import rows_of
from zbc.runtime.features.tensor_parallel import Group, SharedLayers
from zbc.runtime.transports.hub import Hub, HubTransport
from zbc.training.models import sharding
from zbc.training.models.experts import stacks_of

GPT = {"layers": 3, "hidden": 32, "heads": 4, "vocab": 259, "seq_len": 8}
TRAIN = {"steps": 3, "seed": 7}
MODELS = {
    "gpt": {},
    "tied": {"ties": True},
    "rotary": {"variant": "rotary"},
    "llama": {"family": "llama", "kv_heads": 4},
    "qwen3": {"family": "llama", "kv_heads": 4, "variant": "qwen3"},
    "window": {"family": "llama", "kv_heads": 2, "variant": "qwen2", "window": 3},
}
"""By name, what they change in GPT."""


def plan_of(folder, kind="1f1b", *, pp=2, tp=1, dp=1, model="gpt", m=4, **sections):
    parallel = {"pp": pp, "tp": tp, "dp": dp, **sections.pop("more", {})}
    order = {"slices": sections.pop("slices", 1), **sections.pop("schedule_more", {})}
    optimizer = {"kind": "sgd", "lr": 0.1, "clip_grad_norm": 0.5, **sections.pop("optimizer", {})}
    model = {**GPT, **MODELS[model], **sections.pop("model_more", {})}
    sections |= {
        "data": {"kind": "synthetic", **sections.get("data", {})},
        "train": {**TRAIN, **sections.get("train", {})},
    }
    order |= {"kind": kind, "microbatches": m, "microbatch_size": 2}
    text = toml_text(model=model, parallel=parallel, schedule=order, optimizer=optimizer, **sections)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "zbc.toml").write_text(text)
    zbc.plan(zbc.load(folder / "zbc.toml")).write(folder / "plan")
    return StoredPlan.read(folder / "plan")


def near(workers, rel=1e-5):
    return [pytest.approx(pair, rel=rel) for pair in numbers(workers)]


def hold_parts(shared, alone, **tolerances):
    """Asserts that ranks have their parts of one process's weights, and equal whole ones; returns these by name."""
    whole, seen = dict(alone.stages[0].parameters), {}
    for worker, name, parameter in each_parameter(shared):
        cut = worker.features.of(SharedLayers).cuts.get(name)
        first, own, _ = stacks_of(worker).get(name, (0, None, 0))  # of experts a rank may have some
        if cut is None:
            assert torch.equal(seen.setdefault((name, first), parameter), parameter), name
        if tolerances:
            expected = whole[name] if cut is None else cut.of(whole[name])
            expected = expected if own is None else expected[first : first + own]
            torch.testing.assert_close(parameter, expected, msg=name, **tolerances)
    return {name: parameter for (name, first), parameter in seen.items() if not first}


@pytest.mark.always("alone")
@pytest.mark.long("replicas", "scattered")
@pytest.mark.parametrize(
    "more",
    [{}, {"dp": 2}, {"dp": 2, "more": {"shard": "gradients"}}, {"optimizer": {"sync": "post-validate"}}],
    ids=["alone", "replicas", "scattered", "ahead"],
)
def test_norms_of_heads_learn_from_the_heads_of_all_ranks(more, tmp_path):
    """Each rank has the gradient of its own heads; the norms are equal on all, and as in one process."""
    shared = run_threads(plan_of(tmp_path / "tp", "1f1b", pp=2, tp=2, model="qwen3", **more), 3)
    sync = {"optimizer": more["optimizer"]} if "optimizer" in more else {}
    (alone,) = run_threads(plan_of(tmp_path / "one", pp=1, m=4 * more.get("dp", 1), model="qwen3", **sync), 3)
    whole, seen = dict(alone.stages[0].parameters), hold_parts(shared, alone)
    norms = [name for name in seen if "norm" in name]
    assert any("norm_q" in name for name in norms)
    for name in norms:
        torch.testing.assert_close(seen[name], whole[name], rtol=0, atol=2e-7, msg=name)


def test_groups_take_other_seats(tmp_path):
    """The order names groups of ranks that share layers."""
    orders = {"numbered": [0, 1], "turned": [1, 0]}
    plans = (plan_of(tmp_path / name, "zb-v", tp=2, more={"order": order}) for name, order in orders.items())
    first, second = (run_threads(plan, 2) for plan in plans)
    assert numbers(first) == numbers(second)
    assert [w.plan.rank for w in second] == [1, 1, 0, 0] and [w.share for w in second] == [0, 1, 0, 1]


def test_weights_are_those_of_one_process_and_what_is_whole_stays_alike(tmp_path):
    shared = run_threads(plan_of(tmp_path / "tp", "zb-h1", tp=2), 3)
    (alone,) = run_threads(plan_of(tmp_path / "one", pp=1), 3)
    seen = hold_parts(shared, alone, rtol=1e-4, atol=1e-5)
    cuts = set().union(*(worker.features.of(SharedLayers).cuts for worker in shared))
    assert seen.keys() | cuts == alone.stages[0].parameters.keys()
    biases = [w.rank for w in shared if "layers.0.proj.bias" in w.stages.get(0, w.stages[min(w.stages)]).parameters]
    assert biases == [0], "added once"


def evaluated_alike(shared, alone):
    for worker in shared:
        if worker.evaluation is not None:
            assert worker.evaluation.results[0].loss == pytest.approx(alone.evaluation.results[0].loss, rel=1e-5)


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
def test_a_block_sums_twice_in_f_and_in_b_and_never_in_w(kind, tmp_path):
    """Embedding, three blocks and head on one rank: F 1 + 6, B 6 + 1; the head gathers its statistics once."""
    counted = []

    def count(worker):
        inner, begin, progress = worker.transport, worker.transport.start_sum, worker.progress

        def start_sum(tensor, ranks):
            if ranks == worker.features.of(SharedLayers).group.ranks:
                counted.append(str(progress.op).split()[0])
            return begin(tensor, ranks)

        inner.start_sum = start_sum

    run_threads(plan_of(tmp_path, kind, pp=2, tp=2, m=4), 1, setup=count)
    backward = "BW" if kind == "1f1b" else "B"
    per_microbatch = {what: counted.count(what) / (2 * 4) for what in {*counted}}
    assert per_microbatch["F"] == 7 and "W" not in per_microbatch
    assert per_microbatch.get("B", 0) + per_microbatch.get("BW", 0) == 7 and backward in per_microbatch


WIDE = {"family": "tests.runtime.user_models:shared", "layers": 4, "loss": "mse", "args": {"width": 8, "count": 4}}


def test_a_layer_of_a_user_says_how_it_is_shared():
    programs = (replace(make_program("zb-h1", p, 4), tp=p) for p in (1, 2))
    alone, shared = (run_threads(make_plan(program, model=WIDE, **VECTORS), 3) for program in programs)
    assert (
        len(shared),
        bool(shared[0].features.of(SharedLayers).cuts),
        bool(alone[0].features.of(SharedLayers).cuts),
    ) == (4, True, False)
    assert numbers(shared) == near(alone)


def test_layers_that_cannot_be_shared_are_refused():
    group = Group((0, 1), 0, HubTransport(Hub(2, inside=[(0, 1)]), 0))
    with refused("E119", match=r"layers\.0 \(Linear\) cannot be shared by 2", hint="shard(group)"):
        sharding.shard("layers.0", torch.nn.Linear(2, 2), group, joined=False)
    wrong = torch.nn.Linear(2, 2)
    wrong.shard = lambda group: {"wait": 0}
    with pytest.raises(ZbcError, match="cuts 'wait' along 0, which it has not"):
        sharding.shard("layers.0", wrong, group, joined=False)


def test_each_rank_has_an_early_and_a_late_chunk_of_each_slice():
    assert [rows_of([0, 8], place, 2).tolist() for place in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert rows_of([0, 4, 12], 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
    sizes = [sum(row + 1 for row in rows_of([0, 96], place, 4).tolist()) for place in range(4)]
    assert len({*sizes}) == 1, "keys that queries see"


class Short:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.arange(4), torch.arange(4)


def test_samples_of_another_length_are_refused(tmp_path):
    plan = plan_of(tmp_path, pp=1, more={"cp": 2}, data={"kind": f"{__name__}:Short"})
    with refused("E505", match="no 8 tokens for ranks to share out"):
        run_threads(plan, 1)
