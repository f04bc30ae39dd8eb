"""Signals that reach all processes of a run, not the command alone, and a terminal that is closed under it."""

import os
import pty
import signal
import subprocess
import sys
import threading

import pytest

from tests.limits import until
from tests.processes.plans import metrics, write_plan
from zbc.training.checkpoint import folder as disk


@pytest.fixture
def command(tmp_path, out):
    plan = write_plan(tmp_path, parallel={"pp": 2}, train={"steps": 10**6}, checkpoint={"every": 10**5})
    return [sys.executable, "-m", "zbc", "run", str(plan), "--local", "2", "-o", str(out)]


def has_signals_as_they_are():
    """Restores the signals that nohup, under which this suite may run, ignores."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)


def begin(command, **options):
    return subprocess.Popen(command, start_new_session=True, preexec_fn=has_signals_as_they_are, **options)


def has_steps(out, count):
    return (out / "metrics.jsonl").exists() and len(metrics(out)) >= count


def saved(out):
    return disk.newest(out / "checkpoints") == disk.folder_of(out / "checkpoints", len(metrics(out)))


@pytest.mark.repeats
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_all_processes_of_a_run_ends_it_in_order(command, out, number):
    with begin(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        until(lambda: has_steps(out, 2))
        os.killpg(run.pid, number)
        shown, said = run.communicate(timeout=60)
    assert (run.returncode, said) == (130, "")
    asked = f"stopped after step {len(metrics(out))} (asked by {number.name})"
    assert shown.endswith(f"{asked}; resume with --resume {out / 'checkpoints'}\n")
    assert saved(out)


@pytest.mark.repeats
def test_a_terminal_that_is_closed_ends_a_run_in_order(command, out):
    terminal, side = pty.openpty()
    with begin([sys.executable, "-c", TAKE_TERMINAL, *command], stdin=side, stdout=side, stderr=side) as run:
        os.close(side)
        reader = threading.Thread(target=read_until_closed, args=(terminal, lambda: has_steps(out, 2)))
        reader.start()
        reader.join(60)
        assert run.wait(60) == 130
    assert saved(out)


TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def read_until_closed(terminal, over):
    while not over():
        os.read(terminal, 4096)
    os.close(terminal)
