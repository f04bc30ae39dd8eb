"""The watchdog reports a run without progress, once, and no other run."""

import os
import socket
import subprocess
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from tests.limits import until
from tests.refusals import error_of
from tests.threads import side_by_side
from zbc.runtime.core.progress import Progress
from zbc.topology import Topology
from zbc.training.launch.board import Beat, Board, Heard
from zbc.training.watchdog import Outages, Retrying, Watchdog, watch_siblings


class Ends:
    def __init__(self):
        self.errors, self.orphaned, self.any = [], [], threading.Event()

    def hung(self, error):
        self.errors.append(error)
        self.any.set()

    def leave(self, code):
        self.orphaned.append(code)
        self.any.set()


def make(rank=0, ranks=2, limit=10.0, store=None):
    store, ends = store or dist.HashStore(), Ends()
    board = lambda: Board(store, rank, ranks)  # noqa: E731
    return Watchdog(board, rank=rank, ranks=ranks, limit=limit, hung=ends.hung, orphaned=ends.leave), ends


def in_op(op, *, since, waiting=False, step=16, index=83, total=120):
    return Progress(step=step, index=index, total=total, op=op, waiting=waiting, since=since)


def beat(op, *, seconds=0.0, waiting=False, count=1, total=120):
    return Beat(count, 16, 79, total, op, waiting, seconds)


@pytest.fixture
def watchdog():
    """Rank 0 of 2, which has waited for 11 of the 10 seconds allowed; `now` is 100."""
    dog, _ = make()
    dog._awake_since = 0.0
    dog.watch(Progress())
    dog._progress = in_op("RECV_B s5 m3 <r1", since=89.0, waiting=True)
    return dog


def hear(dog, beat, at, looked=100.0):
    dog._listener.heard, dog._listener.looked = {0: Heard(beat_of_own(), looked), 1: Heard(beat, at)}, looked


def beat_of_own():
    return beat("RECV_B s5 m3 <r1", seconds=11.0, waiting=True)


@pytest.mark.parametrize(
    ("seconds", "at", "own", "awake", "stuck"),
    [
        (9.0, 99.0, 89.0, 0.0, True),  # in its op for ten seconds
        (0.5, 99.0, 89.0, 0.0, False),  # began an op two seconds ago
        (0.5, 89.0, 89.0, 0.0, True),  # began one when it was last heard, eleven seconds ago
        (50.0, 99.0, 92.0, 0.0, False),  # the rank goes on itself
        (50.0, 99.9, 89.0, 99.5, False),  # the process was stopped itself, and blames nobody
        (0.1, 89.0, 89.0, 99.5, False),
    ],
)
def test_a_run_stands_still_only_if_no_rank_has_begun_an_op(watchdog, seconds, at, own, awake, stuck):
    watchdog._awake_since, watchdog._progress.since = awake, own
    hear(watchdog, beat("F s1 m6", seconds=seconds), at)
    assert watchdog._stuck(100.0) is stuck
    assert ("not responding" in watchdog.rows(100.0)[0][1]) is (at < 90 and not awake)


def late_listener():
    """Rank 0 of 2 at 99 s, under a watchdog of two seconds: rank 1 was stopped at 97, which was reported at 98.7."""
    dog, ends = make(limit=2.0)
    dog._awake_since = 0.0
    dog.watch(Progress())
    dog._progress = in_op("RECV_B s5 m3 <r1", since=97.0, waiting=True)
    hear(dog, beat("F s1 m6", seconds=0.1), 98.7, looked=98.9)
    return dog, ends


def test_a_rank_whose_last_sign_of_life_was_heard_late_is_not_taken_for_one_that_stands_still():
    dog, ends = late_listener()
    assert not dog._stuck(99.1)
    for looked, stuck in ((100.1, False), (100.3, True)):
        hear(dog, beat("F s1 m6", seconds=0.1), 98.7, looked=looked)
        assert dog._stuck(100.4) is stuck  # it counts how long nothing was seen, not when that is thought of
    assert dog._report(100.4)
    row, mute = ends.errors[0].details[1:]
    assert "not responding (last heard " in row and mute.startswith("rank 1 cannot say where it is: it was stopped")


def test_a_rank_that_says_itself_that_it_stands_still_is_not_waited_for():
    dog, _ = late_listener()
    hear(dog, beat("F s1 m6", seconds=1.7), 98.7, looked=98.9)
    assert dog._stuck(99.1)


def test_where_nothing_is_heard_any_more_what_was_heard_before_has_to_do():
    dog, _ = late_listener()
    assert not dog._stuck(108.0) and dog._stuck(109.0)  # the last look is ten seconds old
    dog._listener.looked = 109.0  # but it shows nothing new, of oneself neither
    assert not dog._stuck(108.0) and dog._stuck(109.0) and dog.silent() == []


def test_a_rank_that_leaves_the_report_to_another_goes_on_beating():
    store = dist.HashStore()
    dog, ends = make(0, 2, limit=0.3, store=store)
    other = Board(store, 1, 2)
    assert other.claim()
    dog._listener.start = lambda: None  # it has not heard of that yet
    dog.start()
    dog.watch(in_op("VALIDATE", since=0.0, waiting=True))
    until(lambda: other.stacks([0]))
    beats = other.beats()[0].count
    until(lambda: other.beats()[0].count >= beats + 3)
    dog._listener.reported = 7
    assert ends.any.wait(20)
    dog._done.set()
    dog._thread.join(20)
    assert ends.orphaned and not ends.errors


def test_building_a_model_may_take_longer_than_an_op():
    dog, _ = make(limit=10.0)
    dog.phase("building its stages")
    began = dog._progress.since
    assert not dog._stuck(began + 59.0)
    assert dog._stuck(began + 61.0)


def test_a_rank_that_is_stopped_while_a_run_starts_is_found_after_the_time_of_the_watchdog():
    dog, ends = make(limit=30.0)
    dog._awake_since = 0.0
    dog.phase("waiting for all ranks to build their stages", waiting=True)
    dog._progress.since = 20.0
    building = beat("building its stages", total=0, seconds=5.0)
    hear(dog, building, at=100.0, looked=129.0)
    assert not dog._stuck(129.0) and dog._stuck(131.0)  # silent for more than thirty seconds
    assert dog._report(131.0)
    (error,) = ends.errors
    assert error.message.startswith("run: no progress for 30 s while starting") and "not responding" in error.details[1]
    hear(dog, building, at=100.0, looked=100.0)
    assert not dog._stuck(129.0) and dog._stuck(131.0)  # nor does the store: the rank that has it may be the one
    hear(dog, building, at=130.0, looked=131.0)
    assert not dog._stuck(131.0)  # it builds, and says so


def test_the_rank_at_work_holds_up_the_one_that_waits(watchdog):
    hear(watchdog, beat("F s1 m6", seconds=9.8), 99.5)
    rows, culprits = watchdog.rows(100.0)
    assert culprits == [1]
    assert [*rows.values()] == [
        "rank 0  op  83/120  RECV_B s5 m3 <r1  waiting 11.0 s",
        "rank 1  op  79/120  F s1 m6           running 10.3 s",
    ]


def test_a_silent_rank_is_to_blame_whatever_it_said_last(watchdog, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    hear(watchdog, beat("VALIDATE", seconds=0.5, waiting=True), 89.0)
    rows, culprits = watchdog.rows()
    assert culprits == [1] and rows[1].endswith("not responding (last heard 11.0 s ago)")
    watchdog._listener.heard = {0: Heard(beat_of_own(), 89.0), 1: Heard(beat("F s1 m6"), 89.0)}
    assert watchdog.silent() == []  # nothing is heard of oneself either: the store does not answer


def test_ranks_that_were_never_heard_and_ranks_outside_of_steps_have_a_line(watchdog):
    watchdog.ranks = 3
    hear(watchdog, beat("building its stages", total=0, seconds=20.0), 100.0)
    rows, culprits = watchdog.rows(100.0)
    assert rows[1] == "rank 1  outside of a step  building its stages  running 20.0 s"
    assert rows[2] == "rank 2  never heard of" and culprits == [2]


def test_a_rank_that_fails_itself_is_not_ended_by_its_watchdog():
    store = dist.HashStore()
    dog, ends = make(0, 2, limit=0.3, store=store)
    dog.standing_down = True
    dog.start()
    dog.watch(in_op("F s0 m0", since=0.0))
    other = Board(store, 1, 2)
    other.claim()
    other.report(6)
    assert dog.await_report() == 6  # the watchdog has heard of it
    beats = Board(store, 1, 2).beats()[0].count
    until(lambda: Board(store, 1, 2).beats()[0].count >= beats + 3)
    dog.stop()
    assert not ends.orphaned and not ends.errors


class Deaf:
    """A store that does not answer."""

    def __init__(self):
        self.freed = threading.Event()

    def __getattr__(self, name):
        def call(*args):
            self.freed.wait()
            raise RuntimeError("gone")

        return call


class Mortal:
    def __init__(self):
        self.store, self.dead = dist.HashStore(), threading.Event()

    def __getattr__(self, name):
        def call(*args):
            if self.dead.is_set():
                raise RuntimeError("Connection reset by peer")
            return getattr(self.store, name)(*args)

        return call


def test_ranks_whose_store_is_gone_end_and_the_first_says_why(monkeypatch):
    monkeypatch.setattr("zbc.training.watchdog._ALONE_S", 0.1)
    store = Mortal()
    dogs = [make(rank, 3, limit=60.0, store=store) for rank in range(3)]
    for rank, (dog, _) in enumerate(dogs):
        dog.tick = dog._listener._tick = 0.1
        dog.start()
        dog.watch(in_op("F s0 m0", since=0.0))
        if rank == 2:
            dog.nearly_done = True
    until(lambda: all(len(dog._listener.heard) == 3 for dog, _ in dogs))
    store.dead.set()
    (_, first), (_, second), (last, third) = dogs
    assert first.any.wait(20) and second.any.wait(20)
    (error,) = first.errors
    assert error.code == "E702" and error.message == "run: the store of the run is gone, so its ranks cannot meet again"
    assert second.orphaned == [7] and not second.errors
    until(lambda: last._listener.cut_off)
    assert not third.any.is_set()  # has met the others for the last time
    for dog, _ in dogs:
        dog.stop()


# ---- the board -----------------------------------------------------------------------------------------------


def test_all_that_differs_is_told_and_what_only_some_speak_of_is_compared_among_them():
    store, said = (
        dist.HashStore(),
        (
            {"plan id": "a", "Python version": "3.11.4", "the code of mine": "1f"},
            {"plan id": "a", "Python version": "3.12.0"},
            {"plan id": "a", "Python version": "3.11.4", "the code of mine": "2e", "the code of data": "3d"},
        ),
    )
    agree = [partial(Board(store, rank, 3).agree, mine, timedelta(seconds=20)) for rank, mine in enumerate(said)]
    error, *_ = side_by_side(3, lambda rank: error_of(agree[rank]))
    assert error.message == "run: the ranks differ in Python version: rank 1 has 3.12.0, the others 3.11.4"
    assert error.details == ("and in the code of mine: rank 2 has 2e, the others 1f",)


def test_the_first_reason_to_stop_is_kept():
    board = Board(dist.HashStore(), 0, 1)
    assert board.stop_reason() is None
    board.ask_stop("SIGTERM")
    board.ask_stop("SIGINT")
    assert board.stop_reason() == "SIGTERM"


# ---- machines ------------------------------------------------------------------------------------------------

HOSTS = ("node-1", "node-1", "node-2", "node-2")


def heard_at(*times):
    return {rank: Heard(beat("F s0 m0"), at) for rank, at in enumerate(times)}


BACK, HEARS = "node-2 is heard again, after 28 s", "this machine (node-2) hears the others again, after 24 s"
GONE = ["nothing from node-2 for 10 s"]
NOBODY = "reaches nobody: nothing from the others for 10 s"
OUTAGES = [  # a rank; its looks: when each rank was heard, since when it is awake itself, and now; what it says
    (0, [((now, now, 100.0, 98.0), 0.0, now) for now in (105.0, 109.9, 110.1, 120.0)], GONE),  # once
    (0, [((115.0, 115.0, 100.0, 98.0), 0.0, 115.0), ((130.0, 130.0, 128.0, 128.0), 0.0, 130.0)], [*GONE, BACK]),
    (0, [((130.0, 130.0, 100.0, 129.0), 0.0, 130.0)], []),  # one of its ranks is heard
    (0, [((130.0, 130.0, 100.0, 100.0), 125.0, 130.0)], []),  # it stood still itself, and has to listen first
    (0, [((100.0,) * 4, 0.0, 115.0)], [f"this machine (node-1) {NOBODY}"]),  # and nothing of others
    (2, [((100.0,) * 4, 0.0, 115.0), ((124.0,) * 4, 0.0, 125.0)], [f"this machine (node-2) {NOBODY}", HEARS]),
    (1, [((100.0,) * 4, 0.0, 115.0)], []),  # one of a machine is enough
    (2, [((100.0, 100.0, 115.0, 115.0), 0.0, 115.0)], []),  # of other machines the first rank alone speaks
]


@pytest.mark.parametrize(("rank", "looks", "wanted"), OUTAGES)
def test_outages_of_machines_are_told_once_by_one_rank_and_once_when_they_are_over(rank, looks, wanted):
    said = []
    found = Outages(rank, len(HOSTS), HOSTS.__getitem__, said.append)
    for times, awake_since, now in looks:
        found.look(heard_at(*times), awake_since, now)
    assert said == wanted


@pytest.fixture
def apart(monkeypatch):
    """Rank 0 of four on two machines at 100, where the other machine was heard at 80."""
    dog, ends = make(ranks=4)
    dog._awake_since = 0.0
    dog.watch(Progress())
    dog.placed(HOSTS.__getitem__, Topology(4, host=HOSTS.__getitem__).name, ends.any)
    dog._progress = in_op("RECV_B s5 m3 <r2", since=89.0, waiting=True)
    dog._listener.heard, dog._listener.looked = heard_at(100.0, 100.0, 80.0, 80.0), 100.0
    return dog, ends


def test_a_machine_of_which_nothing_is_heard_is_one_line(apart):
    dog, ends = apart
    assert dog._report(100.0)
    rows = ends.errors[0].details
    places = [row.partition("  ")[0] for row in rows[:3]]
    assert places == ["rank 0 on node-1", "rank 1 on node-1", "node-2 (ranks 2, 3)"]
    assert "  not responding (last heard 20.0 s ago)  " in rows[2]
    assert rows[2].endswith("   <- the machine that holds the others up")
    assert not any("rank 2" in row or "rank 3" in row for row in rows)


def test_where_the_store_does_not_answer_no_arrow_points_at_others(apart, monkeypatch):
    dog, ends = apart
    store = Deaf()
    dog._board = lambda: Board(store, 0, 4)
    monkeypatch.setattr("zbc.training.watchdog._CLAIM_S", 0.1)
    dog._report(100.0)
    store.freed.set()
    (error,) = ends.errors
    assert error.message.endswith(": node-1 reaches nobody") and not any("<- " in row for row in error.details)
    assert error.details[-1].startswith("the store of the run does not answer")


def test_a_sibling_that_a_signal_kills_is_told_of_and_one_that_ends_is_not():
    store, host = dist.HashStore(), "here"
    children = [subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sleep", "0"])]
    processes = [f"{host}:{os.getpid()}", *(f"{host}:{child.pid}" for child in children), "there:1"]
    board = Board(store, 0, 4)
    watch_siblings(dict(enumerate(processes)), 0, lambda: Board(store, 0, 4))
    children[0].kill()
    until(board.killed)
    assert board.killed() == {1: "SIGKILL"}
    for child in children:
        child.wait()
    assert board.killed() == {1: "SIGKILL"}


def test_connections_of_this_process_try_again_each_second_where_the_kernel_can():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as end:
        try:
            end.setsockopt(socket.IPPROTO_TCP, 44, 2000)
        except OSError:
            pytest.skip("this kernel has no TCP_RTO_MAX_MS")
        Retrying(600.0).look()
        assert end.getsockopt(socket.IPPROTO_TCP, 44) == 1000
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 600_000
