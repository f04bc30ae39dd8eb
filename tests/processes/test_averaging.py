"""Replicas that average weights on four gloo ranks: bitwise as with threads, also if a rank is killed."""

import pytest
import torch

from tests.processes.gloo_ranks import train
from tests.processes.paced import run_paced
from tests.processes.plans import killing, run_here, write_plan
from tests.processes.test_restarts import restarts, result
from tests.runtime.test_averaging import plan
from tests.threads import run_threads

pytestmark = pytest.mark.usefixtures("one_thread_per_kernel")


def test_processes_average_as_threads_do(pool, tmp_path):
    made = plan(tmp_path, {"share": 0.3})
    found, workers = pool.run(train, made, 6), run_threads(made, 6)
    for worker, one in zip(workers, found, strict=True):
        assert one[:2] == ([r.loss for r in worker.results], [r.grad_norm for r in worker.results])
        assert torch.isfinite(torch.tensor(one[0])).all()
    assert found[0][1] != found[2][1], "each replica has its own gradients"


@pytest.mark.repeats
def test_a_rank_that_is_killed_leaves_no_trace(tmp_path, out):
    tables = {"parallel": {"pp": 2, "dp": 2, "average": {"share": 0.25}}, "optimizer": {"lr": 0.01}}
    tables |= {"train": {"steps": 9}, "checkpoint": {"every": 3}}
    (tmp_path / "a").mkdir()
    run_here(write_plan(tmp_path / "a", **tables), 4, tmp_path / "whole")
    lines = run_paced(write_plan(tmp_path, **tables), 4, out, each=killing(out, {5: 3}), max_restarts=3)
    assert len(restarts(lines)) == 1
    assert result(out) == result(tmp_path / "whole")
