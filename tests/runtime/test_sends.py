"""Sends in progress: all are waited for at the end of a step, by any thread, and the first failure is reported."""

import threading
import weakref
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.threads import side_by_side
from zbc.errors import ZbcError
from zbc.runtime.transports.background import EventSends, ThreadSends

TENSOR = torch.zeros(1)
LIMIT = 20  # seconds; only a hang takes as long


class Work:
    """A send that is delivered, or fails, when its gate opens; `begun`: it is waited for."""

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
    """Sends whose thread waits for a first one that the test has to release."""
    with sending() as sends:
        first = Work(open_=False)
        sends.add(first, TENSOR, lost("first"))
        if not first.begun.wait(LIMIT):
            pytest.fail("the thread does not wait for what was sent")
        yield sends, first
        first.gate.set()


def test_draining_does_not_end_before_what_the_thread_waits_for(held):
    sends, first = held
    second = Work()
    sends.add(second, TENSOR, lost("second"))
    threading.Timer(0.05, first.gate.set).start()
    sends.drain()
    assert first.gate.is_set() and (first.waits, second.waits) == (1, 1)


def test_a_failure_found_while_draining_is_told_then_and_ever_after(held):
    sends, first = held
    sends.add(Work(fails=True), TENSOR, lost("second"))
    first.gate.set()
    for call in (sends.drain, lambda: sends.add(Work(), TENSOR, lost("third"))):
        with pytest.raises(ZbcError, match="second gone"):
            call()


def test_a_failure_that_the_thread_found_is_told_by_the_next_drain():
    with sending() as sends:
        sends.add(Work(fails=True), TENSOR, lost("one"))
        with pytest.raises(ZbcError, match="one gone"):
            sends.drain()


class Event:
    """A send as in NCCL: it completes with the device, failed or not, and `wait` never raises."""

    def __init__(self, error=None):
        self.done, self.error, self.waits = False, error, 0

    def is_completed(self):
        return self.done

    def exception(self):
        return self.error if self.done else None

    def wait(self):
        self.waits += 1


def test_a_tensor_is_held_until_the_device_has_sent_it():
    sends, (first, second) = EventSends(), (Event(), Event())
    tensors = [torch.zeros(1), torch.zeros(1)]
    gone = [weakref.ref(tensor) for tensor in tensors]
    for work in (first, second):
        sends.add(work, tensors.pop(0), lost("one"))
    sends.add(Event(), TENSOR, lost("one"))
    assert all(ref() is not None for ref in gone)
    first.done = True
    sends.add(Event(), TENSOR, lost("one"))
    assert gone[0]() is None and gone[1]() is not None


def test_a_send_that_failed_is_a_failure_though_it_is_done():
    sends, work = EventSends(), Event(RuntimeError("gone"))
    sends.add(work, TENSOR, lost("first"))
    sends.add(Event(), TENSOR, lost("second"))  # nobody knows yet
    work.done = True
    with pytest.raises(ZbcError, match=r"E702.*first gone"):
        sends.add(Event(), TENSOR, lost("third"))


def test_draining_makes_the_stream_wait_and_tells_of_failures_that_are_known():
    sends, works = EventSends(), [Event(), Event(RuntimeError("gone"))]
    for work, name in zip(works, ("first", "second"), strict=True):
        sends.add(work, TENSOR, lost(name))
    works[1].done = True
    with pytest.raises(ZbcError, match="second gone"):
        sends.drain()
    assert [work.waits for work in works] == [1, 1]


def test_what_a_gloo_send_says_of_its_failure_is_understood():
    """The only real work objects that fail on this machine."""
    store = dist.HashStore()
    groups = side_by_side(2, lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=1)))
    work = groups[0].recv([torch.zeros(1)], 1, 0)
    with pytest.raises(RuntimeError):
        work.wait()
    sends = EventSends()
    sends.add(work, TENSOR, lost("one"))
    with pytest.raises(ZbcError, match=r"E702.*one"):
        sends.add(Event(), TENSOR, lost("two"))
