"""Connects a rank's process to its transport."""

from __future__ import annotations

import json
import socket
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from zbc.plan.directory import Manifest
from zbc.runtime.transports.around import Staged
from zbc.runtime.transports.network import Network
from zbc.runtime.transports.transport import Transport
from zbc.training import devices
from zbc.training.launch.board import Board, Connect, prefixed
from zbc.training.launch.reach import unconnected

SHARED = "ranks share a GPU: what they send goes through the host's memory, which is slow"


def connected(
    manifest: Manifest, device: torch.device, board: Board, connect: Connect, limit: timedelta
) -> tuple[Transport, bool]:
    """A rank's transport, and whether ranks share GPUs. Raises E609 if the others cannot be reached, E603 if
    ranks share a GPU although each could have one.

    NCCL refuses ranks that share a GPU; if any do, all of them use gloo.
    """
    shared = device.type == "cuda" and _shared(manifest, device, board, limit)
    backend = "nccl" if device.type == "cuda" and not shared else "gloo"
    store = prefixed("groups", connect())
    try:
        dist.init_process_group(backend, store=store, rank=board.rank, world_size=board.ranks, timeout=limit)
    except RuntimeError as error:
        raise unconnected(manifest.topology.name(board.rank), error) from error
    if not shared:
        return Network(manifest, device, limit), False
    return Staged(Network(manifest, torch.device("cpu"), limit), device), True


def _shared(manifest: Manifest, device: torch.device, board: Board, limit: timedelta) -> bool:
    """Whether two ranks have the same GPU, compared by its unique name."""
    host = f"{socket.gethostname()} {torch.cuda.device_count()}"

    def decide(said: list[str]) -> str:
        hosts, gpus = zip(*map(json.loads, said), strict=True)
        if all(count <= int(host.split()[-1]) for host, count in Counter(hosts).items()):
            devices.check_apart(gpus, manifest.topology.name)
        return "shared" if len(set(gpus)) < board.ranks else ""

    return bool(board.meet("device", limit, json.dumps([host, devices.named(device)]), decide))
