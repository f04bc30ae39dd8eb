"""`zbc run --resume`: the first step of a run, its state, and its directory afterwards."""

import json
import os
import shlex
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.processes.plans import metrics, run_here, write_plan
from tests.refusals import refused
from zbc.cli import main
from zbc.errors import ZbcError
from zbc.host.linefile import replace_text
from zbc.plan.directory import read_manifest
from zbc.training.checkpoint import folder as disk
from zbc.training.checkpoint import resume as resuming
from zbc.training.checkpoint import together
from zbc.training.checkpoint.files import TensorPart, write_parts
from zbc.training.checkpoint.resume import Start, begun, choose
from zbc.training.launch.board import Board
from zbc.training.launch.launch import RunOptions


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resuming, "RUNS", tmp_path / "runs")


def plan_of(tmp_path, name="plan", **changes):
    tables = {"parallel": {"pp": 2}, "checkpoint": {"every": 2}}
    merged = {key: {**tables.get(key, {}), **changes.get(key, {})} for key in {**tables, **changes}}
    return write_plan(tmp_path, name, **merged)


def weights(checkpoint):
    """All tensors of a checkpoint, by name."""
    return {name: t for file in checkpoint.glob("*.safetensors") for name, t in load_file(file).items()}


def same(a, b):
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def losses(run):
    return [(line["step"], line["loss"]) for line in metrics(run)]


@pytest.mark.long
def test_a_run_goes_on_from_its_newest_checkpoint_as_if_it_had_never_ended(tmp_path):
    plan = plan_of(tmp_path, train={"steps": 6})
    whole = run_here(plan, 2, tmp_path / "whole")
    out = tmp_path / "parts"
    run_here(plan, 2, out, steps=3)
    with (out / "metrics.jsonl").open("a") as file:  # steps that came after the checkpoint, the last cut off
        file.write('{"step": 4, "loss": 0.0}\n{"step": 5, "los')
    disk_before = disk.newest(out / "checkpoints")
    assert f"going on from {disk_before}, after step 3" in run_here(plan, 2, out, resume="auto")[0]
    assert losses(out) == losses(tmp_path / "whole")
    assert same(out / "checkpoints/step-00000006", tmp_path / "whole/checkpoints/step-00000006")
    assert sum("wrote" in line for line in whole) == 3
    about = json.loads((out / "run.json").read_text())
    assert (about["first_step"], [part["first_step"] for part in about["before"]]) == (4, [1])


def worth(output, target):
    return 1 - torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


worth.larger_is_better = True


def test_a_run_ends_when_evaluations_get_no_better_and_keeps_the_best_checkpoint(tmp_path):
    """A checkpoint knows which evaluation was the best, and how many came since."""
    (tmp_path / "text.txt").write_text("".join(chr(97 + i * i % 23) for i in range(4000)))
    tables = {"train": {"steps": 20, "eval_every": 2, "eval_batches": 4, "patience": 2}}
    tables["data"] = {"kind": "text", "path": str(tmp_path / "text.txt"), "validation": 0.2}
    plan = plan_of(tmp_path, **tables, optimizer={"lr": 0.5}, checkpoint={"every": 1, "keep_best": True})
    for out, resume in ((tmp_path / "whole", None), (tmp_path / "parts", tmp_path / "whole/checkpoints/step-00000005")):
        *_, least, end = run_here(plan, 2, out, resume=None if resume is None else str(resume))
        evaluated = [line["eval_loss"] for line in metrics(out) if "eval_loss" in line]
        folders = sorted(disk.complete(out / "checkpoints"))
        assert end.startswith("ended after step 7 (asked by train.patience = 2: no evaluation since step 2 has")
        if resume is None:
            assert len(evaluated) == 3 and min(evaluated) == evaluated[0] and folders == [2, 5, 6, 7]
            assert least == f"least evaluation loss {evaluated[0]:.4f}, after step 2: {out}/checkpoints/step-00000002"
        else:  # in another directory, without the best
            assert len(evaluated) == 1 and least.endswith("after step 2") and folders == [6, 7]
    how = {"every": 50, "keep_best": f"{__name__}:worth"}
    better = plan_of(tmp_path, "better", **tables, optimizer={"lr": 0.01}, checkpoint=how)
    *_, line = run_here(better, 2, tmp_path / "better", steps=5)
    rows = [row for row in metrics(tmp_path / "better") if "eval_metric" in row]
    assert [row["eval_metric"] for row in rows] == pytest.approx([1 - row["eval_loss"] for row in rows], abs=1e-5)
    assert line.startswith(f"best {__name__}:worth {rows[-1]['eval_metric']:.4f}, after step 5: ")
    assert sorted(disk.complete(tmp_path / "better/checkpoints")) == [2, 4, 5]  # each is better than all before
    worse = {"every": 1, "keep_best": "torch.nn.functional:cross_entropy"}
    with refused("E502", "cross_entropy failed") as caught:
        run_here(plan_of(tmp_path, "worse", **tables, checkpoint=worse), 2, tmp_path / "worse")
    assert (
        caught.value.where == "batch 1 of an evaluation, microbatch 1: output float32 [2, 8, 256], target int64 [2, 8]"
    )
    assert sorted(disk.complete(tmp_path / "worse/checkpoints")) == [1]  # nothing is lost


@pytest.mark.long
def test_auto_without_a_checkpoint_begins_anew_and_is_done_when_nothing_is_left(tmp_path, capsys):
    plan, out = plan_of(tmp_path), tmp_path / "run"
    run_here(plan, 2, out, resume="auto")
    assert [step for step, _ in losses(out)] == [1, 2, 3]
    lines = run_here(plan, 2, out, resume="auto")
    assert lines[-1] == "nothing is left to train: the checkpoint has 3 steps, the run 3"
    assert [step for step, _ in losses(out)] == [1, 2, 3]
    with pytest.raises(SystemExit) as left:  # a folder of its own has no step to sum up
        main(["run", str(plan), "--local", "2", "--resume", str(out), "-o", str(tmp_path / "other"), "--json"])
    assert not left.value.code and json.loads(capsys.readouterr().out) == {"run": str(tmp_path / "other")}


def test_what_ranks_leave_may_be_longer_than_a_value_of_the_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    boards = [Board(store, rank, 3) for rank in range(3)]
    texts = ["é" * 5_000_000, "", "x"]
    for board, text in zip(boards, texts, strict=True):
        board.leave("parts", "of the save before" * 10**6)
        board.leave("parts", text)
    assert boards[0].collect("parts") == texts


# ---- where a run begins --------------------------------------------------------------------------------------


def checkpoint(parent, step, *, complete=True, run=""):
    folder = disk.folder_of(parent, step)
    folder.mkdir(parents=True)
    words = dict.fromkeys(("optimizer", "plan", "schedule", "zbc_version", "torch_version"), "x")
    numbers = {"step": step, "samples": 8, "data_samples": 9, "seed": 7, "ranks": 2, "copies": 1}
    about = {"format": disk.FORMAT, "version": disk.VERSION, "run": str(run), "files": {}, "tensors": {}}
    disk.write_index(folder, disk.Index(**words, **numbers, **about))
    if not complete:
        (folder / ".complete").unlink()
    return folder


@pytest.fixture
def place(tmp_path):
    """A plan, and two runs of it; the second has a newer checkpoint that is not complete."""
    plan = plan_of(tmp_path)
    for number in (1, 2):
        run = tmp_path / "runs" / f"plan-{number}"
        checkpoint(run / "checkpoints", 10 * number)
        (run / "run.json").write_text(json.dumps({"launch": f"launch {number}"}))
    checkpoint(tmp_path / "runs/plan-2/checkpoints", 30, complete=False)
    (tmp_path / "runs/plan-3").mkdir()
    return plan


def start(plan, resume=None, **options):
    return choose(RunOptions(plan, resume=resume, **options), read_manifest(plan))


def test_a_run_begins_anew_and_auto_takes_the_newest_run_that_has_a_complete_checkpoint(place, tmp_path):
    run = tmp_path / "runs/plan-2"
    assert start(place) == start(place, "none") == Start()
    assert start(place, "auto") == Start(run / "checkpoints/step-00000020", run)
    assert start(place, "auto", out=tmp_path / "new") == Start(None, tmp_path / "new")


def test_a_restart_goes_on_with_its_own_run_also_before_a_checkpoint(place, tmp_path):
    own, run = {"restarted": True, "launch": "launch 1"}, tmp_path / "runs/plan-1"
    assert start(place, **own) == start(place, "auto", **own) == Start(run / "checkpoints/step-00000010", run)
    assert start(place, str(tmp_path / "runs/plan-2"), **own).checkpoint == run / "checkpoints/step-00000010"
    assert start(place, "none", **own) == Start()
    own, run = {"restarted": True, "launch": "launch 3"}, tmp_path / "runs/plan-3"
    assert start(place, **own) == Start()
    (run / "run.json").write_text(json.dumps({"launch": "launch 3"}))  # before its first checkpoint
    assert start(place, **own) == Start(None, run)
    given = tmp_path / "runs/plan-2/checkpoints/step-00000020"
    assert start(place, str(given), **own) == Start(given, run)


def test_a_restart_of_a_run_that_had_not_begun_does_what_was_asked_first(place, tmp_path):
    own, run = {"restarted": True, "launch": "launch 4"}, tmp_path / "runs/plan-2"
    assert start(place, **own) == Start()
    assert start(place, "auto", **own) == Start(run / "checkpoints/step-00000020", run)
    shared = plan_of(tmp_path, "shared", checkpoint={"dir": str(tmp_path / "shared-checkpoints")})
    checkpoint(tmp_path / "shared-checkpoints", 10)
    with refused("E614"):
        start(shared, **own)  # they are another run's


def test_a_path_is_a_checkpoint_a_run_or_a_folder_of_checkpoints(place, tmp_path):
    run = tmp_path / "runs/plan-2"
    wanted = Start(run / "checkpoints/step-00000020", None)
    assert [start(place, str(path)) for path in (run, run / "checkpoints", wanted.checkpoint)] == [wanted] * 3
    assert start(place, str(run), out=run) == Start(wanted.checkpoint, run)
    for path in ("runs/plan-3", "runs/plan-2/checkpoints/step-00000030", "nowhere"):
        with refused("E612", match="complete checkpoint"):
            start(place, str(tmp_path / path))


def test_a_run_does_not_write_among_later_checkpoints_of_another(place, tmp_path):
    run = tmp_path / "runs/plan-2"
    checkpoint(run / "checkpoints", 15)
    for resume in (None, "none", str(checkpoint(tmp_path / "another", 15))):
        with refused("E614"):
            start(place, resume, out=run)


@pytest.mark.parametrize("own", [False, True])
def test_back_in_a_run_its_later_checkpoints_are_set_aside(place, tmp_path, own):
    """As the error of a damaged one advises. Nothing is lost, and `auto` goes on from what was chosen."""
    run = tmp_path / "runs/plan-2"
    folder = tmp_path / "folder" if own else run / "checkpoints"
    chosen, later = checkpoint(folder, 15), folder / "step-00000020"
    if own:
        checkpoint(folder, 20)
    plan = plan_of(tmp_path, "other", checkpoint={"every": 5, "dir": str(folder)}) if own else place
    advised = shlex.split(disk.damaged(later / "index.json", "damaged").hint)[-1]
    options = RunOptions(plan, out=None if own else run, resume=advised)
    with begun(Board(dist.HashStore(), 0, 1), options, read_manifest(plan), "this run") as found:
        assert found == Start(chosen, None if own else run)
        assert disk.newest(folder) == chosen
        assert later.with_name("step-00000020.aside").is_dir()


def test_a_folder_of_its_own_leads_back_to_the_run(tmp_path):
    own = tmp_path / "own"
    plan = plan_of(tmp_path, checkpoint={"dir": str(own)})
    assert start(plan, "auto") == Start()
    run = tmp_path / "runs/plan-1"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    found = checkpoint(own, 4, run=run)
    assert start(plan, "auto") == Start(found, run)
    with refused("E614"):
        start(plan)


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("somebody else", file=file, flush=True)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(folder):
    """Another process that writes its checkpoints into this folder."""
    command = [sys.executable, "-c", HOLDER, str(folder / together.WRITER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        yield
        holder.kill()
        holder.wait()


def test_two_runs_at_once_do_not_write_into_one_folder(tmp_path, monkeypatch):
    """The lock of a run ends with its process, so it cannot block the next one."""
    monkeypatch.setattr(together, "_PATIENCE_S", 0.3)
    board, folder = Board(dist.HashStore(), 0, 1), tmp_path / "a folder"
    with together.owned(board, folder, "this run"):
        assert (folder / together.WRITER).read_text().split() == ["this", "run"]
    with (
        held(folder),
        pytest.raises(ZbcError, match="another run writes its checkpoints into") as caught,
        together.owned(Board(dist.HashStore(), 0, 1), folder, "this run"),
    ):
        pytest.fail("two runs")
    assert caught.value.code == "E614" and list(caught.value.details) == ["somebody else"]
    with together.owned(Board(dist.HashStore(), 0, 1), folder, "the next"):
        assert (folder / together.WRITER).read_text().split() == ["the", "next"]


def test_a_restart_waits_longer_for_what_its_own_launch_still_holds(tmp_path, monkeypatch):
    """A file server keeps the locks of a lost machine for a while."""
    monkeypatch.setattr(together, "_PATIENCE_S", 0.0)
    asked = iter([False, False, True])
    monkeypatch.setattr(together, "_locked", lambda file: next(asked, False))
    (tmp_path / together.WRITER).write_text("rank 0 of before\nlaunch 1\n")
    with together.owned(Board(dist.HashStore(), 0, 1), tmp_path, "rank 0 of now", "launch 1"):
        assert (tmp_path / together.WRITER).read_text() == "rank 0 of now\nlaunch 1\n"
    for launch in ("launch 2", ""):
        with pytest.raises(ZbcError), together.owned(Board(dist.HashStore(), 0, 1), tmp_path, "another", launch):
            pytest.fail("two runs")


@pytest.mark.parametrize(("run", "step", "begins"), [("plan-2", 40, 40), ("plan-3", 50, 20)])
def test_what_a_run_wrote_as_it_ended_is_where_its_next_begins(place, tmp_path, monkeypatch, run, step, begins):
    """It is asked to end and takes a moment for a last checkpoint; meanwhile the same command is given again, whose
    place is chosen: another run that is newer since does not count."""
    folder = tmp_path / "runs" / run / "checkpoints"

    def locked(file):
        return disk.folder_of(folder, step).exists() or not checkpoint(folder, step)

    monkeypatch.setattr(together, "_locked", locked)
    manifest, board, own = read_manifest(place), Board(dist.HashStore(), 0, 1), tmp_path / "runs/plan-2"
    with begun(board, RunOptions(place, resume="auto"), manifest, "this run") as found:
        assert found == Start(disk.folder_of(own / "checkpoints", begins), own)
        assert disk.newest(folder) == disk.folder_of(folder, step)


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("numbers")
    (tmp_path / together.WRITER).symlink_to(tmp_path / "precious")
    with together.owned(Board(dist.HashStore(), 0, 1), tmp_path, "this run"):
        assert (tmp_path / "precious").read_text() == "numbers"


def test_a_checkpoint_that_is_kept_elsewhere_is_not_deleted_with_the_old_ones(tmp_path):
    kept = checkpoint(tmp_path / "elsewhere", 10)
    (tmp_path / "checkpoints").mkdir()
    disk.folder_of(tmp_path / "checkpoints", 10).symlink_to(kept)
    for step in (20, 30):
        checkpoint(tmp_path / "checkpoints", step)
    disk.prune(tmp_path / "checkpoints", 1, 30)
    assert disk.is_complete(kept) and list(disk.complete(tmp_path / "checkpoints")) == [10, 30]


def test_what_was_renamed_to_be_the_newest_makes_none_go_that_was_written_since(tmp_path):
    for step in (2, 4, 6):
        checkpoint(tmp_path, step)
    disk.folder_of(tmp_path, 2).rename(disk.folder_of(tmp_path, 99))
    disk.prune(tmp_path, 1, 6)
    assert list(disk.complete(tmp_path)) == [6, 99]


def test_a_link_in_place_of_a_file_of_a_checkpoint_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("numbers")
    (tmp_path / "step").mkdir()
    for part in (".rank-0000.safetensors.part", f".index.json.part-{os.getpid()}"):
        (tmp_path / "step" / part).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        write_parts(tmp_path / "step", 0, [TensorPart("a", (3,), 0, torch.ones(3))])
    with pytest.raises(OSError, match="symbolic links"):
        replace_text(tmp_path / "step/index.json", "{}")
    assert (tmp_path / "precious").read_text() == "numbers"


def test_what_a_killed_start_has_left_in_the_folder_goes_with_the_next_one(tmp_path):
    for name in (".shared-0a1b", ".shared-0a1b-3"):
        (tmp_path / name).write_text("written by rank 0")
    together.try_out(Board(dist.HashStore(), 0, 1), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_old_checkpoints_go_when_newer_ones_are_complete(tmp_path):
    for step in (1, 2, 3, 5):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 4, complete=False)
    checkpoint(tmp_path, 6, complete=False)
    (tmp_path / "notes").mkdir()
    disk.prune(tmp_path, 2, 5)
    assert sorted(os.listdir(tmp_path)) == ["notes", "step-00000003", "step-00000005", "step-00000006"]
    assert disk.newest(tmp_path).name == "step-00000005"
