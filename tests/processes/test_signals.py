"""The first signal asks a run to end, a later one forces it, and both work with a blocked main thread."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from zbc.host.signals import Signals


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
    command = [sys.executable, "-c", code]
    ended = [subprocess.run(command, capture_output=True, text=True, start_new_session=own) for own in (False, True)]
    assert [one.stdout.strip() for one in ended] == ["True", "False"]


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
