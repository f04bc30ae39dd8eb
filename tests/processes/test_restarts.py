"""`zbc run --local N --max-restarts K`: killed ranks are restarted, and the run ends as an undisturbed one."""

import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.processes.paced import run_on_a_slow_disk, run_paced
from tests.processes.plans import killing, metrics, processes, run_here, write_plan, write_troubled_plan
from tests.refusals import error_of
from zbc.errors import ZbcError
from zbc.training.launch import local
from zbc.training.launch.launch import RunOptions
from zbc.training.train import RankFailed

STEPS = 12


def plan_of(tmp_path, name="plan", **changes):
    tables = {"parallel": {"pp": 2}, "schedule": {"kind": "zb-h1"}, "optimizer": {"lr": 0.01, "clip_grad_norm": 1.0}}
    tables |= {"train": {"steps": STEPS}, "checkpoint": {"every": 2}}
    return write_plan(tmp_path, name, **{**tables, **changes})


def result(out, steps=STEPS):
    """The losses of all steps, and the bytes of the last checkpoint."""
    files = (out / f"checkpoints/step-{steps:08d}").glob("*.safetensors")
    return [(row["step"], row["loss"]) for row in metrics(out)], {file.name: file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run_here(plan_of(folder), 2, folder / "run")
    return result(folder / "run")


def restarts(lines):
    return [line for line in lines if line.startswith("restart ")]


@pytest.mark.long
def test_ranks_killed_while_they_train_leave_no_trace_in_the_result(tmp_path, out, expected):
    victims = {5: 1, 9: 0}  # step -> rank; a save waits for the one before, so that one is complete by then

    lines = run_paced(plan_of(tmp_path), 2, out, each=killing(out, victims), max_restarts=3)
    assert result(out) == expected
    assert [line.partition(", since ")[0] for line in restarts(lines)] == [f"restart {i} of 3" for i in (1, 2)]
    assert restarts(lines)[0].endswith("since rank 1 was killed by SIGKILL")
    assert len([line for line in lines if "going on from" in line]) == 2


@pytest.mark.repeats
def test_ranks_killed_while_a_checkpoint_is_written_leave_no_trace_either(tmp_path, out, expected):
    folder, over = out / "checkpoints", threading.Event()
    killed = []

    def watch():
        seen = set()
        while not over.is_set() and len(killed) < 2:
            for name in {entry.name for entry in folder.glob("step-*")} - seen - {"step-00000002"}:
                seen.add(name)
                if not (folder / name / ".complete").exists():
                    killed.append(name)
                    os.kill(processes(out)[len(killed) % 2], signal.SIGKILL)

    thread = threading.Thread(target=watch)
    thread.start()
    lines = run_on_a_slow_disk(plan_of(tmp_path), 2, out, max_restarts=4)
    over.set()
    thread.join()
    assert killed and len(restarts(lines)) <= len(killed)
    assert result(out) == expected


@pytest.mark.repeats
def test_a_run_without_checkpoints_begins_again(tmp_path, out, expected):
    run_paced(plan_of(tmp_path, checkpoint={}), 2, out, each=killing(out, {3: 1}), max_restarts=1)
    assert [(row["step"], row["loss"]) for row in metrics(out)] == expected[0]


@pytest.mark.repeats
def test_what_fails_every_time_is_tried_as_often_as_asked(tmp_path, out):
    lines, plan = [], write_troubled_plan(tmp_path, "exit", good=6)
    error = error_of(run_here, plan, 4, out, each=lines.append, max_restarts=1)
    assert error.message == "run: rank 2 ended with exit code 3"
    assert restarts(lines) == ["restart 1 of 1, since rank 2 ended with exit code 3"]


@pytest.mark.parametrize(
    ("failure", "again"),
    [
        (ZbcError("E701", "run: no progress"), True),
        (ZbcError("E703", "run: rank 1 failed"), True),
        (RankFailed("Traceback\nRuntimeError: connection reset"), True),
        (ZbcError("E704", "run: step 3 has gradients that are not finite"), False),
        (ZbcError("E501", "data: damaged"), False),
        (ZbcError("E611", "run: the disk is full"), False),
    ],
)
def test_only_what_may_go_well_another_time_is_tried_again(failure, again):
    lines, tried = [], []

    def once(options):
        tried.append(options.restarted)
        if len(tried) == 1:
            raise failure

    with nullcontext() if again else pytest.raises(ZbcError):
        local._run_again(local.Parent(lines.append), RunOptions(Path(), max_restarts=2), once)
    assert tried == [False, True] if again else [False]
    assert [line.partition(", since ")[0] for line in lines] == ["restart 1 of 2"] * again
    assert not again or lines[0].endswith((", since no progress", "rank 1 failed", "RuntimeError: connection reset"))


def test_a_run_that_was_asked_to_stop_is_not_started_again():
    parent, tried = local.Parent(print), []

    def once(options):
        tried.append(options)
        parent.asked = "SIGTERM"
        raise ZbcError("E702", "run: rank 1 was killed by SIGKILL")

    with pytest.raises(ZbcError):
        local._run_again(parent, RunOptions(Path(), max_restarts=2), once)
    assert len(tried) == 1
