"""`zbc run --local N --threads`: ranks as threads train the same as processes, and end the same way."""

import json
import signal
import subprocess
import sys
import threading

import pytest

from tests.limits import ended, until
from tests.processes.plans import metrics, run_here, write_plan, write_troubled_plan
from tests.refusals import error_of
from zbc.host.contents import contents
from zbc.plan.reading import read_rank
from zbc.training.checkpoint import folder as disk

RANKS = 4


def losses(folder):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in metrics(folder)]


def tensors(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def no_rank_is_left():
    return not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


@pytest.mark.long
@pytest.mark.parametrize("sync", ["before-step", "post-validate"])
def test_threads_train_what_processes_train_to_the_bit(tmp_path, sync):
    optimizer = {"lr": 0.01, "clip_grad_norm": 0.5, "sync": sync}
    saved = {"checkpoint": {"every": 2}, "train": {"steps": 4}}
    plan = write_plan(tmp_path, schedule={"kind": "zb-v"}, model={"layers": 8}, optimizer=optimizer, **saved)
    run_here(plan, RANKS, tmp_path / "a")
    shown = run_here(plan, RANKS, tmp_path / "b", threads=True, trace=frozenset({1}))
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and len(losses(tmp_path / "b")) == 4
    here, there = (tensors(disk.newest(tmp_path / name / "checkpoints")) for name in "ab")
    assert here and here == there
    assert shown[0].startswith("zb-v on 4 cpu ranks") and no_rank_is_left()
    assert len(list((tmp_path / "b" / "trace").glob("*"))) >= RANKS


def test_a_rank_reads_the_manifest_and_its_own_file_only(tmp_path, monkeypatch):
    read, reading = {rank: set() for rank in range(RANKS)}, sys.modules[read_rank.__module__]

    def noted(path, **how):
        if (who := threading.current_thread().name).startswith("rank "):
            read[int(who.removeprefix("rank "))].add(path.name)
        return contents(path, **how)

    monkeypatch.setattr(reading, "contents", noted)
    run_here(write_plan(tmp_path), RANKS, tmp_path / "run", threads=True, steps=1)
    assert all(f"rank-{rank:04d}.json" in names for rank, names in read.items())
    assert all(names <= {"plan.json", f"rank-{rank:04d}.json"} for rank, names in read.items()), read


@pytest.mark.long
def test_a_layer_that_raises_ends_all_ranks_and_is_named(tmp_path):
    plan = write_troubled_plan(tmp_path, "raise", good=5)
    error = error_of(run_here, plan, RANKS, tmp_path / "run", threads=True)
    assert error.code == "E703" and "rank 2 failed: ValueError: out of luck" in error.message
    assert "step 2" in error.details[1]
    until(no_rank_is_left)


WAITING = """
import sys
from datetime import timedelta
from pathlib import Path
from zbc.cli import main
from zbc.errors import ZbcError
from zbc.host.contents import contents
from zbc.training.launch import local

def rank(context):
    if context.place.rank:
        return ZbcError("E509", "model: refused")
    context.place.board().hear("nobody says this", timedelta(60))

local.run_rank, local._LEAVE_S = rank, 0.2
main(["run", sys.argv[1], "--local", "2", "--threads"])
"""


@pytest.mark.long
def test_a_refusal_beside_ranks_that_wait_in_the_store_ends_with_its_code(tmp_path):
    plan = write_plan(tmp_path, parallel={"pp": 2})
    done = ended(sys.executable, "-c", WAITING, str(plan), cwd=tmp_path)
    assert (done.returncode, "E509" in done.stderr, "terminate" in done.stderr) == (6, True, False)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the watchdog's ends so
def test_a_rank_that_hangs_is_found(tmp_path):
    plan = write_troubled_plan(tmp_path, "hang", good=5, train={"watchdog_s": 2.0})
    error = error_of(run_here, plan, RANKS, tmp_path / "run", threads=True)
    assert error.code == "E701" and "rank 2" in str(error.render())


@pytest.mark.long
def test_ctrl_c_ends_the_step_and_the_run(tmp_path):
    plan = write_plan(tmp_path, checkpoint={"every": 10**6}, train={"steps": 10**6})
    command = [sys.executable, "-m", "zbc", "run", str(plan), "--local", str(RANKS), "--threads"]
    with subprocess.Popen([*command, "-o", str(tmp_path / "run")], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step") and line.split()[1].startswith("2/"))
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130 and "stopped after step" in rest
    newest = disk.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.name.endswith(f"{metrics(tmp_path / 'run')[-1]['step']:08d}")


@pytest.mark.long
@pytest.mark.parametrize("threads", [False, True])
def test_a_plan_for_cuda_is_not_trained_on_the_cpu_unless_that_is_said(tmp_path, monkeypatch, threads):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    plan = write_plan(tmp_path, hardware={"device": "cuda"}, train={"steps": 1})
    error = error_of(run_here, plan, RANKS, tmp_path / "run", threads=threads)
    assert error.code == "E603" and "no CUDA device" in error.message and not (tmp_path / "run").exists()
    more = " --threads" if threads else ""
    assert error.hint.endswith(f"--local 4 --device cpu{more}")
    run_here(plan, RANKS, tmp_path / "run", device="cpu", threads=threads)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["device"] == "cpu"
    other = write_plan(tmp_path, "other", train={"steps": 1})
    assert error_of(run_here, other, RANKS, tmp_path / "no", device="cuda", threads=threads).code == "E603"
