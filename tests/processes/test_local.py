"""`zbc run --local`: it trains, and any failure of one rank ends all and is reported with its place."""

import json
import multiprocessing
import os
import re
import signal
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.limits import until
from tests.processes.leftovers import alive
from tests.processes.plans import (
    at_step,
    metrics,
    processes,
    run_here,
    threads,
    troubled,
    write_plan,
    write_program,
    write_troubled_plan,
)
from tests.refusals import error_of, refused
from tests.runtime.small_plans import reference
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.errors import ZbcError
from zbc.host.cores import cores
from zbc.plan.directory import StoredPlan
from zbc.plan.headline import headline
from zbc.training.checkpoint import folder as disk
from zbc.training.launch import local
from zbc.training.launch.board import Board
from zbc.training.launch.forking import fork_server

QUICK = {"watchdog_s": 2.0, "steps": 10**6}


# ---- it trains -----------------------------------------------------------------------------------------------


def test_a_run_shows_and_writes_the_losses_of_one_process(tmp_path, out):
    plan = write_plan(tmp_path, schedule={"kind": "zb-h1"}, optimizer={"lr": 0.01, "clip_grad_norm": 1.0})
    lines = run_here(plan, 4, out)
    with threads(max(1, cores() // 4)):  # as many as each rank: sums depend on it
        expected = reference(StoredPlan.read(plan), 3)
    found = metrics(out)
    assert [row["step"] for row in found] == [1, 2, 3]
    assert [row["loss"] for row in found] == expected.losses
    assert [row["grad_norm"] for row in found] == pytest.approx(expected.norms, rel=1e-12)
    for row in found:
        assert row["lr"] == 0.01 and row["skipped"] is False
        assert row["tokens_per_s"] == pytest.approx(4 * 2 * 8 / row["step_ms"] * 1e3)
        assert row["bubble_rate_makespan"] == pytest.approx(1 - max(row["busy_ms"]) / row["step_ms"])
        assert len(row["peak_bytes"]) == 4 and min(row["peak_bytes"]) > 2**20
    head, *steps = lines
    assert head.startswith("zb-h1 on 4 cpu ranks, 4 microbatches of 2, 3 steps") and str(out) in head
    assert [line.split()[:4] for line in steps] == [
        ["step", f"{row['step']}/3", "loss", f"{row['loss']:.4f}"] for row in found
    ]


@pytest.mark.long
def test_a_run_says_what_it_is_in_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = write_plan(tmp_path, parallel={"pp": 1})
    for _ in range(2):
        run_here(plan, 1, None, steps=1)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["plan-1", "plan-2"]
    about = json.loads((tmp_path / "runs/plan-2/run.json").read_text())
    manifest = StoredPlan.read(plan).manifest
    assert about["plan"] == manifest.id and about["schedule"] == "1f1b" and about["steps"] == 1
    assert about["predicted"] == {**manifest.predicted, **headline(manifest)}
    assert about["training"] == manifest.training
    assert len(metrics(tmp_path / "runs/plan-2")) == 1


# ---- asked to stop -------------------------------------------------------------------------------------------


@pytest.fixture
def hangup():
    """Restores SIGHUP, which is ignored under nohup, where this suite may run; zbc leaves an ignored SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


ASKED = [(signal.SIGINT, "before-step"), (signal.SIGTERM, "post-validate"), (signal.SIGHUP, "before-step")]


@pytest.mark.always("2-before-step")
@pytest.mark.long
@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize(("number", "sync"), few(ASKED, (signal.SIGINT, signal.SIGTERM)))
def test_a_signal_stops_all_ranks_after_a_step_and_what_they_have_is_saved(tmp_path, out, number, sync):
    tables = {"train": {"steps": 10**6}, "optimizer": {"sync": sync}, "checkpoint": {"every": 10**5}}
    plan, lines = write_plan(tmp_path, parallel={"pp": 2}, **tables), []
    stop = at_step(2, lambda: os.kill(os.getpid(), number))
    with pytest.raises(KeyboardInterrupt):
        run_here(plan, 2, out, each=lambda line: (lines.append(line), stop(line)), max_restarts=1)
    last = len(metrics(out))
    asked = f"stopped after step {last} (asked by {signal.Signals(number).name})"
    assert lines[-1] == f"{asked}; resume with --resume {out / 'checkpoints'}"
    assert sum(line.startswith(f"step {last:7d}/1000000 ") for line in lines) == 1 and 2 <= last < 10**6
    assert disk.newest(out / "checkpoints") == disk.folder_of(out / "checkpoints", last)


@pytest.mark.long
def test_a_second_signal_ends_ranks_that_do_not_come_to_an_end(tmp_path, out):
    plan = write_troubled_plan(tmp_path, "hang", good=8)  # in its third step
    done = threading.Event()

    def interrupt():
        while not done.wait(0.3):  # again and again: the first ones count as one
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_here(plan, 4, out, each=at_step(2, threading.Thread(target=interrupt).start))
    done.set()
    assert len(metrics(out)) == 2


@pytest.mark.long
def test_ranks_do_not_outlive_a_parent_that_is_killed(tmp_path, out):
    plan = write_plan(tmp_path, parallel={"pp": 2}, train={"steps": 10**6})
    mine, theirs = multiprocessing.Pipe()
    parent = fork_server().Process(target=run_and_tell, args=(plan, out, theirs))
    parent.start()
    while not mine.recv().startswith("step "):
        pass
    parent.kill()
    parent.join()
    ranks = processes(out)
    assert len(ranks) == 2
    until(lambda: not any(map(alive, ranks)))


def run_and_tell(plan, out, pipe):
    run_here(plan, 2, out, each=pipe.send)


# ---- a rank fails --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_killed_rank_ends_the_run_and_is_named_with_where_it_was(tmp_path, out):
    plan = write_plan(tmp_path, train={"steps": 10**6})
    error = error_of(run_here, plan, 4, out, each=at_step(3, lambda: os.kill(processes(out)[2], signal.SIGKILL)))
    assert (error.code, error.exit_code) == ("E702", 7)
    assert error.message == "run: rank 2 was killed by SIGKILL"
    assert error.details[0].startswith(("it was last heard in step ", "it was last heard outside of a step: "))


def process(exitcode):
    """The process of a rank as multiprocessing shows it; `exitcode` is None as long as it runs."""
    sentinel, write = os.pipe()  # which can be read from when it has ended
    if exitcode is not None:
        os.write(write, b"x")
    return mock.Mock(exitcode=exitcode, sentinel=sentinel, close=lambda: (os.close(sentinel), os.close(write)))


@pytest.fixture
def ranks():
    """`ranks((exit code or None, messages), ...)` is a parent of such ranks, and the lines that it shows."""
    opened = []

    def make(*ranks, board=None):
        lines, children = [], {}
        for number, (code, said) in enumerate(ranks):
            mine, theirs = multiprocessing.Pipe()
            for one in said:
                theirs.send(one)
            children[number] = local.Child(process(code), mine)
            opened.extend([theirs, mine, children[number].process])
            if code is not None:
                theirs.close()
        return local.Parent(lines.append, board=board, children=children), lines

    yield make
    for one in opened:
        one.close()


def supervised(parent):
    """The error of supervising these ranks."""
    read, write = os.pipe()
    try:
        with pytest.raises(ZbcError) as raised, local._ended(parent):
            local._supervise(parent, read)
    finally:
        os.close(read)
        os.close(write)
    return raised.value.with_traceback(None)


def test_the_lines_of_a_run_that_fails_are_shown_however_late_they_are_read(ranks):
    """Even if the failure of one rank is read as early as the first line of another."""
    failure = ZbcError("E704", "run: step 3 has gradients that are not finite")
    parent, lines = ranks((None, [("line", f"step {n}") for n in (1, 2, 3)]), (None, [("failed", failure)]))
    assert supervised(parent).code == "E704" and lines == ["step 1", "step 2", "step 3"]


def test_a_rank_that_died_is_the_cause_however_late_that_is_seen(ranks):
    """Another rank has reported the lost connection by then."""
    lost = ("failed", ZbcError("E702", "run: rank 0 lost rank 1 at RECV_B s0 m0 <r1"))
    parent, _ = ranks((None, [lost]), (-9, []))
    assert supervised(parent).message == "run: rank 1 was killed by SIGKILL"


@pytest.mark.parametrize("saves", [False, True])
def test_a_rank_that_died_leaves_checkpoints_to_continue_from(ranks, saves):
    parent, _ = ranks((None, []), (-9, []))
    parent.saves = saves
    assert ("--resume auto" in supervised(parent).hint) == saves


def test_ranks_that_left_in_silence_are_not_the_cause(ranks):
    """They exit silently because rank 0 reports the cause, but its lines could not be read."""
    failure = ("failed", ZbcError("E703", "run: rank 0 failed: ValueError: out of luck"))
    board = Board(dist.HashStore(), 0, 2)
    assert board.claim()
    parent, lines = ranks((None, [("line", "step 1"), ("line", "step 2"), failure]), (7, []), board=board)
    assert supervised(parent).code == "E703" and lines == ["step 1", "step 2"]


@pytest.mark.parametrize(("asked", "ends_in"), [("SIGTERM", KeyboardInterrupt), (None, ZbcError)])
def test_a_rank_that_the_terminals_signal_met_before_it_had_begun_is_no_failure(ranks, asked, ends_in):
    parent, _ = ranks((-signal.SIGTERM, []), board=Board(dist.HashStore(), -1, 1))
    parent.asked = asked
    with pytest.raises(ends_in):
        local._bury(parent, 0)


def test_a_store_that_does_not_answer_says_nothing_of_a_rank():
    class Gone(Board):
        def beats(self):
            raise RuntimeError("gone")

    assert local._last_seen(local.Parent(print, board=Gone(dist.HashStore(), 0, 2)), 1) == []
    assert local._last_seen(local.Parent(print, board=Board(dist.HashStore(), 0, 2)), 1) == ["it had not started yet"]


LEAVES = [
    ("raise", "E703", "failed: ValueError: out of luck\n   and out of time\n", "raise ValueError("),
    ("exit", "E702", "ended with exit code 3\n", ""),
    ("leave", "E703", "failed: SystemExit: out of here\n", "sys.exit("),
    ("interrupt", "E703", "failed: KeyboardInterrupt\n", "raise KeyboardInterrupt"),
]


@pytest.mark.long("raise")
@pytest.mark.parametrize(("how", "code", "what", "line"), few(LEAVES, 2), ids=[how for how, *_ in LEAVES])
def test_a_layer_that_ends_its_process_or_wants_to_is_named_with_rank_step_and_op(how, code, what, line, tmp_path, out):
    error = error_of(run_here, write_troubled_plan(tmp_path, how, good=6), 4, out)
    said = error.render()
    assert said.startswith(f"error[{code}] run: rank 2 {what}") and error.exit_code == 7 and len(metrics(out)) == 1
    if how != "exit":
        assert re.search(r"^   while rank 2 ran op .* of step 2: F s2 m2$", said, re.MULTILINE) and line in said
        assert "user_layers.py" in said and "in misbehave" in said
        assert "zbc/training" not in said and "zbc/runtime" not in said


@pytest.mark.long
def test_a_rank_file_edited_after_planning_is_refused_by_its_rank_alone(tmp_path, out):
    plan = write_plan(tmp_path)
    path = plan / "rank-0001.json"
    path.write_text(path.read_text().replace('"F s1 m0"', '"F s1 m1"'))
    error = error_of(run_here, plan, 4, out)
    assert error.code == "E402" and "rank-0001.json" in error.message
    assert not out.exists()


@pytest.mark.repeats
def test_a_rank_that_is_stopped_is_reported_with_the_op_every_rank_is_in(tmp_path, out):
    plan = write_plan(tmp_path, train=QUICK)
    error = error_of(run_here, plan, 4, out, each=at_step(100, lambda: os.kill(processes(out)[1], signal.SIGSTOP)))
    assert (error.code, error.exit_code) == ("E701", 7)
    assert error.message.startswith("run: no progress for 2 s at step ")
    *rows, mute = error.details
    assert mute.startswith("rank 1 cannot say where it is: it was stopped") and len(rows) == 4
    for rank, row in enumerate(rows):
        assert row.startswith(f"rank {rank}  op ") and "/" in row
        assert ("not responding (last heard" in row) == (rank == 1)
        assert row.endswith("<- the rank that holds the others up") == (rank == 1)
        assert rank == 1 or " waiting " in row


def test_a_rank_that_hangs_in_its_own_work_is_the_one_that_holds_the_others_up(tmp_path, out):
    changes = {**troubled("hang", 4), "train": QUICK}
    error = error_of(run_here, write_plan(tmp_path, **changes), 4, out)
    assert error.code == "E701" and error.message.endswith("at step 2")
    (blamed,) = [row for row in error.details if row.endswith("<- the rank that holds the others up")]
    assert blamed.startswith("rank 2  op ") and "F s2 m0" in blamed and " running " in blamed
    stack = "\n".join(error.details[error.details.index("rank 2 is here, innermost call last:") + 1 :])
    assert "in misbehave" in stack and "threading.Event().wait()" in stack
    assert "zbc/training" not in stack and "zbc/runtime" not in stack


DEADLOCK = [  # rank 0 wants the gradient of m0 before it runs m1, rank 1 wants m1 before it gives the gradient of m0
    ["F s0 m0", "SEND_F s0 m0", "RECV_B s0 m0", "BW s0 m0", "F s0 m1", "SEND_F s0 m1", "RECV_B s0 m1", "BW s0 m1"],
    ["RECV_F s1 m0", "RECV_F s1 m1", "F s1 m0", "F s1 m1", "BW s1 m0", "SEND_B s1 m0", "BW s1 m1", "SEND_B s1 m1"],
]


def test_a_plan_that_the_check_calls_a_deadlock_hangs_where_it_says(tmp_path, out):
    ranks = [[*ops, "VALIDATE", f"STEP s{rank}"] for rank, ops in enumerate(DEADLOCK)]
    tables = {"parallel": {"pp": 2}, "schedule": {"microbatches": 2}, "train": {"watchdog_s": 1.0}}
    plan = write_program(tmp_path, ranks, **tables)
    with refused("E201") as proof:
        check_all(StoredPlan.read(plan).program)
    error = error_of(run_here, plan, 2, out)
    assert error.code == "E701" and error.message == "run: no progress for 1 s at step 1"
    first, second, verdict = error.details
    assert "BW s0 m0" in first and " waiting " in first and "<-" not in first
    assert "F s1 m1" in second and " waiting " in second and "<-" not in second
    assert verdict.startswith("every rank waits for another")
    proven = proof.value.render()
    assert "BW s0 m0" in proven and "F s1 m1" in proven


# ---- refused before it starts --------------------------------------------------------------------------------


ROWS = {"threads": True, "forward": Path("rows")}
REFUSED = [  # options of a run of four planned ranks, the error, what is said
    ({"ranks": None, "device": "cpu"}, "E604", "--device is for runs with --local"),
    ({"ranks": None, "threads": True}, "E604", "--threads is for runs with --local"),
    ({"ranks": None, "max_restarts": 3}, "E604", "torchrun --max-restarts 3 ... -m zbc run"),
    ({"threads": True, "max_restarts": 1}, "E604", "cannot be started again"),
    ({"trace": frozenset({0, 3})}, "E109", "asks for step 4, the run has 3"),
    ({"save_adapter": Path("new")}, "E604", "--save-adapter"),
    (ROWS, "E604", "no weights are given"),
    ({**ROWS, "resume": "auto"}, "E604", "no checkpoint was found"),
    ({**ROWS, "resume": "auto", "trace": frozenset({0})}, "E604", "--trace is of a training"),
]


@pytest.mark.long("options7-E604-no checkpoint was found")
@pytest.mark.parametrize(("options", "code", "said"), REFUSED)
def test_what_a_run_cannot_be_asked_is_refused_with_a_way_out_before_it_starts(
    tmp_path, monkeypatch, options, code, said
):
    monkeypatch.chdir(tmp_path)
    error = error_of(run_here, write_plan(tmp_path), **{"ranks": 4, "out": None, **options})
    assert error.code == code and said in error.render() and error.hint
    assert {path.name for path in tmp_path.iterdir()} == {"job.toml", "plan"}


@pytest.mark.parametrize("place", ["a-file", "a-file/below"])
def test_a_run_directory_that_cannot_be_made_is_refused_before_the_first_step(tmp_path, place):
    (tmp_path / "a-file").write_text("")
    error = error_of(run_here, write_plan(tmp_path, parallel={"pp": 1}), 1, tmp_path / place)
    assert (error.code, error.exit_code) == ("E608", 6) and "a-file" in error.message


def test_no_rank_outlives_a_console_that_nobody_reads(tmp_path, out):
    def leave(line):
        if line.startswith("step"):
            raise SystemExit(141)

    with pytest.raises(SystemExit):
        run_here(write_plan(tmp_path, train=QUICK), 4, out, each=leave)
