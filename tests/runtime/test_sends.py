"""Sends under way: all are waited for at the end of a step, by whoever comes to them, and the first failure is told."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from zbc.errors import ZbcError
from zbc.runtime.sends import ThreadSends

TENSOR = torch.zeros(1)
LIMIT = 20  # seconds; only a hang takes as long


class Work:
    """A send that is delivered, or fails, when its gate opens; `begun` says that somebody waits for it."""

    def __init__(self, *, fails=False, open_=True):
        self.fails, self.begun, self.gate = fails, threading.Event(), threading.Event()
        self.waits = 0
        if open_:
            self.gate.set()

    def wait(self):
        self.waits += 1
        self.begun.set()
        if not self.gate.wait(LIMIT):
            raise AssertionError("nobody opened the gate")
        if self.fails:
            raise RuntimeError("gone")


def lost(name):
    return lambda error: ZbcError("E702", f"run: {name} {error}")


@contextmanager
def sending():
    sends = ThreadSends()
    try:
        yield sends
    finally:
        sends.close()


@pytest.fixture
def held():
    """Sends whose thread waits for a first one that the test has to let go."""
    with sending() as sends:
        first = Work(open_=False)
        sends.add(first, TENSOR, lost("first"))
        if not first.begun.wait(LIMIT):
            pytest.fail("the thread does not wait for what was sent")
        yield sends, first
        first.gate.set()


def draining(sends):
    """Drain on a thread; what it raised, if it did, comes into the list when it is over."""
    found = []

    def drain():
        try:
            sends.drain()
        except ZbcError as error:
            found.append(str(error))

    thread = threading.Thread(target=drain)
    thread.start()
    return thread, found


def test_draining_waits_for_every_send_once():
    with sending() as sends:
        for _ in range(3):
            works = [Work() for _ in range(50)]
            for work in works:
                sends.add(work, TENSOR, lost("one"))
            sends.drain()
            assert [work.waits for work in works] == [1] * 50


def test_draining_does_not_end_before_what_the_thread_waits_for(held):
    sends, first = held
    second = Work()
    sends.add(second, TENSOR, lost("second"))
    thread, found = draining(sends)
    assert second.begun.wait(LIMIT) and thread.is_alive()
    first.gate.set()
    thread.join(LIMIT)
    assert not thread.is_alive() and not found and (first.waits, second.waits) == (1, 1)


def test_of_two_failures_the_first_send_is_named(held):
    sends, first = held
    first.fails, second = True, Work(fails=True)
    sends.add(second, TENSOR, lost("second"))
    thread, found = draining(sends)
    assert second.begun.wait(LIMIT)
    first.gate.set()
    thread.join(LIMIT)
    assert len(found) == 1 and "first gone" in found[0]


def test_a_failure_found_while_draining_is_told_then_and_ever_after(held):
    sends, first = held
    sends.add(Work(fails=True), TENSOR, lost("second"))
    thread, found = draining(sends)
    first.gate.set()
    thread.join(LIMIT)
    assert len(found) == 1 and "second gone" in found[0]
    for call in (sends.drain, lambda: sends.add(Work(), TENSOR, lost("third"))):
        with pytest.raises(ZbcError, match="second gone"):
            call()


def test_a_failure_that_the_thread_found_is_told_by_the_next_drain():
    with sending() as sends:
        work = Work(fails=True)
        sends.add(work, TENSOR, lost("one"))
        with pytest.raises(ZbcError, match="one gone"):
            sends.drain()
