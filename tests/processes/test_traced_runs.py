"""`zbc run --trace`: processes record the given steps, and the recording of a killed run can be read."""

import json
import os
import signal

import pytest

from tests.processes.plans import at_step, metrics, processes, run_here, troubled, write_plan
from zbc.compiler.recorded import log
from zbc.compiler.recorded.report import build
from zbc.compiler.recorded.times import times_of
from zbc.compiler.recorded.view import typical
from zbc.errors import ZbcError
from zbc.ir import groups
from zbc.plan.directory import StoredPlan
from zbc.trace import recording as trace
from zbc.training.recording.measure import CATEGORIES

SLEEPERS = {  # steps of a quarter of a second, long compared with the stalls of a busy machine
    "model": {"family": "tests.runtime.ticking:sleepers", "loss": "mse", "args": {"ms": [[8.0] * 3] * 4, "width": 8}},
    "data": {"kind": "tests.runtime.ticking:Vectors", "args": {"width": 8}},
}


def test_a_run_records_the_steps_it_is_asked_to(tmp_path):
    plan, out = write_plan(tmp_path, parallel={"pp": 2}, **SLEEPERS), tmp_path / "run"
    run_here(plan, 2, out, steps=5, trace=frozenset({1, 3}))
    found = trace.read(out)
    assert found.steps == (2, 4) and found.plan == StoredPlan.read(plan) and found.uncertainty_ns == 0
    for rank, one in enumerate(found.ranks):
        assert int(one.head.process.rpartition(":")[2]) == processes(out)[rank]
        assert len(one.clocks) == 2 and one.memory is not None and one.memory.step == 5
        assert one.memory.categories == (*CATEGORIES, "peak")
        for step in found.steps:
            took = found.recorded(rank, step)
            assert one.clocks[0].at_ns < took.begins < took.ends < one.clocks[1].at_ns
    shown = {row["step"]: row["step_ms"] for row in metrics(out)}
    for step in found.steps:
        took = found.recorded(0, step)
        assert (took.ends - took.begins) / 1e6 == pytest.approx(shown[step], rel=0.2, abs=1.0)


@pytest.mark.long
def test_steps_of_every_phase_of_a_ramp_are_recorded_beside_their_plan(tmp_path):
    ramp = [{"microbatches": 1, "steps": 3}, {"microbatches": 2, "steps": 1}]
    schedule = {"kind": "1f1b", "microbatches": 4, "ramp": ramp}
    plan, out = write_plan(tmp_path, parallel={"pp": 2}, schedule=schedule, train={"steps": 8}), tmp_path / "run"
    run_here(plan, 2, out, trace=frozenset({1, 2, 3, 5, 6}))
    assert trace.phases(out) == ["m1", "m2", ""]
    whole = StoredPlan.read(plan)
    expected = {"m1": (whole.ramp[0], (2, 3), None), "m2": (whole.ramp[1], (4,), None), "": (whole, (6, 7), 8)}
    for phase, (its, steps, weighed) in expected.items():
        found = trace.read(out, phase)
        assert (found.phase, found.steps) == (phase, steps)
        assert found.plan.program == its.program and found.plan.manifest.id == its.manifest.id
        assert [one.memory and one.memory.step for one in found.ranks] == [weighed] * 2
        assert all(len(one.clocks) == 2 for one in found.ranks)
    assert trace.read(out).phase == ""


@pytest.mark.repeats
def test_what_a_killed_run_recorded_can_be_read(tmp_path):
    """After a hundred steps only the last few are not written yet."""
    plan, out = write_plan(tmp_path, parallel={"pp": 2}), tmp_path / "run"
    kill = at_step(100, lambda: os.kill(processes(out)[1], signal.SIGKILL))
    with pytest.raises(ZbcError, match="was killed by SIGKILL"):
        run_here(plan, 2, out, kill, steps=10**6, trace=frozenset(range(1, 10**5)))
    found = trace.read(out)
    assert found.steps[:2] == (2, 3) and found.steps == tuple(range(2, 2 + len(found.steps)))


@pytest.mark.repeats
def test_a_rank_that_fails_has_written_down_all_it_recorded(tmp_path):
    """Its disk takes a tenth of a second per line, so that most lines are not written yet when a layer raises."""
    changes = troubled("raise", good=4 * 20)
    changes["model"] = {**changes["model"], "family": "tests.processes.user_layers:slow_layers"}
    with pytest.raises(ZbcError, match="out of luck"):
        run_here(write_plan(tmp_path, **changes), 4, tmp_path / "run", steps=30, trace=frozenset(range(1, 30)))
    lines = [json.loads(line) for line in (tmp_path / "run" / "trace" / "rank-0002.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == list(range(2, 21))


@pytest.mark.long
def test_a_run_asked_to_stop_ends_its_trace(tmp_path):
    plan, out = write_plan(tmp_path, parallel={"pp": 2}), tmp_path / "run"
    stop = at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run_here(plan, 2, out, stop, steps=10**6, trace=frozenset(range(1, 10**5)))
    found = trace.read(out)
    assert found.steps == tuple(row["step"] for row in metrics(out)[1:])
    assert all(len(rank.clocks) == 2 for rank in found.ranks)


@pytest.mark.long
def test_groups_in_turns_are_compared_with_what_was_predicted(tmp_path):
    """The first op of a group waits for the messages of both, so no op's time is its time alone."""
    model = {"layers": 6, "hidden": 32, "heads": 4, "vocab": 64, "seq_len": 32}
    schedule = {"kind": "braid-v", "microbatches": 6, "microbatch_size": 2}
    plan = write_plan(tmp_path, parallel={"pp": 2, "tp": 2}, schedule=schedule, model=model)
    out = tmp_path / "run"
    run_here(plan, 4, out, steps=5, trace=frozenset({1, 2, 3}))
    found, hidden = build(trace.read(out)), log.beside(out)[0]["sums_hidden"]
    assert found.schedule == "braid-v" and len(found.ranks) == 4
    assert 0 <= hidden.measured <= 1 and hidden.predicted == pytest.approx(
        StoredPlan.read(plan).manifest.predicted["tp_sums"]["hidden"]
    )
    taken = trace.read(out)
    counted = sum(map(len, times_of(typical(taken)).cost.values()))
    alone = sum(
        op.kind.computes and at not in groups(ops) for ops in taken.plan.program.ranks for at, op in enumerate(ops)
    )
    assert counted == len(typical(taken)) * 2 * alone > 0
