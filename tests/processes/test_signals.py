"""The first signal asks a run to end, a later one forces it; to the command, or to all processes of a run."""

import os
import pty
import signal
import subprocess
import sys
import threading

import pytest

from tests.limits import ended, until
from tests.processes.plans import metrics, write_plan
from zbc.host.signals import Signals
from zbc.training.checkpoint import folder as disk


class Heard:
    def __init__(self):
        self.asked, self.insisted = [], []
        self.first, self.second = threading.Event(), threading.Event()

    def ask(self, name):
        self.asked.append(name)
        self.first.set()

    def insist(self, name):
        self.insisted.append(name)
        self.second.set()


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_is_closed_asks_unless_nohup_has_said_otherwise(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        heard = Heard()
        with Signals(heard.ask, heard.insist):
            os.kill(os.getpid(), signal.SIGHUP)
            assert ignored or heard.first.wait(10)
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard.first.wait(10)
        assert heard.asked == ["SIGTERM" if ignored else "SIGHUP"]
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


SENT = [({"apart": 0.0}, [signal.SIGTERM, signal.SIGINT], ["SIGTERM"], ["SIGINT"])]
SENT += [({"apart": 3600.0}, [signal.SIGINT] * 5, ["SIGINT"], [])]  # repeated by a launcher at once
REPEATED = [signal.SIGINT, signal.SIGINT, signal.SIGTERM]  # a launcher repeats SIGINT late; SIGTERM is the user's
SENT += [({"apart": 0.0, "repeated": True}, REPEATED, ["SIGINT"], ["SIGTERM"])]


@pytest.mark.parametrize(("how", "sent", "asked", "insisted"), SENT)
def test_the_first_signal_asks_and_a_later_one_insists_unless_a_launcher_repeats_it(how, sent, asked, insisted):
    heard = Heard()
    with Signals(heard.ask, heard.insist, **how):
        for number in sent:
            os.kill(os.getpid(), number)
            assert heard.first.wait(10)
        assert not insisted or heard.second.wait(10)
    assert (heard.asked, heard.insisted) == (asked, insisted)


def test_a_launcher_that_gives_ranks_a_session_of_their_own_repeats_nothing():
    code = "from zbc.host.signals import shares_terminal; print(shares_terminal())"
    found = [ended(sys.executable, "-c", code, start_new_session=own) for own in (False, True)]
    assert [one.stdout.strip() for one in found] == ["True", "False"]


def test_a_blocked_main_thread_does_not_keep_a_signal_from_being_heard():
    heard = Heard()
    with Signals(heard.ask, heard.insist):
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        lock = threading.Lock()
        lock.acquire()
        heard.first.set = lock.release  # heard in the thread, while the main thread is in the lock
        timer.start()
        assert lock.acquire(timeout=10)
        timer.join()
    assert heard.asked == ["SIGINT"]


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Signals(print, print):
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_outside_of_the_main_thread_nothing_is_touched():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def run():
        with Signals(print, print):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert seen == [before]


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
