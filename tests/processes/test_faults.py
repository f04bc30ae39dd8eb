"""Eleven ways for a run to go wrong. Each ends as docs/runs.md says, and leaves no process and no open port.

SIGKILL                   test_local, test_restarts, test_torchrun
SIGSTOP                   test_local (the report), here (the restart)
full disk                 here, on a small tmpfs where one can be mounted
read-only directory       here
truncated shard           here
edited plan               test_local (a rank file), here (plan.json)
wrong number of ranks     test_local, test_torchrun
gradients that are NaN    here; which step and stage: runtime/test_nonfinite
data that shrink          here
Ctrl-C twice              test_local
out of memory             here; what else says so: runtime/test_leaving
"""

import json
import os
import resource
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch.distributed as dist

from tests.processes.leftovers import alive, forked, ports
from tests.processes.paced import run_paced
from tests.processes.plans import at_step, metrics, processes, run_here, troubled, write_plan, write_troubled_plan
from tests.processes.test_checkpoints import plan_of
from tests.refusals import error_of
from tests.threads import side_by_side
from tests.tiers import few
from zbc.training.checkpoint import folder as disk
from zbc.training.checkpoint.together import try_out
from zbc.training.launch.board import Board


def mounted(folder, *options):
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def small_disk(tmp_path):
    """A folder, a function that fills its disk almost completely, and one that frees the space."""
    folder = tmp_path / "disk"
    if not mounted(folder, "-o", "size=8m"):  # files of the ranks may not grow beyond a few bytes instead

        def limit(pids):
            for pid in pids:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

        yield folder, limit, lambda: None
        return

    def fill(pids):
        free = os.statvfs(folder)
        (folder / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - 8192))

    yield folder, fill, (folder / "filler").unlink
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


@pytest.fixture
def read_only(tmp_path):
    """A folder that nobody can write to, not even root."""
    folder = tmp_path / "disk"
    if mounted(folder, "-o", "ro"):
        yield folder
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)
        return
    folder.chmod(0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("root writes everywhere, and nothing can be mounted here")
    yield folder
    folder.chmod(0o700)


def saving(tmp_path, **changes):
    return plan_of(tmp_path, **{**changes, "train": {"steps": 6, **changes.get("train", {})}})


def test_the_check_for_leftovers_sees_a_run_while_it_lasts(tmp_path, out):
    before, listening = forked(), ports()
    seen = []
    each = at_step(1, lambda: seen.append((len(forked() - before), len(ports() - listening))))
    run_paced(saving(tmp_path, checkpoint={"every": 0}), 2, out, each=each)
    assert seen == [(2, 1)]


@pytest.mark.repeats
def test_a_stopped_rank_is_replaced_when_the_run_may_restart(tmp_path, out):
    plan = saving(tmp_path, train={"watchdog_s": 2.0})
    stop = at_step(5, lambda: os.kill(processes(out)[1], signal.SIGSTOP))
    lines = run_paced(plan, 2, out, each=stop, max_restarts=1)
    assert any(line.startswith("restart 1 of 1, since no progress for 2 s at step ") for line in lines), lines
    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.repeats
def test_a_disk_that_fills_up_ends_the_run_and_leaves_the_checkpoint_before(tmp_path, out, small_disk):
    folder, fill, release = small_disk
    plan = saving(tmp_path, checkpoint={"dir": str(folder)})

    def each(line):
        if line.startswith("wrote"):
            fill(processes(out))

    error = error_of(run_paced, plan, 2, out, each=each, max_restarts=3)
    assert (error.code, error.exit_code) == ("E611", 6)
    assert error.message.startswith(f"run: cannot write {folder / 'step-00000004'}")
    assert f"the newest complete checkpoint is {folder / 'step-00000002'}" in error.details
    assert [row["step"] for row in metrics(out)] in ([1, 2, 3, 4], [1, 2, 3, 4, 5])  # it is written beside steps
    release()
    lines = run_here(plan, 2, out, resume="auto")
    assert f"going on from {folder / 'step-00000002'}, after step 2" in lines[0]
    assert sorted(disk.complete(folder)) == [2, 4, 6]


@pytest.mark.long
@pytest.mark.parametrize("traced", few([frozenset(), frozenset(range(1, 10**5))], bool))
def test_a_run_directory_that_fills_up_ends_the_run_with_every_line_whole(tmp_path, out, small_disk, traced):
    folder, fill, release = small_disk
    plan = write_plan(tmp_path, parallel={"pp": 2}, train={"steps": 10**6})
    run, seen = folder / "run", []
    error = error_of(
        run_here, plan, 2, run, each=at_step(3, lambda: (seen.extend(processes(run)), fill(seen))), trace=traced
    )
    assert (error.code, error.exit_code) == ("E608", 6), error
    assert "cannot write" in error.message and str(run) in error.message and "make room" in error.hint
    steps = [row["step"] for row in metrics(run)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 3
    for path in (run / "trace").glob("rank-*.jsonl"):
        assert all(json.loads(line) for line in path.read_text().splitlines()) and path.read_text().endswith("\n")
    assert not [path for path in run.rglob("*") if ".part" in path.name]
    assert not [pid for pid in seen if alive(pid)]
    release()


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(tmp_path, out, read_only):
    error = error_of(run_here, saving(tmp_path, checkpoint={"dir": str(read_only / "checkpoints")}), 2, out)
    assert (error.code, error.exit_code) == ("E611", 6)
    assert error.message.startswith(f"run: cannot write {read_only / 'checkpoints'}") and "checkpoint.dir" in error.hint
    assert metrics(out) == []


@pytest.mark.repeats
def test_a_run_goes_on_and_saves_where_the_folder_it_was_started_in_is_removed(tmp_path, out):
    here, plan = tmp_path / "here", saving(tmp_path, train={"steps": 10**6}, checkpoint={"every": 20})
    here.mkdir()
    command = [sys.executable, "-m", "zbc", "run", str(plan), "--local", "2", "-o", str(out)]
    with subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        shown = []
        for line in run.stdout:
            shown.append(line.rstrip())
            if line.split()[:2] == ["step", "2/1000000"]:
                here.rmdir()
            if line.startswith("wrote "):
                run.send_signal(signal.SIGINT)
        assert run.wait(30) == 130, shown
    assert any(line.startswith(f"wrote {out / 'checkpoints' / 'step-00000020'}: ") for line in shown)
    assert shown[-1].startswith("stopped after step ")


def test_machines_with_a_folder_each_are_told_so_before_the_first_step(tmp_path):
    for folders in (("one", "one"), ("one", "two")):
        store = dist.HashStore()
        calls = [partial(try_out, Board(store, rank, 2), tmp_path / name) for rank, name in enumerate(folders)]
        if len(set(folders)) == 1:
            side_by_side(2, lambda rank, calls=calls: calls[rank]())
        else:
            errors = side_by_side(2, lambda rank, calls=calls: error_of(calls[rank]))
    for error in errors:
        assert error.code == "E611" and error.message.startswith("run: rank 1 does not see what rank 0 wrote")
    assert list((tmp_path / "one").iterdir()) == []


@pytest.mark.long
def test_a_checkpoint_that_was_cut_off_later_is_refused_and_the_one_before_is_named(tmp_path, out):
    plan = saving(tmp_path)
    run_here(plan, 2, out, steps=4)
    shard = out / "checkpoints/step-00000004/rank-0001.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)
    error = error_of(run_here, plan, 2, out, resume="auto")
    assert (error.code, error.exit_code) == ("E612", 6) and str(shard) in error.message
    assert error.hint == f"go on from the one before: --resume {out / 'checkpoints/step-00000002'}"
    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4]


@pytest.mark.parametrize("policy", few([{"skip_limit": 1}, {"skip_limit": 2}], [{"skip_limit": 2}]))
def test_gradients_that_are_not_finite_end_the_run_as_the_job_says(tmp_path, out, policy):
    changes = troubled("nan", good=8)  # in its third step and ever after
    tables = {"train": {"steps": 9, **policy}, "checkpoint": {"every": 1}, "log": {"every": 100}}
    lines = []
    error = error_of(run_here, write_plan(tmp_path, **changes, **tables), 4, out, each=lines.append, max_restarts=2)
    last = 2 + policy["skip_limit"]
    assert (error.code, error.exit_code) == ("E704", 7)
    assert error.message.startswith(f"run: step {last} has gradients that are not finite")
    assert error.details[0].endswith("for microbatches 0, 1, 2, 3, so it happened in forward")
    assert [row["skipped"] for row in metrics(out)] == [False, False, *[True] * (last - 2)]
    assert len([line for line in lines if "SKIPPED" in line]) == last - 2
    assert not [line for line in lines if line.startswith("restart ")]
    assert max(disk.complete(out / "checkpoints")) == last - 1


@pytest.mark.parametrize("saves", [False, pytest.param(True, marks=pytest.mark.repeats)])
def test_the_step_that_ends_a_run_is_written_down_however_late_rank_0_is(tmp_path, out, saves):
    """Also if the checkpoint of that step fails."""
    changes, folder = troubled("nan", good=8), tmp_path / "checkpoints"
    changes["model"] = {**changes["model"], "family": "tests.processes.user_layers:slow_layers"}
    folder.mkdir()
    (folder / "step-00000002").write_text("in the way")
    tables = {"train": {"steps": 9, "skip_limit": 1}, "checkpoint": {"every": 2 * saves, "dir": str(folder)}}
    error = error_of(run_here, write_plan(tmp_path, **changes, **tables), 4, out)
    assert (error.code, error.exit_code) == (("E611", 6) if saves else ("E704", 7))
    assert [row["skipped"] for row in metrics(out)] == [False, False, True]


@pytest.mark.long
def test_a_rank_without_any_memory_left_still_says_so(tmp_path, out):
    error = error_of(run_here, write_troubled_plan(tmp_path, "eat", good=6), 4, out)
    assert (error.code, error.message) == ("E703", "run: rank 2 is out of memory")
    assert any(
        line.startswith("while rank 2 ran op ") and line.endswith("of step 2: F s2 m2") for line in error.details
    )
    assert "MemoryError" in error.details and any("self.eaten.append" in line for line in error.details)
    assert any(line.startswith("the plan predicts a peak of ") for line in error.details)


@pytest.mark.long
def test_data_that_become_shorter_while_they_are_read_end_the_run(tmp_path, out):
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(bytes(range(256)) * 64)
    data = {"kind": "tokens", "path": str(tokens), "dtype": "uint16"}
    plan = write_plan(tmp_path, model={"vocab": 65536}, data=data, train={"steps": 10**6})
    error = error_of(run_here, plan, 4, out, each=at_step(2, lambda: os.truncate(tokens, 100)), max_restarts=1)
    assert (error.code, error.exit_code) == ("E501", 6)
    assert error.message.startswith(f"data: {tokens} ends at byte 100, token ")
    assert any(line.startswith("while rank ") for line in error.details)
    assert 2 <= len(metrics(out)) < 10**6
