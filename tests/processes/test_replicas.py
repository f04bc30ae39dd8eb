"""Stages with different numbers of ranks, trained: as threads and as processes over gloo."""

import pytest
import torch

from tests.processes.plans import GPT, metrics, run_here, write_plan
from tests.runtime.small_plans import parameters, reference
from tests.threads import each_parameter, losses_of, norms_of, run_threads
from tests.tiers import few
from zbc.plan.directory import StoredPlan

RUNS = ["2 1", "1 2", "3 1", "2 1 1", "2 3", "3 2"]  # ranks of each stage
pytestmark = pytest.mark.usefixtures("one_thread_per_kernel")


def planned(tmp_path, counts, microbatches, **changes):
    replicas = [*map(int, counts.split())]
    how = {"parallel": {"pp": sum(replicas), "replicas": replicas}, "model": {**GPT, "layers": 6}}
    how |= {"schedule": {"kind": "replicated-1f1b", "microbatches": microbatches, "microbatch_size": 2}}
    return write_plan(tmp_path, optimizer={"kind": "sgd", "lr": 0.1, "clip_grad_norm": 0.5, **changes}, **how)


@pytest.mark.parametrize("microbatches", [5, 4])
@pytest.mark.parametrize("replicas", RUNS)
def test_threads_train_as_one_process(tmp_path, replicas, microbatches):
    plan = StoredPlan.read(planned(tmp_path, replicas, microbatches))
    workers, expected = run_threads(plan, 3), reference(plan, 3)
    assert losses_of(workers) == pytest.approx(expected.losses, abs=1e-6)
    assert norms_of(workers) == pytest.approx(expected.norms, rel=1e-5)
    for name, parameter in parameters(workers).items():
        torch.testing.assert_close(parameter.detach(), expected.weights[name], rtol=0.0, atol=1e-6, msg=name)
    held = dict[str, torch.Tensor]()
    for _, name, parameter in each_parameter(workers):
        assert torch.equal(held.setdefault(name, parameter.detach()), parameter.detach()), "bitwise alike"


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


def test_replicas_share_the_optimizers_work(tmp_path):
    plan = StoredPlan.read(planned(tmp_path, "2 3", 5, zero1=True))
    workers, expected = run_threads(plan, 3), reference(plan, 3)
    assert losses_of(workers) == pytest.approx(expected.losses, abs=1e-6)


def test_a_replica_that_does_not_sum_is_caught(tmp_path):
    """The planted bug of this design: its weights would drift away from the other replica's."""
    from tests.processes.plans import compiled
    from zbc.compiler.check import check_all
    from zbc.errors import ZbcError

    job = {"parallel": {"pp": 3, "replicas": [2, 1]}, "schedule": {"kind": "replicated-1f1b", "microbatches": 4}}
    program = compiled(tmp_path, **job).program
    ranks = [[op for op in ops if rank or op.kind.value != "REDUCE"] for rank, ops in enumerate(program.ranks)]
    assert sum(map(len, ranks)) == program.size - 1
    with pytest.raises(ZbcError):
        check_all(program.with_ranks(ranks, by="by-hand"))
