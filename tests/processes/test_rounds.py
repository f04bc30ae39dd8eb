"""Ranks that were started together find each other, independent of leftovers of earlier starts."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.limits import until
from zbc.errors import ZbcError
from zbc.training.launch.rounds import joined, launch_of, same_launch


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
    with pytest.raises(ZbcError) as raised, joined(linked(store), 1, 2, 0.0):
        pass
    assert raised.value.code == "E609" and "rank 0 has not started" in raised.value.message
