"""The number of hardware queues that a run asks for, and plans that need more than one."""

import os

import pytest
import torch

from tests.processes.plans import compiled
from tests.refusals import refused
from zbc.training import devices
from zbc.training.launch import launch

EQUAL = {"costs": {"f": 1.0, "b": 1.0, "w": 1.0, "comm": 0.0, "act_b": 1.0}, "model": {"layers": 8}}


def written(folder, kind):
    found = compiled(folder, **EQUAL, schedule={"kind": kind, "microbatches": 8})
    return found.report, found.write(folder / kind)


def test_a_queue_for_every_stream_unless_the_user_says_otherwise(tmp_path, monkeypatch):
    report, manifest = written(tmp_path, "looped-zb")
    assert not report.survives_one_queue
    for before, after in (("", None), ("8", "8")):
        monkeypatch.setenv(launch._QUEUES, before)
        if after is None:
            monkeypatch.delenv(launch._QUEUES)
        launch._set_queues(tmp_path / "looped-zb", manifest)
        assert os.environ[launch._QUEUES] == (after or "32")


def test_one_queue_is_refused_for_the_plans_that_stop_under_it(tmp_path, monkeypatch):
    monkeypatch.setenv(launch._QUEUES, "1")
    report, manifest = written(tmp_path, "zb-h2")
    assert report.survives_one_queue
    launch._set_queues(tmp_path / "zb-h2", manifest)
    with refused("E603", match="share one queue", hint=f"unset {launch._QUEUES}"):
        launch._set_queues(tmp_path / "looped-zb", written(tmp_path, "looped-zb")[1])


@pytest.mark.parametrize("theirs", [{}, {"PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}])
def test_segments_of_the_allocator_grow_unless_the_user_says_otherwise(theirs, monkeypatch):
    found = []
    monkeypatch.setattr(os, "environ", dict(theirs))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: found.append((index, dict(os.environ))))
    assert devices.place(3).index == 1
    assert found == [(1, theirs or {devices.ALLOCATOR: "expandable_segments:True"})]
