"""The GPUs of a run: their assignment to ranks, and their memory in use."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from zbc.errors import ZbcError
from zbc.text import size

T = TypeVar("T")
ALLOCATOR = "PYTORCH_ALLOC_CONF"  # read when a process first allocates on the GPU


def settled(device: torch.device) -> None:
    """Waits until a device has completed all its work; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Laps:
    """Measures the times of calls on a device, in ms.

    On a GPU calls are not waited for, as in a run, whose host is ahead of it: each is enclosed by events on the stream,
    which `read` evaluates. Launch times are then hidden by the kernel before, unless the host is slower.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event, list[float]]] = []

    def take(self, call: Callable[[], T], into: list[float]) -> T:
        """Returns `call()`; its time is appended to `into`, on a GPU in the next `read`."""
        if self._device.type == "cpu":
            began = time.perf_counter()
            found = call()
            into.append((time.perf_counter() - began) * 1e3)
            return found
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        found = call()
        end.record()
        self._open.append((begin, end, into))
        return found

    def read(self) -> None:
        """Waits for the device, and stores the times of all calls."""
        settled(self._device)
        for begin, end, into in self._open:
            into.append(begin.elapsed_time(end))
        self._open.clear()


def place(local_rank: int) -> torch.device:
    """The GPU of a rank: launchers make either its own or all of them visible to each rank. If there are fewer than
    ranks, ranks share them.

    Its allocator gets segments that grow, unless the user has set it: an allocator that has to free what it kept waits
    for the whole device, so also for receives, which may wait for this rank.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same variable
        os.environ.setdefault(ALLOCATOR, "expandable_segments:True")
    index = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def named(device: torch.device) -> str:
    """A unique name of a GPU."""
    return f"{torch.cuda.get_device_properties(device).uuid} on {socket.gethostname()}"


def check_apart(said: Sequence[str], name: Callable[[int], str]) -> None:
    """Raises E603 if two ranks have the same GPU; `said` has the result of `named` by rank."""
    ranks = dict[str, list[int]]()
    for rank, gpu in enumerate(said):
        ranks.setdefault(gpu, []).append(rank)
    for gpu, sharing in ranks.items():
        if len(sharing) > 1:
            text = f"run: {', '.join(map(name, sharing))} have one device, {gpu}"
            hint = "set LOCAL_RANK, as torchrun does, or show each rank a device of its own with CUDA_VISIBLE_DEVICES"
            raise ZbcError("E603", text, hint=hint)


def in_use(device: torch.device) -> str:
    """Bytes in use on a GPU, and the part reserved by torch's allocator; for `fullest`."""
    free, total = torch.cuda.mem_get_info(device)
    return f"{total - free} {torch.cuda.memory_reserved(device)}"


def fullest(said: Sequence[str], name: Callable[[int], str]) -> str:
    """A line about the GPU with the most memory in use."""
    used = [tuple(map(int, text.split())) for text in said]
    rank = max(range(len(used)), key=used.__getitem__)
    whole, torchs = used[rank]
    rest = "the context, NCCL, libraries and other programs"
    return f"{name(rank)} has {size(whole)} of its device in use: torch {size(torchs)}; {rest} {size(whole - torchs)}"
