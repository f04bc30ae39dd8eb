"""The hub between streams, with streams that only record their waits: all waits come in time."""

import threading
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests.runtime.small_plans import make_plan, make_program
from tests.threads import losses_of, run_threads
from zbc.runtime.core.tensors import TensorSpec
from zbc.runtime.cuda import StreamHub
from zbc.runtime.features.words.vocabulary import Output
from zbc.runtime.features.words.vocabulary_state import Meeting
from zbc.runtime.transports.background import StreamChains

_here = threading.local()


class Stream:
    """A stream of a thread: events it has recorded, and which events of others it has waited for."""

    def __init__(self):
        self.knows = Counter()  # stream -> how far the work of it is known to be done
        self.done = 0

    def wait_event(self, event):
        for stream, count in event.knows.items():
            self.knows[stream] = max(self.knows[stream], count)


class Event:
    def __init__(self, enable_timing=False):
        pass

    def record(self):
        stream = current()
        stream.done += 1
        stream.knows[stream] = stream.done
        self.knows = Counter(stream.knows)


def current():
    if not hasattr(_here, "stream"):
        _here.stream = Stream()
    return _here.stream


@pytest.fixture
def streams(monkeypatch):
    """Every tensor carries the events known to its last writer; its readers must have waited for them."""
    used = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: used.append((id(tensor), stream)))
    return used


class Watched(StreamHub):
    """Records the last event of a rank when it offers a tensor, and checks that its readers have waited for it."""

    def __init__(self, ranks):
        super().__init__(ranks)
        self.sent, self.offers, self.checked, self.missed = {}, {}, Counter(), []

    def put(self, source, message, tensor, peer):
        stream = current()
        self.sent[peer, message] = stream, stream.done + 1
        super().put(source, message, tensor, peer)

    def take(self, rank, message, peer):
        tensor = super().take(rank, message, peer)
        self._look("message", *self.sent.pop((rank, message)))
        return tensor

    def join(self, rank, offer, ranks):
        stream = current()
        self.offers[id(offer.target)] = stream, stream.done + 1
        return super().join(rank, offer, ranks)

    def _end(self, meeting):
        offers = [*meeting.offers.values()]  # which are gone when it is over
        super()._end(meeting)
        for offer in offers:
            self._look("offer", *self.offers[id(offer.target)])
        meeting.by = current(), current().done

    def complete(self, rank, meeting):
        super().complete(rank, meeting)
        self._look("result", *meeting.by)

    def _look(self, what, stream, done):
        self.checked[what] += 1
        if current().knows[stream] < done:
            self.missed.append(what)


@pytest.mark.long("zb-v-before-step")
@pytest.mark.parametrize(("schedule", "sync"), [("zb-v", "before-step"), ("zb-h1", "post-validate")])
def test_a_stream_waits_for_all_that_others_made_for_it(streams, schedule, sync):
    program = make_program(schedule, 2, 4, sync=sync, copies=2, sharded=True)
    plan = make_plan(program, optimizer={"lr": 1e-2, "clip_grad_norm": 0.5, "zero1": True, "sync": sync})
    hub = Watched(4)
    workers = run_threads(plan, 2, hub=hub)
    assert workers[0].results == [] or all(result.loss for result in workers[0].results)
    assert not hub.missed
    assert min(hub.checked[what] for what in ("message", "offer", "result")) >= 4, hub.checked
    assert streams
    assert losses_of(run_threads(plan, 2)) == losses_of(workers)


def test_a_side_stream_that_has_not_run_keeps_what_meet_reads(monkeypatch):
    """The host drops the terms of the gradient as MEET starts: the rank's next tensor would take their bytes."""
    side = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: None)
    here, recorded = [SimpleNamespace()], set()

    @contextmanager
    def on(stream):
        here.append(stream)
        yield
        here.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: here[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    told = Output(torch.nn.Parameter(torch.randn(16, 8)), 0).tell(
        torch.randn(2, 4, 8), torch.randint(16, (2, 4)), torch.ones(()), 1.0, early=True
    )
    read = told.row, told.spread
    met = Meeting(told, told.mine[None].clone(), TensorSpec((2, 4, 8), torch.float32), True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.add((id(tensor), id(stream))))
    work = SimpleNamespace(wait=lambda: True)
    StreamChains(torch.device("cuda", 0)).chain(lambda: work, met.make, lambda made: work)
    assert told.row is None and {(id(tensor), id(side)) for tensor in read} <= recorded
