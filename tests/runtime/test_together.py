"""Slices, activations on the host, a vocabulary that all ranks share and tensor parallelism, through each other.

Trained beside the same job without them; and weighed, since what should have left may be held by something else.
"""

from pathlib import Path

import pytest

from tests.composed import Tables, apart, beside, toml, trained
from tests.threads import scaled
from tests.tiers import few
from zbc import excludes
from zbc.compiler.compile import Compiled, compile_job, load_job
from zbc.compiler.memory.host import host_bytes
from zbc.compiler.memory.per_rank import peaks
from zbc.ir import Kind
from zbc.plan.directory import StoredPlan
from zbc.runtime.features import parcels

NEAR = 1e-6
# Traits, schedule and memory limit: low enough for something to move.
SLICED = [("slices x offload", *how) for how in (("1f1b", "0.5x"), ("zb-v", "0.45x"), ("interleaved-1f1b", "0.6x"))]
SLICED += [("slices x offload", *how) for how in (("breadth-first", "0.6x"), ("v-auto", "0.4x"))]
TRAINED = SLICED


@pytest.fixture
def moved(monkeypatch):
    """Bytes that each OFFLOAD moves, of storages however small."""
    found, plain = [], parcels.Parcel.offload

    def offload(parcel, op):
        plain(parcel, op)
        found.append(parcel.moved)

    monkeypatch.setattr(parcels, "SMALL", 1)
    monkeypatch.setattr(parcels.Parcel, "offload", offload)
    return found


@pytest.mark.parametrize(("traits", "kind", "limit"), few(TRAINED, 2))
def test_they_train_as_one_process_without_them(moved, traits, kind, limit):
    both, plain = beside(*traits.split(" x "), schedule__kind=kind, schedule__memory_limit=limit)
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


@pytest.mark.parametrize(("traits", "kind", "changes"), few(WEIGHED, 1))
def test_a_plan_knows_what_ranks_hold(tmp_path, traits, kind, changes):
    """Once in three runs: a late message stays longer."""
    both, _ = beside(
        *traits.split(" x "), schedule__kind=kind, schedule__memory_limit="0.6x", parallel__pp=2, **WIDE, **changes
    )
    made, plan = planned(both, tmp_path)
    predicted = [rank.bytes for rank in peaks(made.program, made.costs)]
    for _ in range(3):
        scales = scaled(plan)[1]
        held = [max(scale.held.peak for scale in scales[rank :: len(predicted)]) for rank in range(len(predicted))]
        if held == pytest.approx(predicted, rel=0.02):
            break
    assert held == pytest.approx(predicted, rel=0.02)
    slabs = [host_bytes(made.program, rank, made.costs) for rank in range(len(predicted))]
    assert [scale.held.host for scale in scales[: len(slabs)]] == pytest.approx(slabs, rel=0.02)
    assert any(slabs)


def test_copies_of_a_slice_take_its_share_of_those_of_its_microbatch(tmp_path):
    both, _ = beside("slices", "offload", schedule__slices=4, schedule__memory_limit="0.5x", **WIDE)
    both["schedule"]["cuts"] = "even"
    made, _ = planned(both, tmp_path)
    both["schedule"]["slices"] = 1
    both["schedule"].pop("cuts")
    whole, _ = planned(both, tmp_path)
    for stage in range(4):
        each = [made.costs.of("out", stage, part) for part in range(4)]
        assert each == pytest.approx([each[0]] * 4, rel=1e-6)
        kv = made.costs.bytes_of("kv")[stage]  # which stay, for all slices
        moves = whole.costs.bytes_of("host")[stage]
        assert sum(each) == pytest.approx(whole.costs.of("out", stage) * (moves - kv) / moves, rel=0.02)


def test_auto_moves_activations_of_slices_where_memory_is_short(tmp_path):
    both, _ = beside("slices", "offload", memory__activations="auto", schedule__memory_limit="0.5x", **WIDE)
    both["hardware"] |= {"host_gbps": 200.0, "tflops": 1.0}
    made, _ = planned(both, tmp_path)
    assert any(op.kind is Kind.OFFLOAD and op.slice == 1 for op in made.program.ranks[0])


def test_what_trains_here_is_not_in_the_table():
    left = {frozenset(pair[:2]) for pair in excludes.PAIRS}
    assert not [traits for traits, *_ in TRAINED if any({*traits.split(" x ")} >= pair for pair in left)]
