"""Stages with different numbers of ranks, trained: as threads and as processes over gloo."""

import pytest
import torch

from tests.processes.plans import GPT, metrics, run_here, write_plan
from tests.runtime.small_plans import reference
from tests.tiers import few
from zbc.plan.directory import StoredPlan

RUNS = ["2 1", "1 2", "2 3"]  # ranks of each stage
pytestmark = pytest.mark.usefixtures("one_thread_per_kernel")


def planned(tmp_path, counts, microbatches, **changes):
    replicas = [*map(int, counts.split())]
    how = {"parallel": {"pp": sum(replicas), "replicas": replicas}, "model": {**GPT, "layers": 6}}
    how |= {"schedule": {"kind": "replicated-1f1b", "microbatches": microbatches, "microbatch_size": 2}}
    return write_plan(tmp_path, optimizer={"kind": "sgd", "lr": 0.1, "clip_grad_norm": 0.5, **changes}, **how)


@pytest.mark.parametrize("replicas", few(RUNS, 2))
def test_processes_train_as_one_process(tmp_path, replicas):
    plan = planned(tmp_path, replicas, 5)
    lines = run_here(plan, sum(map(int, replicas.split())), tmp_path / "out", save_hf=tmp_path / "hf")
    expected = reference(StoredPlan.read(plan), 3)
    found = metrics(tmp_path / "out")
    assert [row["loss"] for row in found] == pytest.approx(expected.losses, abs=1e-6)
    assert [row["grad_norm"] for row in found] == pytest.approx(expected.norms, rel=1e-5)
    assert any("[stage " in line for line in lines)
    from safetensors.torch import load_file

    saved = {name: t for file in (tmp_path / "hf").glob("*.safetensors") for name, t in load_file(file).items()}
    torch.testing.assert_close(
        saved["transformer.wte.weight"], expected.weights["embed.tokens.weight"], rtol=0.0, atol=1e-6
    )
    torch.testing.assert_close(saved["lm_head.weight"], expected.weights["head.logits.weight"], rtol=0.0, atol=1e-6)
