"""Frozen layers on two replicas of a pipeline of two ranks, as four processes."""

import pytest
import torch

from tests.processes.gloo_ranks import train, unpack
from tests.runtime.small_plans import make_plan, make_program, parameters
from tests.runtime.test_freezing import ADAMW, SEED, mixed, shared_out
from tests.threads import run_threads
from tests.tiers import few

pytestmark = pytest.mark.usefixtures("one_thread_per_kernel")


@pytest.mark.parametrize("sharded", few([False, True], (True,)))
def test_processes_freeze_what_threads_freeze(pool, sharded):
    program = shared_out(make_program("zb-h1", 2, 4, copies=2, sharded=sharded), mixed)
    plan = make_plan(program, optimizer={**ADAMW, "clip_grad_norm": 0.5, "zero1": sharded}, seed=SEED)
    found, workers = pool.run(train, plan, 3), run_threads(plan, 3)
    losses, norms = ([getattr(one, key) for one in workers[0].results] for key in ("loss", "grad_norm"))
    assert all(one[:2] == (losses, norms) for one in found)
    weights = unpack([weights for *_, weights in found])
    for name, parameter in parameters(workers).items():
        assert torch.equal(weights[name], parameter), name
