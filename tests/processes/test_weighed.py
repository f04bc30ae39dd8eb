"""Bytes in flight between ranks are as predicted, with processes as well."""

import statistics
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from tests.jobs import job
from tests.processes.gloo_ranks import open_worker
from tests.profiles import layer, profile_of
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.memory.per_rank import peaks
from zbc.job.profile import LinkProfile
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.execute import run_step
from zbc.training.profiling.rig import build_rig
from zbc.training.profiling.weigh import parts
from zbc.training.recording.measure import Scale

STEPS, WIDTH = 4, 4096
MS = [[10.0, 12.0, 8.0], [15.0, 18.0, 12.0]] * 4  # F, B and W of each layer, which sleeps for as long


def sleeping(**changes):
    """A job whose layers sleep."""
    model = {"family": "tests.runtime.ticking:sleepers", "loss": "mse", "args": {"ms": MS, "width": WIDTH}}
    data = {"kind": "tests.runtime.ticking:Vectors", "args": {"width": WIDTH}}
    return job(layers=len(MS), model=model, data=data, **changes)


@pytest.fixture(scope="module")
def profile():
    """A profile with the sleeping times and measured bytes."""
    described, cpu = sleeping(), torch.device("cpu")
    rig = build_rig(described, cpu)
    times = dict(zip(rig.order, MS, strict=True))
    layers = {name: layer(*times[name], bytes=one.bytes) for name, one in parts(rig, cpu)[0].items()}
    return profile_of(described, layers=layers, order=list(rig.order), link=LinkProfile(latency_us=100.0, gbps=10.0))


def most_buffers(rank, plan):
    """The most bytes of buffers in each step but the first."""
    worker, found = open_worker(rank, plan), []
    with closing(Scale(worker)) as scale:
        for step in range(STEPS):
            run_step(worker, step)
            found.append(max(one.held.buffers for one in scale.readings if not one.op.kind.is_transfer))
    worker.transport.finish_step()
    worker.transport.close()
    return found[1:]


@pytest.mark.parametrize(
    ("kind", "p", "m"),
    few([("zb-v", 2, 4), ("interleaved-1f1b", 2, 4), ("gpipe", 2, 5), ("zb-v", 4, 4)], [("zb-v", 2, 4)]),
)
def test_buffers_of_processes_are_those_predicted(kind, p, m, profile, pair, pool, tmp_path):
    compiled = compile_job(replace(sleeping(kind=kind, pp=p, m=m), profile=profile, carded=False))
    compiled.write(tmp_path / "plan")
    measured = (pair if p == 2 else pool).run(most_buffers, StoredPlan.read(tmp_path / "plan"))
    for predicted, steps in zip(peaks(compiled.program, compiled.costs), measured, strict=True):
        assert predicted.buffers == pytest.approx(statistics.median(steps), rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("vocab", few([512, 3000], (512,)))
def test_buffers_of_processes_that_share_out_the_optimizer_are_those_predicted(vocab, pool, tmp_path):
    """A message still in flight after the op that started it must not count as workspace of that op."""
    changes = {"model": {"vocab": vocab, "seq_len": 64}, "parallel": {"dp": 2}, "optimizer": {"zero1": True}}
    compiled = compile_job(job(data={"kind": "synthetic"}, kind="1f1b", pp=2, m=6, layers=6, **changes))
    compiled.write(tmp_path / "plan")
    plan = StoredPlan.read(tmp_path / "plan")
    measured = pool.run(most_buffers, plan)
    for rank, predicted in enumerate(peaks(compiled.program, compiled.costs)):
        copies = [statistics.median(measured[one]) for one in plan.manifest.topology.ranks([rank])]
        assert predicted.buffers == pytest.approx(max(copies), rel=0.03)
