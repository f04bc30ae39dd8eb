"""Work of a thread next to a rank is done in order, not deferred forever, and not lost when the process ends."""

import subprocess
import sys
import threading

import pytest

from zbc.training.recording.tracing import Scribe


@pytest.fixture
def scribe():
    one = Scribe()
    yield one
    one.close()


def test_a_writer_with_more_than_can_be_put_off_waits(scribe):
    hold, many, added = threading.Event(), threading.Event(), []

    def add():
        scribe.add(hold.wait)
        for number in range(1000):
            scribe.add(lambda: None)
            added.append(number)
            if number == 50:
                many.set()

    rank = threading.Thread(target=add)
    rank.start()
    assert many.wait(30)
    rank.join(0.2)
    assert rank.is_alive() and len(added) < 100
    hold.set()
    rank.join()
    assert len(added) == 1000


def test_what_went_wrong_is_raised_where_the_next_is_added_and_nothing_is_done_behind_it(scribe):
    done, hold = [], threading.Event()
    scribe.add(lambda: hold.wait() and 1 / 0)
    scribe.add(lambda: done.append(1))
    hold.set()
    with pytest.raises(ZeroDivisionError):
        scribe.flush()
    with pytest.raises(ZeroDivisionError):
        scribe.add(lambda: done.append(2))
    assert not done


def test_closing_does_what_is_left_and_ends_the_thread():
    before, done, hold, scribe = threading.active_count(), [], threading.Event(), Scribe()
    scribe.add(hold.wait)
    scribe.add(lambda: done.append(1))
    hold.set()
    scribe.close()
    assert done == [1] and threading.active_count() == before


@pytest.mark.long
def test_a_process_that_ends_by_an_error_has_written_down_all_it_recorded():
    code = (
        "import time; from zbc.training.recording.tracing import Scribe; one = Scribe()\n"
        "for i in range(3): one.add(lambda i=i: (time.sleep(0.05), print(i, flush=True)))\n"
        "raise SystemExit(7)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.split()) == (7, ["0", "1", "2"])
