"""Ranks that were started together find each other, and messages of a start cost each the same, however many."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.limits import until
from tests.refusals import refused
from zbc.errors import ZbcError
from zbc.topology import Topology
from zbc.training.checkpoint.together import together
from zbc.training.launch.board import Beat, Board, host_of, hosts_of
from zbc.training.launch.rounds import joined, launch_of, same_launch
from zbc.training.watchdog import Listener

LIMIT, GPUS = timedelta(seconds=60), 8


class Counted:
    """A connection to a store, with its calls, and the bytes of keys and values either way."""

    def __init__(self, store):
        self.store, self.calls, self.bytes = store, 0, 0

    def __getattr__(self, name):
        def call(*given):
            found = getattr(self.store, name)(*given)
            texts = [*given, *given[0]] if isinstance(given[0], list) else given
            self.calls += name != "set_timeout"  # which is no message
            self.bytes += sum(len(text) for text in (*texts, found) if isinstance(text, (str, bytes)))
            self.bytes += sum(map(len, found)) if isinstance(found, list) else 0
            return found

        return call


def identity(rank):
    return {
        name: f"{name} of this run, in forty characters"[:40] for name in ("plan", "code", "steps", "torch", "Python")
    }


def whole_start(board, asking, ranks, odd=None):
    """What a rank says until its first step; its name, if it has been asked for."""
    rank = board.rank
    with joined(asking, rank, ranks, 60.0) as number:
        assert number == 1
        board.agree(identity(rank) | ({"torch": "2.11"} if rank == odd else {}), LIMIT, Topology(ranks).name)
        process = f"node-{rank // GPUS:04d}:{1000 + rank}"
        first = board.meet("process", LIMIT, process, lambda told: told[0] if len({*hosts_of(told)}) > 1 else "")
        assert first == "node-0000:1000" and board.said_near("process")[rank] == process
        for name in ("doorstep", "reached", "built", "trace", "run directory", "ended"):
            board.meet(name, LIMIT, "fine")
        for name in ("where to begin", "a folder of its own", "a place for checkpoints", "seen"):
            assert together(board, name, lambda: {"rank": rank}) == {"rank": 0}
        board.beat(Beat(1, 0, 0, 0, "starting", True, 1.0))
        board.be_there("left")


def started(ranks, **how):
    """The connections of all ranks after a start, its seconds, and the errors of ranks."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    stack, interval = threading.stack_size(2**18), sys.getswitchinterval()
    sys.setswitchinterval(5.0)  # threads that wait for Python's lock wake up that often

    def run(rank):
        asking = links[rank] if rank else host.clone()  # rank 0 answers while it waits itself
        try:
            whole_start(Board(links[rank], rank, ranks), asking, ranks, **how)
        except ZbcError as error:
            return error

    try:
        with ThreadPoolExecutor(ranks) as pool:
            links = [*pool.map(lambda rank: Counted(host.clone()), range(ranks))]
            begun = time.monotonic()
            errors = [*pool.map(run, range(ranks))]
    finally:
        threading.stack_size(stack)
        sys.setswitchinterval(interval)
    return host, links, time.monotonic() - begun, errors


def each(links):
    return [sum(getattr(link, what) for link in links) / len(links) for what in ("calls", "bytes")]


@pytest.fixture(scope="module")
def few():
    return started(64)


@pytest.mark.long
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    ("ranks", "most"), [(256, 10), *(pytest.param(*of, marks=pytest.mark.repeats) for of in ((1024, 10), (4096, 60)))]
)
def test_a_start_costs_each_rank_the_same_whatever_their_number(few, ranks, most):
    """Of the time for 4,096 the store takes a fifth; the others are threads of one process here."""
    _, links, seconds, errors = started(ranks)
    assert not any(errors) and seconds < most
    for ours, theirs in zip(each(links), each(few[1]), strict=True):
        assert ours < 1.2 * theirs
    # Rank 0 hears of all, in as few calls.
    assert max(link.calls for link in links[16:]) < 60 and max(link.bytes for link in links[16:]) < 15_000


def test_a_rank_that_differs_is_named_on_all_ranks_however_many_there_are():
    _, _, _, errors = started(40, odd=33)
    text = "run: the ranks differ in torch: rank 33 has 2.11, the others torch of this run, in forty characters"
    assert {error.message for error in errors} == {text}


@pytest.fixture
def round_of():
    """A function that makes every rank beat and listen once, and returns its calls and the ranks it hears."""
    store = dist.HashStore()

    def round_of(ranks, silent=(), *, now=0.0, listeners={}):  # noqa: B006
        boards = [Board(Counted(store), rank, ranks) for rank in range(ranks)]
        for board in boards:
            if board.rank not in silent:
                board.beat(Beat(int(now) + 1, 0, 0, 0, "starting", True, 1.0))
        for board in boards:
            listener = listeners.setdefault(board.rank, Listener(None, 1.0, 3.0))
            listener.hear(board, now)
        return [board._store.calls for board in boards], {rank: {*one.heard} for rank, one in listeners.items()}

    return round_of


def test_a_rank_hears_its_neighbours_and_the_first_alone_hears_all(round_of):
    calls, heard = round_of(200)
    assert heard[0] == {*range(200)} and heard[37] == {0, *range(32, 48)} and heard[199] == {0, *range(192, 200)}
    assert max(calls) < 12


def test_if_the_first_rank_is_silent_the_first_of_the_next_neighbours_hears_all(round_of):
    for now in range(0, 10, 2):
        _, heard = round_of(100, () if now < 2 else (0, 5), now=float(now))
    assert [rank for rank in heard if len(heard[rank]) == 100] == [0, 1, 16]  # 0 is silent, not deaf


def test_hosts_of_others_are_asked_for_once_when_one_is_named():
    asked = []
    name = Topology(4, host=host_of({0: "a", 1: "a"}, lambda: asked.append(1) or ["a", "a", "b", "b"])).name
    assert name(1) == "rank 1 on a" and not asked
    assert [name(3), name(2), name(4)] == ["rank 3 on b", "rank 2 on b", "rank 4"] and asked == [1]

    def gone():
        raise RuntimeError("the store is gone")

    assert [*map(Topology(3, host=host_of({0: "a"}, gone)).name, range(3))] == ["rank 0 on a", "rank 1", "rank 2"]


def linked(store):
    """A connection of its own: one that waits serves nothing else."""
    return dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))


def start(store, ranks, order=None):
    """The number each rank of a start gets; ranks come in `order`, each when the one before has asked."""
    numbers, over = {}, threading.Event()
    came = {rank: threading.Event() for rank in range(ranks)}

    def run(rank):
        came[rank].set()
        with joined(linked(store), rank, ranks, 20.0) as number:
            numbers[rank] = number
            over.wait(20)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in order or range(ranks)]
    for rank, thread in zip(order or range(ranks), threads, strict=True):
        thread.start()
        came[rank].wait()
    until(lambda: len(numbers) == ranks or not any(thread.is_alive() for thread in threads))
    over.set()
    for thread in threads:
        thread.join(20)
    return numbers


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def test_every_start_has_a_number_of_its_own_that_all_ranks_know(store):
    assert start(store, 4) == dict.fromkeys(range(4), 1)
    assert start(store, 4, order=[3, 1, 2, 0]) == dict.fromkeys(range(4), 2)
    assert start(store, 2, order=[1, 0]) == dict.fromkeys(range(2), 3)


def test_a_question_of_a_rank_that_has_died_since_harms_nobody(store):
    with pytest.raises(ZbcError):
        joined(linked(store), 2, 3, 0.0).__enter__()  # asked, and gone before rank 0 came
    assert start(store, 3, order=[1, 2, 0]) == dict.fromkeys(range(3), 1)


def test_a_start_that_never_was_complete_does_not_hold_up_the_next(store):
    first = joined(linked(store), 0, 3, 1.0)
    assert first.__enter__() == 1
    with joined(linked(store), 1, 3, 20.0) as number:
        assert number == 1
    first.__exit__(None, None, None)
    assert start(store, 3) == dict.fromkeys(range(3), 2)


def test_a_launch_is_told_from_every_other_one_whatever_it_is_called(store):
    """torchrun calls every launch "none" unless it is given a name, which may be used again later."""
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    for name in ("none", "job1"):
        first = launch_of(store, name, 1, restarted=False)
        again = launch_of(store, name, 2, restarted=True)
        later = launch_of(other, name, 1, restarted=False)
        assert same_launch(first, again) and not same_launch(first, later)
    lost = launch_of(other, "job1", 1, restarted=True)  # a store that was lost with the start before
    assert same_launch(first, lost) and not same_launch(first, "job") and not same_launch(None, lost)
    assert not same_launch(launch_of(store, "none", 1, restarted=False), launch_of(other, "none", 1, restarted=True))


def test_a_rank_0_that_does_not_come_is_an_error_in_words(store):
    with refused("E609", "rank 0 has not started"), joined(linked(store), 1, 2, 0.0):
        pass
