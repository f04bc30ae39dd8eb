"""Moments on a GPU, with events that a test makes up: no GPU is at hand."""

from types import SimpleNamespace

import pytest
import torch

from zbc.training.recording import stamps


class Device:
    """A GPU whose clock runs beside the host's, `offset` ns ahead of it; work takes as long as it is told."""

    def __init__(self, monkeypatch, offset=5_000_000_000):
        self.host, self.stream, self.offset, self.made = 1000, 0, offset, 0
        fake = SimpleNamespace(
            Event=lambda enable_timing: self.event(),
            current_stream=lambda device: SimpleNamespace(synchronize=self.wait),  # no wait for the whole device
        )
        monkeypatch.setattr(torch, "cuda", fake)
        monkeypatch.setattr(stamps.time, "perf_counter_ns", self.now)

    def now(self):
        self.host += 100  # a look at the clock takes time
        return self.host

    def launch(self, ns):
        """Enqueue work."""
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
    made = stamps.CudaStamps(torch.device("cuda", 0))
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


def test_the_stamps_of_a_device_are_those_it_can_give():
    assert isinstance(stamps.stamps_for(torch.device("cpu")), stamps.HostStamps)
    assert isinstance(stamps.stamps_for(torch.device("cuda", 1)), stamps.CudaStamps)
    host = stamps.stamps_for(torch.device("cpu"))
    a, b = host.stamp(), host.stamp()
    assert host.read([a, b]) == [a, b] and a <= b
