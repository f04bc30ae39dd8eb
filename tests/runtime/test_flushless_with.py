"""Steps without a flush with other features: equal to training without these, and to one process a step late."""

from itertools import pairwise

import pytest
import torch

from tests.composed import planned, settings
from tests.runtime.small_plans import hold, reference
from tests.runtime.test_flushless import SMALL, plan_of, poisoned
from tests.threads import each_parameter, run_threads
from zbc.ops import experts_of
from zbc.runtime.features.tensor_parallel import SharedLayers
from zbc.runtime.features.unflushed.versions import TwoVersions


@pytest.mark.parametrize("parameters", ["float32", "bfloat16"])
def test_in_bfloat16_two_versions_have_the_bits_of_one_process_a_step_late(parameters):
    plan = plan_of("interleaved-1f1b", 2, 4, 2, model={**SMALL, "dtype": "bfloat16", "parameters": parameters})
    hold(run_threads(plan, 6), reference(plan, 6, delayed=True))


def mine(worker, spoiled):
    """A parameter whose gradient only this rank has: of an expert, or of a shared layer."""
    if spoiled == 0:
        return next(iter(worker.optimizers[experts_of(0)].parameters.values()))
    cut = worker.features.of(SharedLayers).cuts
    return next(p for name, p in worker.stages[0].parameters.items() if name in cut)


EXPERTS = {
    "model__family": "llama",
    "model__layers": 4,
    "model__experts": 4,
    "model__ffn_hidden": 64,
    "parallel__ep": 2,
    "parallel__dp": 2,
}
SKIPS = [("", EXPERTS, 0, [2, 3, 2, 3]), ("tp", {}, 1, [2, 2, 3, 3])]


@pytest.mark.parametrize(("trait", "more", "spoiled", "steps"), SKIPS)
def test_ranks_skip_a_step_with_their_stage(trait, more, spoiled, steps):
    """One of two ranks with experts, or with a part, of the first stage has a gradient that is not finite."""
    tables = settings("two versions", *filter(None, (trait,)), parallel__pp=2, schedule__microbatches=4, **more)

    def spoils(worker, op):
        return mine(worker, spoiled) if (worker.rank, op.stage) == (spoiled, 0) else None

    workers = run_threads(planned(tables), 3, setup=lambda worker: poisoned(worker, spoils))
    taken = [
        {int(one["step"]) for optimizer in worker.optimizers.values() for one in optimizer.optimizer.state.values()}
        for worker in workers
    ]
    assert taken == [{one} for one in steps]
    assert all(torch.isfinite(p).all() for _, _, p in each_parameter(workers))


def test_both_versions_are_whole_after_every_step():
    """Replicas that step parts have equal weights, including the older version."""
    workers = run_threads(planned(settings("two versions", "sharded optimizer", parallel__pp=2)), 3)
    for one, other in pairwise(sorted(workers, key=lambda worker: worker.plan.rank)):
        if one.plan.rank == other.plan.rank:
            mine, theirs = one.optimizers[one.plan.rank], other.optimizers[one.plan.rank]
            assert isinstance(mine, TwoVersions)
            pairs = [*zip(mine._older + mine._newer, theirs._older + theirs._newer, strict=True)]
            assert all(torch.equal(a, b) for a, b in pairs)
