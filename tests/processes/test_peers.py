"""Ranks that share a GPU, their transport, and the GPU of each rank; with fake GPUs."""

import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.processes.plans import write_plan
from tests.refusals import error_of
from zbc.plan.directory import read_manifest
from zbc.runtime.transports.transport import Staged
from zbc.training import devices
from zbc.training.launch import launch, reach
from zbc.training.launch.launch import RunOptions

HERE, OTHER_GPU, OTHER_HOST = ("", ""), ("GPU-0", "GPU-1"), ("here", "there")


class Said:
    """A board on which other ranks have posted the same as this one, except for given changes."""

    rank = 0

    def __init__(self, *changes: tuple[str, str]) -> None:
        self.changes, self.ranks = changes, 1 + len(changes)

    def meet(self, name: str, limit: timedelta, say: str, decide: Callable[[list[str]], str]) -> str:
        return decide([say, *(say.replace(*change) if change[0] else say for change in self.changes)])


@pytest.fixture
def gpus(monkeypatch):
    def there_are(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    return there_are


SHARED = [(2, [OTHER_GPU], False), (1, [HERE], True), (1, [OTHER_HOST], False), (1, [OTHER_HOST, OTHER_HOST], True)]
SHARED += [(2, [HERE], "E603")]  # though there are enough


@pytest.mark.parametrize(("count", "others", "shared"), SHARED)
def test_ranks_that_share_a_gpu_go_over_gloo_by_way_of_the_host(gpus, monkeypatch, count, others, shared):
    gpus(count)
    begun = []
    monkeypatch.setattr(reach.dist, "init_process_group", lambda backend, **how: begun.append(backend))
    monkeypatch.setattr(reach, "prefixed", lambda name, store: store)
    monkeypatch.setattr(
        reach, "Network", lambda manifest, device, limit: SimpleNamespace(rank=0, manifest=manifest, device=device)
    )
    device, manifest = torch.device("cuda", 0), SimpleNamespace(topology=SimpleNamespace(name=str))
    start = partial(reach.connected, manifest, device, Said(*others), lambda: None, timedelta(seconds=1))
    if shared == "E603":
        assert error_of(start).code == shared
        return
    transport, said = start()
    assert said is shared and begun == ["gloo" if shared else "nccl"]
    assert isinstance(transport, Staged) is shared
    if not shared:
        assert transport.device == device


def test_more_ranks_than_gpus_take_them_in_turn(gpus, tmp_path):
    gpus(2)
    assert [devices.place(rank).index for rank in range(4)] == [0, 1, 0, 1]
    gpus(1)  # the only one that it is shown
    assert devices.place(3) == torch.device("cuda", 0)
    launch._check_cuda(RunOptions(tmp_path), read_manifest(write_plan(tmp_path, hardware={"device": "cuda"})))
