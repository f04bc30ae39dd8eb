"""One plan with all features of a large model, trained on eight processes, and resumed under another plan."""

import pytest

from tests.jobs import tiny_tensors_move
from tests.processes.plans import compiled, metrics, run_here
from tests.threads import losses_of, run_threads
from zbc.ir import Kind
from zbc.plan.directory import StoredPlan

# Wide enough for activations of slices to be offloaded (runtime/features/offload/parcels.py leaves small ones).
MODEL = {"layers": 8, "hidden": 128, "heads": 4, "vocab": 512, "seq_len": 256, "dtype": "bfloat16"}
SAME = {
    "model": MODEL,
    "optimizer": {"lr": 1e-2, "clip_grad_norm": 1.0},
    "train": {"steps": 4, "seed": 7, "watchdog_s": 200.0},
    "checkpoint": {"every": 2},
}
SHAPE = {"pp": 2, "dp": 2, "tp": 2, "vocabulary": "shared", "shard": "weights"}
EVERYTHING = {"parallel": SHAPE, "memory": {"activations": "offload"}, "hardware": {"host_gbps": 20.0}}
KINDS = {Kind.OFFLOAD, Kind.RELEASE, Kind.RELOAD, Kind.GATHER, Kind.FREE, Kind.S, Kind.MEET, Kind.T}
NEAR = 2e-3  # of losses in bfloat16


def plan_of(folder, name, **tables):
    compiled(folder, **SAME, **tables).write(folder / name)
    return folder / name


@pytest.mark.limit(500)
@pytest.mark.repeats
@pytest.mark.parametrize(("kind", "limit"), [("zb-v", "0.6x"), ("interleaved-1f1b", "0.7x"), ("v-auto", "0.5x")])
def test_everything_at_once_trains_as_one_process_and_goes_on_as_another_shape(tmp_path, out, kind, limit):
    order = {"kind": kind, "microbatches": 4, "slices": 4, "memory_limit": limit}
    with tiny_tensors_move():  # the plan stands for one of a large model
        plan = plan_of(tmp_path, "plan", schedule=order, **EVERYTHING)
    stored = StoredPlan.read(plan)
    assert not KINDS - {op.kind for ops in stored.program.ranks for op in ops}
    assert stored.manifest.topology.world == 8 and stored.manifest.slices == 4
    one = plan_of(tmp_path, "one", parallel={"pp": 1}, schedule={"microbatches": 8})
    expected = losses_of(run_threads(StoredPlan.read(one), 4))

    run_here(plan, 8, out, steps=2)
    assert [line["loss"] for line in metrics(out)] == pytest.approx(expected[:2], rel=NEAR)
    other = plan_of(tmp_path, "other", parallel={"pp": 4, "dp": 2}, schedule={"microbatches": 4})
    run_here(other, 8, tmp_path / "later", resume=str(out))
    assert [line["loss"] for line in metrics(tmp_path / "later")] == pytest.approx(expected[2:], rel=NEAR)
    run_here(plan, 8, tmp_path / "back", resume=str(tmp_path / "later"), steps=5)
