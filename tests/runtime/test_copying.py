"""The copier of a GPU, with streams that only record their waits. The CPU's, with real copies."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests.composed import beside, trained
from tests.refusals import refused
from zbc.job.sections import Hardware
from zbc.runtime.cuda import StreamCopier
from zbc.runtime.features.offload import copying
from zbc.runtime.features.offload.copying import Piece, ThreadCopier
from zbc.training.checkpoint.saving import Arena


class Stream:
    def __init__(self, *_):
        self.knows, self.busy = set(), False

    def query(self):
        return not self.busy

    def wait_event(self, event):
        self.knows |= event.knows


class Event:
    def __init__(self, *, enable_timing=False):
        self.timed = enable_timing

    def record(self):
        here = Streams.current
        here.knows.add(self)
        self.knows = set(here.knows)


class Streams:
    current = Stream()


@pytest.fixture
def copier(monkeypatch):
    """A copier on host memory with fake streams and events."""

    @contextmanager
    def inside(stream):
        before, Streams.current = Streams.current, stream
        yield
        Streams.current = before

    Streams.current = Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Streams.current)
    return StreamCopier(torch.device("cpu"), duplex=True)


def piece(byte, size=100):
    return Piece(torch.full((size,), byte, dtype=torch.uint8).untyped_storage(), 0)


def slab(size=100):
    return copying.Slab(torch.zeros(size, dtype=torch.uint8))


def now():
    event = Event()
    event.record()
    return event


def test_a_copy_out_waits_for_its_forward_and_for_the_last_read_of_its_slab(copier):
    host, forward = slab(), now()
    first = copier.out(host, [piece(1)])
    assert forward in first.event.knows and first.event not in Streams.current.knows
    first.result()
    assert first.event in Streams.current.knows, "compute waits, behind which memory is let go"
    back = host.read = copier.back(host, [piece(0)], first)
    assert back.event in copier.out(host, [piece(2)]).event.knows, "the slab is still read"


def test_a_copy_back_waits_for_its_memory_and_for_its_own_copy_out(copier):
    host = slab()
    gone = copier.out(host, [piece(1)])
    before = now()  # who had the memory
    back = copier.back(host, [piece(0)], gone)
    assert {before, gone.event} <= back.event.knows
    assert back.event not in Streams.current.knows
    back.result()
    assert back.event in Streams.current.knows


@pytest.fixture
def driver(monkeypatch):
    """Calls of the driver that pin memory, and the last code it returns, if any."""
    calls, code = [], []

    def check(code):
        if code:
            raise RuntimeError(code)

    runtime = SimpleNamespace(
        cudaHostRegister=lambda at, size, flags: calls.append(("pin", at, size)) or sum(code),
        cudaHostUnregister=lambda at: calls.append(("unpin", at)) or sum(code),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return calls, code


def test_memory_of_copies_of_a_state_is_given_to_the_driver_as_it_is_and_taken_back(driver):
    calls, code = driver
    arena = Arena(pinned=True)
    first = arena.places({"a": torch.zeros(100)})["a"].data_ptr()
    arena.places({"a": torch.zeros(100)})
    arena.places({"b": torch.zeros(1000)})
    assert calls[:2] == [("pin", first, 448), ("unpin", first)] and calls[2][2] == 4032
    code.append(2)
    with pytest.raises(RuntimeError):
        arena.places({"c": torch.zeros(3)})


def test_a_slab_is_pinned_at_its_size_and_freed_once_its_copies_have_ended(copier, driver):
    calls, code = driver
    at = copier.slab(1000).data_ptr()
    assert calls == [("pin", at, 1000)]
    copier._out.busy = True
    copier.close()
    assert len(calls) == 1
    copier._out.busy = False
    copier.close()
    assert calls[1:] == [("unpin", at)]
    code.append(2)
    with refused("E603", match=r"1\.0 MiB of pinned host memory"):
        copier.slab(2**20)


@pytest.mark.parametrize("duplex", [False, True])
def test_the_thread_copies_there_and_back_in_order(duplex):
    copier = ThreadCopier(duplex=duplex)
    host, target = copying.Slab(copier.slab(256)), Piece(copier.take(100), 64)
    gone = copier.out(host, [Piece(piece(7).storage, 64)])
    gone.result()  # RELEASE
    copier.back(host, [target], gone).result()
    assert set(target.storage.tolist()) == {7}
    copier.close()


@pytest.mark.parametrize("duplex", [False, True])
def test_a_copy_back_waits_for_another_one_out_unless_both_directions_are_free(duplex, monkeypatch):
    copier, held, copy = ThreadCopier(duplex=duplex), threading.Event(), copying.copy_out
    one, other = slab(), slab()
    gone = copier.out(one, [piece(1)])
    gone.result()
    monkeypatch.setattr(copying, "copy_out", lambda *told: held.wait(60) and copy(*told))
    out = copier.out(other, [piece(2)])
    one.read = copier.back(one, [piece(0)], gone)
    if duplex:
        one.read.result(timeout=60)
    assert one.read.done() == duplex and not out.done()
    held.set()
    out.result()
    one.read.result()
    copier.close()


def test_what_goes_wrong_in_the_thread_reaches_who_waits():
    copier = ThreadCopier(duplex=False)
    ticket = copier.out(slab(), [None])
    with pytest.raises(TypeError):
        ticket.result()
    copier.close()


def test_a_run_that_copies_in_both_directions_at_once_trains_to_the_bit_as_one_without_copies(monkeypatch):
    made, begun = [], ThreadCopier.__init__
    monkeypatch.setattr(
        ThreadCopier, "__init__", lambda one, *, duplex: begun(one, duplex=made.append(duplex) or duplex)
    )
    both, plain = beside("offload", parallel__pp=2, model__layers=4, schedule__microbatches=4)
    monkeypatch.setattr(Hardware, "duplex", True)
    assert trained(both, steps=2) == trained(plain, steps=2) and made and all(made)
