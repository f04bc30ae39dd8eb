"""The clock of a GPU, with fake events: the lead of the host, times of ops, and the op at which a rank hangs."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.runtime.small_plans import make_plan, make_program
from tests.threads import run_threads
from zbc.runtime import cuda
from zbc.runtime.core.progress import Progress
from zbc.runtime.cuda import LEAD, CudaClock
from zbc.training.launch.board import Board
from zbc.training.recording import tracing
from zbc.training.watchdog import Heard, Watchdog


class Stream:
    """Items in order: work that takes some ms, gates that a message opens, events."""

    def __init__(self, *, prompt=False):
        self.items, self.now, self.prompt, self.waited = [], 0.0, prompt, 0

    def launch(self, ms):
        self.items.append(ms)

    def wait_for(self, gate):
        """Later items wait until `gate()`."""
        self.items.append(gate)

    def record(self, event):
        event.turn += 1
        self.items.append((event, event.turn))
        if self.prompt:
            self.run()

    def run(self, most=10**9):
        """Runs up to `count` pieces of work, and other items before the next piece."""
        while self.items:
            item = self.items[0]
            if callable(item):
                if not item():
                    return
            elif isinstance(item, tuple):
                event, turn = item
                event.passed, event.at = turn, self.now
            elif most == 0:
                return
            else:
                self.now, most = self.now + item, most - 1
            self.items.pop(0)


class Event:
    def __init__(self):
        self.stream, self.turn, self.passed, self.at = Stream(), 0, 0, 0.0

    def record(self, stream):
        self.stream = stream
        stream.record(self)

    def query(self):
        return self.passed == self.turn  # as CUDA's: true of one that was never recorded

    def synchronize(self):
        self.stream.waited += 1
        self.stream.run()
        if not self.query():
            raise AssertionError("the host waits for what the device cannot do")

    def elapsed_time(self, other):
        assert self.query() and other.query(), "asked of events that have not passed"
        return other.at - self.at


class Rank:
    """The host of a rank and its device; ops are compute ops of 10 ms."""

    def __init__(self, streams, number=0):
        self.stream, self.progress = Stream(), Progress(total=9)
        streams[number] = self.stream
        self.clock = CudaClock(torch.device("cuda", number), self.progress)

    def op(self, index, text="", ms=10, gate=None):
        self.progress.index, self.progress.op, self.progress.since = index, text or f"F s0 m{index}", float(index)
        if gate is not None:
            self.stream.wait_for(gate)
        began = self.clock.start()
        self.stream.launch(ms)
        self.clock.stop(began)


@pytest.fixture
def streams(monkeypatch):
    """The streams of the devices, by their number, for a fake of torch; a wait for a whole device fails."""
    found, whole = {}, Mock(side_effect=AssertionError("waits for the whole device"))
    current = {"current_stream": lambda device: found[device.index], "set_device": lambda device: None}
    fake = SimpleNamespace(Event=lambda enable_timing=False: Event(), synchronize=whole, **current)
    monkeypatch.setattr(cuda, "torch", SimpleNamespace(cuda=fake))
    return found


@pytest.fixture
def rank(streams):
    return Rank(streams)


def test_the_host_is_a_few_ops_ahead_of_its_device_and_no_more(rank):
    for index in range(LEAD):
        rank.op(index)
    assert rank.stream.waited == 0 and rank.stream.now == 0.0
    rank.stream.run(1)
    rank.op(LEAD)
    assert rank.stream.waited == 1  # for an event of the first op, which has ended
    assert len([item for item in rank.stream.items if item == 10]) <= LEAD


def test_busy_times_belong_to_their_step_and_are_waited_for_when_they_are_asked_for(rank):
    gate = []
    rank.op(0, gate=lambda: True)
    rank.stream.launch(500)  # work outside of compute ops
    rank.op(1)
    first = rank.clock.read()
    assert rank.stream.waited == 0
    rank.op(2, ms=25, gate=lambda: bool(gate))
    gate.append(1)
    second = rank.clock.read()
    assert (first(), second()) == (0.020, 0.025)
    assert (first(), rank.clock.read()()) == (0.020, 0.0)  # may be asked for again


def test_a_rank_is_where_its_device_is(rank):
    gate = []
    rank.op(0)
    rank.op(1, gate=lambda: bool(gate))
    rank.progress.op, rank.progress.index = "VALIDATE", 2

    def seen(now):
        place = rank.progress.seen(now)
        return place.op, place.waiting, place.since

    rank.stream.run(0)
    assert seen(50.0) == seen(51.0) == ("F s0 m0", False, 50.0)
    rank.stream.run(1)
    assert seen(60.0) == seen(69.0) == ("F s0 m1", True, 60.0)  # its message has not come
    gate.append(1)
    rank.stream.run(0)
    assert seen(70.0) == ("F s0 m1", False, 70.0)
    rank.stream.run()
    assert seen(80.0) == seen(81.0) == ("VALIDATE", False, 80.0)  # the host came there long before
    rank.progress.since = 90.0
    assert seen(95.0) == ("VALIDATE", False, 90.0)


def test_an_event_that_is_used_again_does_not_tell_of_the_op_it_was_used_for_before(rank):
    for index in range(2 * LEAD):
        rank.op(index)
        rank.stream.run()
    rank.progress.op = "F s0 m9"
    rank.clock.start()  # the host is inside of the op: its end is on no stream
    rank.stream.run()
    assert rank.progress.seen(1.0).op == "F s0 m9"
    rank.progress.op = "something else"
    assert rank.progress.seen(1.0).op == "F s0 m9"


def test_a_device_that_has_failed_does_not_end_the_watchdog(rank, monkeypatch):
    rank.op(0)

    monkeypatch.setattr(rank.clock._marks[0].end, "query", Mock(side_effect=RuntimeError("CUDA error")))
    assert rank.progress.seen(1.0) is rank.progress


# ---- the watchdog ----------------------------------------------------------------------------------------------


def watching(number, progress, store, limit=10.0):
    dog = Watchdog(
        lambda: Board(store, number, 2), rank=number, ranks=2, limit=limit, hung=lambda error: None, orphaned=print
    )
    dog._awake_since = 0.0
    dog._progress, dog._patience = progress, limit
    return dog


@pytest.fixture
def two(streams):
    """Two ranks whose hosts are in VALIDATE; rank 0's device waits for a result that rank 1's device never computes."""
    ranks, store = [Rank(streams, 0), Rank(streams, 1)], dist.HashStore()
    ranks[0].op(0, "B s0 m0", gate=lambda: False)
    ranks[1].op(0, "F s1 m0")
    for one in ranks:
        one.stream.run(0)
        one.progress.op, one.progress.index, one.progress.since = "VALIDATE", 8, 1.0
    dogs = [watching(number, one.progress, store) for number, one in enumerate(ranks)]
    for at in (50.0, 100.0):
        beats = [dog._beat(1, at) for dog in dogs]
    for dog in dogs:
        dog._listener.heard = {rank: Heard(beat, 100.0) for rank, beat in enumerate(beats)}
        dog._listener.looked = 100.0
    return ranks, dogs


def test_the_rank_whose_device_hangs_is_named_at_its_op(two):
    _, dogs = two
    rows, culprits = dogs[0].rows(100.0)
    assert culprits == [1]
    assert "B s0 m0" in rows[0] and "waiting" in rows[0]
    assert "F s1 m0" in rows[1] and "running 50.0 s" in rows[1]
    assert dogs[0]._stuck(100.0)


def test_a_run_whose_devices_move_is_not_ended_for_hosts_that_wait_for_them(two):
    ranks, dogs = two
    ranks[1].stream.run(1)
    beat = dogs[1]._beat(2, 101.0)
    dogs[0]._listener.heard = {**dogs[0]._listener.heard, 1: Heard(beat, 101.0)}
    dogs[0]._listener.looked = 101.0
    assert beat.op == "VALIDATE" and beat.seconds == 0.0
    assert not dogs[0]._stuck(101.0) and not dogs[1]._stuck(101.0)


@pytest.mark.long("post-validate")
@pytest.mark.parametrize("sync", ["before-step", "post-validate"])
def test_steps_take_their_busy_times_from_events(streams, sync):
    """Ranks on a CPU with clocks of fake GPUs, whose ops take 10 ms."""

    def setup(worker):
        stream = streams[worker.rank] = Stream(prompt=True)
        worker.clock = made = CudaClock(torch.device("cuda", worker.rank), worker.progress)
        stop = made.stop
        made.stop = lambda began: stream.launch(10) or stop(began)

    plan = make_plan(make_program("zb-h1", 2, 4, sync=sync))
    workers, expected = run_threads(plan, 3, setup=setup), run_threads(plan, 3)[0].results
    ops = [sum(op.kind.computes for op in rank) / 100 for rank in plan.program.ranks]
    for worker in workers:
        assert [r.busy_seconds for r in worker.results] == [pytest.approx(ops)] * 3
        assert [r.loss for r in worker.results] == [r.loss for r in expected]


# ---- moments on a GPU ----------------------------------------------------------------------------------------


class Device:
    """A GPU whose clock is `offset` ns ahead of the host's; work takes given times."""

    def __init__(self, monkeypatch, offset=5_000_000_000):
        self.host, self.stream, self.offset, self.made = 1000, 0, offset, 0
        fake = SimpleNamespace(
            Event=lambda enable_timing: self.event(),
            current_stream=lambda device: SimpleNamespace(synchronize=self.wait),  # no wait for the whole device
        )
        monkeypatch.setattr(torch, "cuda", fake)
        monkeypatch.setattr(tracing.time, "perf_counter_ns", self.now)

    def now(self):
        self.host += 100  # a look at the clock takes time
        return self.host

    def launch(self, ns):
        """Enqueues work."""
        self.stream = max(self.stream, self.host) + ns

    def wait(self):
        self.host = max(self.host, self.stream)

    def event(self):
        self.made += 1
        found = SimpleNamespace(at=0)

        def record(stream):
            self.host += 50
            found.at = max(self.stream, self.host) + self.offset

        found.record, found.synchronize = record, self.wait
        found.elapsed_time = lambda other: (other.at - found.at) / 1e6
        return found


def test_events_are_put_on_the_clock_of_the_host(monkeypatch):
    device = Device(monkeypatch)
    made = tracing.CudaStamps(torch.device("cuda", 0))
    for _ in range(2):  # the second step uses the events of the first again
        made.open()
        began = device.host
        marks = [made.stamp()]
        for ns in (3_000_000, 2_000_000, 40_000_000):
            device.launch(ns)
            marks.append(made.stamp())
        assert device.host < began + 1_000_000  # the host runs ahead
        first, *rest = made.read(marks)
        assert first == pytest.approx(began, abs=1000)
        assert [at - first for at in rest] == pytest.approx([3_000_000, 5_000_000, 45_000_000], abs=1000)
    assert device.made == 5 + 4
