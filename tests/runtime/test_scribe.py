"""What a thread does beside a rank is done in order, not put off without end, and not lost when the process ends."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from zbc.training.recording.scribe import Scribe


@pytest.fixture
def scribe():
    one = Scribe()
    yield one
    one.close()


def test_work_is_done_in_its_order_beside_the_caller(scribe):
    done = []
    for number in range(300):
        scribe.add(lambda number=number: done.append((number, threading.get_ident())))
    scribe.flush()
    assert [number for number, _ in done] == list(range(300))
    assert {thread for _, thread in done} == {scribe._thread.ident} != {threading.get_ident()}


def test_who_adds_more_than_can_be_put_off_waits(scribe):
    hold, waits, added, flush = threading.Event(), threading.Event(), [], scribe.flush

    def add():
        scribe.add(hold.wait)
        for number in range(1000):
            scribe.add(lambda: None)
            added.append(number)

    scribe.flush = lambda: (waits.set(), flush())
    rank = threading.Thread(target=add)
    rank.start()
    assert waits.wait(30) and 0 < len(added) < 100
    hold.set()
    rank.join()
    assert len(added) == 1000


def test_what_went_wrong_is_raised_where_the_next_is_added_and_nothing_is_done_behind_it(scribe):
    done = []
    scribe.add(lambda: 1 / 0)
    scribe.add(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError):
        scribe.flush()
    with pytest.raises(ZeroDivisionError):
        scribe.add(lambda: done.append(2))
    assert not done


def test_closing_does_what_is_left_and_ends_the_thread():
    done, hold, scribe = [], threading.Event(), Scribe()
    scribe.add(hold.wait)
    scribe.add(lambda: done.append(1))
    hold.set()
    scribe.close()
    assert done == [1] and not scribe._thread.is_alive()


def test_a_process_that_ends_by_an_error_has_written_down_all_it_recorded():
    code = (
        "import time; from zbc.training.recording.scribe import Scribe; one = Scribe()\n"
        "for i in range(3): one.add(lambda i=i: (time.sleep(0.05), print(i, flush=True)))\n"
        "raise SystemExit(7)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.split()) == (7, ["0", "1", "2"])
