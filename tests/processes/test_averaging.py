"""Replicas that average weights on four gloo ranks: bitwise as with threads."""

import pytest
import torch

from tests.processes.gloo_ranks import train
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
