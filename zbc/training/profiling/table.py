"""Latency and bandwidth of each pair of ranks: the table named by hardware.links.

Run by every rank that torchrun started. Pairs exchange a small and a large tensor, pairs without a common machine at
the same time; a message takes half of the lower quartile of the round trips, since other load only adds to them.
On CPUs the first ranks of two machines are measured for all ranks there.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import combinations

import torch
import torch.distributed as dist

from zbc.job.links import LinkTable
from zbc.runtime.transports.network import bind_loopback, in_turns
from zbc.training.devices import settled
from zbc.training.launch.board import Board, open_store, prefixed
from zbc.training.launch.reach import bind_towards

_LIMIT = timedelta(seconds=300)
_SMALL, _LARGE = 256, 4 << 20  # bytes
_FEWEST, _ENOUGH_S = 3, 3.0  # minimum of round trips, and the time after which no more follow
_FASTEST = 1e5  # GB/s: upper bound for any link

Bar = Callable[[int], AbstractContextManager[Callable[[], None]]]  # a progress bar of n turns; yields its increment


def measure(device: str, rounds: int, bar: Bar) -> LinkTable | None:
    """The table, on rank 0; the other ranks take part."""
    env = os.environ
    if env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE"):
        bind_loopback()
    else:
        bind_towards(env["MASTER_ADDR"])
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", int(env.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_LIMIT)
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        store = open_store(env["MASTER_ADDR"], int(env["MASTER_PORT"]), host_it=False)
        board = Board(prefixed("links", store), rank, world)
        board.meet("hosts", _LIMIT, f"{socket.gethostname()} {env.get('GROUP_RANK', '')}")
        hosts = board.said("hosts")
        stands = [hosts.index(host) if device == "cpu" else r for r, host in enumerate(hosts)]
        mine, order = dict[tuple[int, int], tuple[float, float]](), turns(hosts, stands)
        with bar(len(order)) as done:
            for pairs in order:
                for a, b in (pair for pair in pairs if rank in pair):
                    small, large = (
                        _trip(b if rank == a else a, rank == a, size, where, rounds) for size in (_SMALL, _LARGE)
                    )
                    mine[a, b] = small, large
                dist.barrier()
                done()
        board.meet("times", _LIMIT, json.dumps([*mine.items()]))
        found = [{(a, b): (small, large) for (a, b), (small, large) in json.loads(t)} for t in board.said("times")]
        dist.barrier()  # rank 0 may host the store
        return table_of(world, found, hosts, stands) if rank == 0 else None
    finally:
        dist.destroy_process_group()


def turns(hosts: Sequence[str], stands: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The pairs to measure, in turns of pairs without a common machine; `stands`: by rank, its proxy elsewhere."""
    pairs = combinations(range(len(hosts)), 2)
    wanted = ((a, b) for a, b in pairs if hosts[a] == hosts[b] or (stands[a], stands[b]) == (a, b))
    return in_turns(wanted, hosts.__getitem__)


def _trip(other: int, first: bool, size: int, where: torch.device, rounds: int) -> float:
    """Seconds one way of a message of `size` bytes, from some round trips, `rounds` of them if they are fast."""
    tensor, took = torch.zeros(size // 4, device=where), list[float]()
    more, end = torch.ones(1, device=where), time.perf_counter() + _ENOUGH_S
    while more.item():
        began = time.perf_counter()
        if first:
            dist.send(tensor, other)
            dist.recv(tensor, other)
        else:
            dist.recv(tensor, other)
            dist.send(tensor, other)
        settled(where)
        took.append((time.perf_counter() - began) / 2)
        if first:
            late = time.perf_counter() > end and len(took) > _FEWEST
            more.fill_(0.0 if late or len(took) > rounds + 1 else 1.0)
            dist.send(more, other)
        else:
            dist.recv(more, other)
    return sorted(took[1:])[len(took[1:]) // 4]  # the first warms up


def table_of(
    world: int,
    found: Sequence[dict[tuple[int, int], tuple[float, float]]],
    hosts: Sequence[str] = (),
    stands: Sequence[int] = (),
) -> LinkTable:
    """Latency and bandwidth of each pair, from the seconds of a small and a large message measured by both ranks."""
    gbps, us = ([[0.0] * world for _ in range(world)] for _ in range(2))
    for a, b in combinations(range(world), 2):
        apart = stands and hosts[a] != hosts[b]
        c, d = sorted((stands[a], stands[b])) if apart else (a, b)
        small, large = (max(found[rank][c, d][which] for rank in (c, d)) for which in (0, 1))
        speed = min(_FASTEST, (_LARGE - _SMALL) / max(large - small, 1e-12) / 1e9)
        gbps[a][b] = gbps[b][a] = speed
        us[a][b] = us[b][a] = max(0.0, small - _SMALL / speed / 1e9) * 1e6
    return LinkTable("rank", tuple(map(tuple, gbps)), tuple(map(tuple, us)))
