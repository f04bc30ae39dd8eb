"""How fast each pair of ranks can talk: the table that hardware.links names.

Run by every rank that torchrun started. Pair after pair sends a small and a large tensor to and fro while the others
wait; half of the median round trip is what a message takes.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist

from zbc.job.links import LinkTable
from zbc.runtime.transports.network import bind_loopback
from zbc.training.devices import settled

_SMALL, _LARGE = 256, 4 << 20  # bytes
_WARM_UP = 2
_FASTEST = 1e5  # GB/s: what no link is


def measure(device: str, rounds: int) -> LinkTable | None:
    """The table, on rank 0; the other ranks take part."""
    env = os.environ
    if env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE"):
        bind_loopback()
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", int(env.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=300))
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = dict[tuple[int, int], tuple[float, float]]()
        for a, b in combinations(range(world), 2):
            if rank in (a, b):
                small, large = (
                    _trip(b if rank == a else a, rank == a, size, where, rounds) for size in (_SMALL, _LARGE)
                )
                mine[a, b] = small, large
            dist.barrier()
        found = [None] * world
        dist.all_gather_object(found, mine)
        return table_of(world, found) if rank == 0 else None  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


def _trip(other: int, first: bool, size: int, where: torch.device, rounds: int) -> float:
    """Seconds that a message of so many bytes takes, one way."""
    tensor, took = torch.zeros(size // 4, device=where), list[float]()
    for _ in range(_WARM_UP + rounds):
        began = time.perf_counter()
        if first:
            dist.send(tensor, other)
            dist.recv(tensor, other)
        else:
            dist.recv(tensor, other)
            dist.send(tensor, other)
        settled(where)
        took.append((time.perf_counter() - began) / 2)
    return median(took[_WARM_UP:])


def table_of(world: int, found: list[dict[tuple[int, int], tuple[float, float]]]) -> LinkTable:
    """Latency and speed of each pair, from the seconds of a small and of a large message as both its ranks saw them."""
    gbps, us = ([[0.0] * world for _ in range(world)] for _ in range(2))
    for a, b in combinations(range(world), 2):
        small, large = (max(found[rank][a, b][which] for rank in (a, b)) for which in (0, 1))
        speed = min(_FASTEST, (_LARGE - _SMALL) / max(large - small, 1e-12) / 1e9)
        gbps[a][b] = gbps[b][a] = speed
        us[a][b] = us[b][a] = max(0.0, small - _SMALL / speed / 1e9) * 1e6
    return LinkTable("rank", tuple(map(tuple, gbps)), tuple(map(tuple, us)))
