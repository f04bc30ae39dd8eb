"""Combined features: pairs removed from zbc/excludes.py train as without the feature that must not change it."""

from pathlib import Path

import pytest

from tests.composed import TOLERANCE, apart, beside, toml, trained
from tests.threads import scaled
from tests.tiers import few
from zbc import excludes
from zbc.compiler.compile import compile_job
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.shapes import load_job
from zbc.plan.directory import StoredPlan
from zbc.training.models import compiled

ONE_PIPE = ["1f1b", "zb-h1", "gpipe", "interleaved-1f1b", "breadth-first", "looped-zb", "zb-v", "v-half", "1f1b-v"]
ONE_PIPE += ["hanayo", "dualpipe-v", "braid-v"]
TWO_PIPES = ["chimera", "bitpipe", "dualpipe", "dualpipe-v", "chimera-zb", "bitpipe-zb"]
SHARDS = ("sharded weights", "one-sided", "sharded gradients", "sharded all")
WORDS = [("shared vocabulary", shard, kind) for shard in SHARDS for kind in ONE_PIPE]
COPIES = [(shard, "", kind) for shard in ("sharded gradients", "sharded all", "one-sided") for kind in TWO_PIPES]
MOVED = [
    ("offload", shard, kind)
    for shard in ("sharded weights", "sharded all", "one-sided")
    for kind in ("1f1b", "zb-v", "interleaved-1f1b", "gis")
]
SCATTERED = ("shared vocabulary", "sharded gradients", "zb-v")  # hangs if a SCATTER waits for the one before
SOME = [WORDS[0], WORDS[-3], SCATTERED, COPIES[2], COPIES[-2], MOVED[1], MOVED[-2]]


@pytest.mark.parametrize(("one", "other", "kind"), few(WORDS + COPIES + MOVED, SOME))
def test_pairs_train_as_one_after_the_other(one, other, kind):
    both, plain = beside(*filter(None, (one, other)), schedule__kind=kind)
    assert apart(trained(both), trained(plain)) <= TOLERANCE


CHANGED = [{"model__ties": True}, {"parallel__vocabulary": "shared-2"}, {"model__family": "llama"}]


@pytest.mark.repeats
@pytest.mark.parametrize(
    "changes",
    [{"model__ties": True}, {"parallel__vocabulary": "shared-2"}, {"model__family": "llama"}],
    ids=str,
)
@pytest.mark.parametrize("traits", [("slices",), ()], ids=str)
@pytest.mark.parametrize("shard", ["weights", "all"])
def test_a_shared_vocabulary_with_shards_goes_through_the_others(shard, traits, changes):
    clip = {"optimizer__clip_grad_norm": 0.1, "parallel__pp": 2, "model__layers": 4}
    both, plain = beside("shared vocabulary", f"sharded {shard}", *traits, schedule__kind="zb-v", **changes, **clip)
    assert apart(trained(both), trained(plain)) <= TOLERANCE


@pytest.mark.repeats
@pytest.mark.parametrize(("sync", "kind"), [("two versions", "interleaved-1f1b"), ("asynchronous", "1f1b")])
def test_compiled_layers_train_without_a_flush_as_uncompiled_ones(sync, kind, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", {"backend": "aot_eager"})
    both, plain = beside(sync, "compile", schedule__kind=kind)
    assert apart(trained(both), trained(plain)) <= TOLERANCE


@pytest.mark.parametrize(("shard", "kind"), few([("weights", "1f1b"), ("weights", "gis"), ("all", "1f1b")], 1))
def test_with_copies_to_the_host_and_sharded_weights_a_plan_knows_what_ranks_hold(tmp_path, shard, kind):
    """In one of three runs at least: a late message is held longer."""
    wide = {f"model__{key}": value for key, value in {"layers": 4, "hidden": 128, "seq_len": 128}.items()}
    both, _ = beside("offload", f"sharded {shard}", schedule__kind=kind, parallel__pp=2, **wide)
    path = Path(tmp_path) / "zbc.toml"
    path.write_text(toml(both))
    made = compile_job(load_job(path), budget=0.0, suggest=False)
    made.write(tmp_path / "plan")
    predicted = max(rank.bytes for rank in peaks(made.program, made.costs))
    plan = StoredPlan.read(tmp_path / "plan")
    assert any(predicted == pytest.approx(held(plan), rel=0.03) for _ in range(3))


def held(plan: StoredPlan) -> float:
    return max(scale.held.peak for scale in scaled(plan)[1])


@pytest.mark.parametrize("traits", few([["tp", "sharded all"], ["slices"], ["tp_sequence"]], 1), ids=" x ".join)
def test_a_gpt_with_fewer_heads_of_keys_trains_however_it_is_cut_up(traits):
    both, plain = beside(*traits, schedule__kind="zb-v", model__kv_heads=2, model__layers=4, parallel__pp=2)
    assert apart(trained(both), trained(plain)) <= TOLERANCE
    plain["model"].pop("kv_heads")
    assert apart(trained(both), trained(plain)) > 10 * TOLERANCE


def test_replicas_average_alike_while_the_batch_grows():
    """All weights in each step, since shares depend on the stages."""
    found = []
    for p in (1, 2):
        tables, _ = beside("average", parallel__pp=p, model__layers=4, train__steps=4)
        tables["parallel"]["average"] = {"every": 1, "share": 1.0}
        tables["schedule"]["ramp"] = [{"microbatches": 2, "steps": 2}]
        found.append(trained(tables, steps=4))
    assert apart(*found) <= TOLERANCE


def test_what_trains_here_is_not_in_the_table():
    left = {frozenset(pair[:2]) for pair in excludes.PAIRS}
    assert not {frozenset(filter(None, (one, other))) for one, other, _ in WORDS + COPIES + MOVED} & left
    assert frozenset(("two versions", "compile")) not in left
