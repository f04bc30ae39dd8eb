"""Slices, offload, a shared vocabulary and tensor parallelism, combined.

Compared with the same job without them; with measured memory, since offloaded tensors might still be held elsewhere.
"""

from pathlib import Path

import pytest

from tests.composed import TOLERANCE, Tables, apart, beside, settings, toml, trained
from tests.refusals import refused
from tests.threads import scaled
from tests.tiers import few
from zbc import excludes
from zbc.compiler.compile import compile_job
from zbc.compiler.compiled import Compiled
from zbc.compiler.memory.host import host_bytes
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.shapes import load_job
from zbc.interop import torch_csv
from zbc.ir import Kind
from zbc.plan.directory import StoredPlan
from zbc.training.models import compiled

NEAR = 1e-6
# Traits, schedule and memory limit: low enough for something to move.
SLICED = [("slices x offload", *how) for how in (("1f1b", "0.5x"), ("zb-v", "0.45x"), ("interleaved-1f1b", "0.6x"))]
SLICED += [("slices x offload", *how) for how in (("breadth-first", "0.6x"), ("v-auto", "0.4x"))]
SLICED += [(f"slices x replicas{more}", "replicated-1f1b", "1.5x") for more in ("", " x tp")]
SLICED += [("slices x replicas x offload", "replicated-1f1b", "0.6x")]
LIMITS = {"1f1b": "0.6x", "zb-v": "0.5x", "interleaved-1f1b": "0.6x", "gis": "0.5x", "v-auto": "0.5x"}
LIMITS |= {"zb-auto": "0.7x"}
WORDS = [(f"shared vocabulary x {more}offload", *how) for more in ("", "slices x ") for how in LIMITS.items()]
PARALLEL = [(f"shared vocabulary x {more}", "1f1b", "1.3x") for more in ("tp", "tp_sequence", "slices x tp")]
PARALLEL += [("shared vocabulary x tp x offload", "zb-v", "0.5x"), ("slices x tp x offload", "1f1b", "0.4x")]
PARALLEL += [("shared vocabulary x tp x slices x offload", *how) for how in (("zb-v", "0.5x"), ("v-auto", "0.4x"))]
PARALLEL += [("slices x tp_sequence", "zb-v", "1x"), ("slices x tp_sequence x offload", "1f1b", "0.4x")]
TRAINED = [*SLICED, *WORDS, *PARALLEL]


@pytest.mark.parametrize(
    ("traits", "kind", "limit"),
    few(TRAINED, [*SLICED[:2], SLICED[5], WORDS[0], WORDS[7], PARALLEL[1], PARALLEL[5], PARALLEL[-2]]),
)
def test_they_train_as_one_process_without_them(moved, traits, kind, limit):
    both, plain = beside(*traits.split(" x "), schedule__kind=kind)
    both["schedule"]["memory_limit"] = limit
    assert apart(trained(both), trained(plain)) <= NEAR
    assert "offload" not in traits or sum(moved) > 0


WIDE = {f"model__{key}": value for key, value in {"layers": 4, "hidden": 128, "seq_len": 256, "vocab": 512}.items()}


def planned(tables: Tables, folder: Path) -> tuple[Compiled, StoredPlan]:
    path = folder / "zbc.toml"
    path.write_text(toml(tables))
    made = compile_job(load_job(path), budget=0.0, suggest=False)
    made.write(folder / "plan")
    return made, StoredPlan.read(folder / "plan")


WEIGHED = [("slices x offload", kind, {}) for kind in ("1f1b", "zb-v", "interleaved-1f1b")]
WEIGHED += [("slices x offload", "1f1b", {"memory__activations": "selective+offload"})]
WEIGHED += [("slices x offload", "1f1b", {"model__family": "llama"})]
OPEN = [{"parallel__vocabulary": "shared-2"}, {"model__dtype": "bfloat16", "model__seq_len": 512}]
OPEN += [{"model__family": "llama"}, {"model__ties": True}]
WITH_WORDS = [f"shared vocabulary{more}" for more in ("", " x offload", " x slices", " x slices x offload")]
WEIGHED += [(words, kind, {}) for words in WITH_WORDS for kind in ("1f1b", "zb-v", "interleaved-1f1b")]
WEIGHED += [(WITH_WORDS[-1], "1f1b", changes) for changes in OPEN]
WEIGHED += [(f"slices x {more}tp_sequence", "1f1b", {"model__hidden": 256}) for more in ("", "offload x ")]
WEIGHED += [(f"{words} x tp", "1f1b", {"model__hidden": 256}) for words in WITH_WORDS]
ADAPTED = [("1f1b", {}), ("zb-v", {}), ("zb-h1", {"parallel__vocabulary": "shared-2"})]
ADAPTED += [("1f1b", {"model__family": "llama"})]
WEIGHED += [("shared vocabulary", kind, {"adapter__rank": 4, **how}) for kind, how in ADAPTED]


@pytest.mark.parametrize(
    ("traits", "kind", "changes"), few(WEIGHED, [WEIGHED[n] for n in (0, 5, 8, 14, -1 - len(ADAPTED))])
)
def test_a_plan_knows_what_ranks_hold(tmp_path, traits, kind, changes):
    """In one of five runs at least, within 2.5% on the fullest rank: a late message is held longer."""
    both, _ = beside(*traits.split(" x "), schedule__kind=kind, parallel__pp=2, **(WIDE | changes))
    if "offload" in traits:
        both["schedule"]["memory_limit"] = "0.7x"
    made, plan = planned(both, tmp_path)
    predicted = [rank.bytes for rank in peaks(made.program, made.costs)]
    nearest = [0.0] * len(predicted)
    for _ in range(5):
        scales = scaled(plan)[1]
        part = plan.manifest.topology.of
        for rank, size in enumerate(predicted):
            held = max(scale.held.peak for i, scale in enumerate(scales) if part(i).pp == rank)
            nearest[rank] = min(held, nearest[rank], key=lambda found, size=size: abs(found - size))
        if nearest == pytest.approx(predicted, rel=0.01):
            break
    assert nearest == pytest.approx(predicted, rel=0.03)
    assert max(nearest) == pytest.approx(max(predicted), rel=0.025)
    slabs = [host_bytes(made.program, rank, made.costs) for rank in range(len(predicted))]
    assert [scale.held.host for scale in scales[:: plan.manifest.tp]] == pytest.approx(slabs, rel=0.02)
    assert any(slabs) == ("offload" in traits)


def test_copies_of_a_slice_take_its_share_of_those_of_its_microbatch(tmp_path):
    both, _ = beside("slices", "offload", schedule__slices=4, schedule__memory_limit="0.5x", **WIDE)
    both["schedule"]["cuts"] = "even"
    made, _ = planned(both, tmp_path)
    both["schedule"]["slices"] = 1
    both["schedule"].pop("cuts")
    whole, _ = planned(both, tmp_path)
    for stage in range(4):
        each = [made.costs.of("out", stage, part) for part in range(4)]
        assert each[:3] == pytest.approx([each[0]] * 3, rel=1e-6)
        targets = 8 * both["schedule"]["microbatch_size"] * both["model"]["seq_len"]  # of all, which go with the last
        assert 0 <= each[0] - each[3] <= targets / (1e6 * both["hardware"]["host_gbps"])
        kv = made.costs.bytes_of("kv")[stage]  # which stay, for all slices
        moves = whole.costs.bytes_of("host")[stage]
        assert sum(each) == pytest.approx(whole.costs.of("out", stage) * (moves - kv) / moves, rel=0.02)


def test_slices_are_shared_out_evenly_where_ranks_share_tokens(tmp_path):
    both, _ = beside("slices", "tp_sequence", schedule__slices=3)
    assert planned(both, tmp_path)[1].manifest.cuts == [0, 12, 22, 32]
    both["schedule"]["cuts"] = [11, 11, 10]
    with refused("E103", match="no multiples of 2", hint="set schedule.cuts = ["):
        planned(both, tmp_path)


def test_auto_moves_activations_of_slices_where_memory_is_short(tmp_path):
    both, _ = beside("slices", "offload", memory__activations="auto", schedule__memory_limit="0.5x", **WIDE)
    both["hardware"] |= {"host_gbps": 1000.0, "tflops": 0.1}
    made, _ = planned(both, tmp_path)
    assert made.program.slices == 2 and any(op.kind is Kind.OFFLOAD for op in made.program.ranks[0])


@pytest.mark.parametrize("kind", few(["1f1b", "interleaved-1f1b", "zb-v"], 1))
def test_an_order_from_a_file_makes_room_for_words_that_all_ranks_share(tmp_path, kind):
    plain = settings()
    plain["schedule"]["kind"] = kind
    made, _ = planned(plain, tmp_path)
    (tmp_path / "order.csv").write_text(torch_csv.dumps(made.program))
    both = settings("shared vocabulary")
    both["schedule"] |= {"kind": str(tmp_path / "order.csv")}
    assert apart(trained(both), trained(settings())) <= NEAR


PACKED = [("1f1b", {}), ("zb-v", {"shard": "optimizer"}), ("interleaved-1f1b", {"vocabulary": "shared-2"})]


@pytest.mark.parametrize(("kind", "parallel"), few(PACKED, 1))
def test_words_that_all_ranks_share_go_with_unequal_numbers_of_microbatches(tmp_path, kind, parallel):
    """Replicas sum gradients after the last collective of a pipeline's ranks, whose number differs by replica."""
    packed = {"data__balance": "length", "parallel__dp": 2}
    both, plain = beside("shared vocabulary", **packed)
    both["parallel"] |= {"pp": 2, **parallel}
    plain["parallel"]["pp"] = 1
    for one in (both, plain):
        one["schedule"]["microbatches"] = 3
    both["schedule"]["kind"] = kind
    made, _ = planned(both, tmp_path)
    assert len({start.compiled.program.microbatches for start in made.ramp}) > 1
    assert apart(trained(both), trained(plain)) <= NEAR


SPREAD = [("1f1b", "gpt", {}), ("1f1b", "gpt", {"vocabulary": "shared"}), ("zb-h1", "llama", {"tp": 2})]
SPREAD += [("1f1b", "llama", {"dp": 2})]


@pytest.mark.parametrize(("kind", "family", "parallel"), few(SPREAD, 1))
def test_samples_that_share_a_row_stay_apart_where_ranks_share_its_tokens(kind, family, parallel):
    """Some ranks have nothing but padding."""
    both, plain = beside("cp", data__balance="length", model__family=family, model__layers=2)
    both["parallel"] |= {"pp": 2, **parallel}
    plain["parallel"] = {"pp": 1, "dp": parallel.get("dp", 1)}
    both["schedule"] |= {"kind": kind, "microbatches": 2}
    plain["schedule"]["microbatches"] = 2
    found, expected = trained(both), trained(plain)
    assert apart(found[:1], expected[:1]) <= NEAR and apart(found, expected) <= TOLERANCE


@pytest.mark.repeats
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own, between threads
@pytest.mark.parametrize("kind", ["1f1b", "zb-v"])
def test_compiled_layers_train_with_copies_as_without(moved, kind, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", {"backend": "aot_eager"})
    both, plain = beside("offload", "compile", schedule__kind=kind, schedule__memory_limit="0.5x")
    assert apart(trained(both), trained(plain)) <= NEAR
    assert sum(moved) > 0


def test_what_trains_here_is_not_in_the_table():
    left = {frozenset(pair[:2]) for pair in excludes.PAIRS}
    assert not [traits for traits, *_ in TRAINED if any({*traits.split(" x ")} >= pair for pair in left)]
    assert frozenset(("offload", "compile")) not in left
