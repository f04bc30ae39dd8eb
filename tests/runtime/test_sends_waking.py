"""The thread that frees delivered tensors: woken by sends far apart, polling if they are close."""

import threading
from types import SimpleNamespace

import pytest
import torch

from zbc.runtime.transports import sends
from zbc.runtime.transports.sends import ThreadSends


class Work:
    """A send that is delivered at once; `waited`: it was waited for."""

    def __init__(self):
        self.waited = threading.Event()

    def wait(self):
        self.waited.set()


@pytest.fixture
def keeper():
    keeper = ThreadSends()
    yield keeper
    keeper.close()


def lost(error):
    return error


def test_a_send_far_from_others_wakes_the_thread_at_once(keeper, monkeypatch):
    monkeypatch.setattr(sends, "_LOOK_S", 1000.0)
    for _ in range(5):
        work = Work()
        keeper.add(work, torch.zeros(1), lost)
        assert work.waited.wait(10)


def test_where_sends_are_close_the_thread_finds_them_by_itself(keeper, monkeypatch):
    monkeypatch.setattr(keeper, "_closely", lambda: True)
    first = Work()
    keeper.add(first, torch.zeros(1), lost)  # may find the thread asleep
    assert first.waited.wait(10)
    monkeypatch.setattr(keeper._wake, "set", lambda: pytest.fail("woken"))
    for work in [Work() for _ in range(5)]:
        keeper.add(work, torch.zeros(1), lost)
        assert work.waited.wait(10)
    monkeypatch.undo()


def test_sends_are_close_if_many_ended_since_the_last_look(keeper, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(sends, "time", SimpleNamespace(monotonic=lambda: now[0]))
    keeper._since = 0.0
    for passed, ended, close in ((0.01, 6, True), (0.004, 0, True), (0.004, 2, False), (0.01, 5, False)):
        now[0] += passed
        keeper._ended += ended
        assert keeper._closely() is close
    keeper._begun = keeper._ended
