"""How ranks reach each other: the interface on which they listen, a check that other machines can reach it, and the
transport.

gloo listens at the address of this machine's host name unless GLOO_SOCKET_IFNAME is set, and on many machines
/etc/hosts maps the name to 127.0.0.1: then no other machine can connect. This is checked before the process groups are
made, which would wait for long.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zbc.errors import ZbcError
from zbc.plan.directory import Manifest
from zbc.runtime.transports.network import Network, bind_loopback
from zbc.runtime.transports.transport import Staged, Transport
from zbc.text import few
from zbc.training import devices
from zbc.training.launch.board import Board, Connect, prefixed

SHARED = "ranks share a GPU: what they send goes through the host's memory, which is slow"
_SIOCGIFADDR = 0x8915  # Linux
_ANYWHERE = "192.0.2.1"  # of no machine (RFC 5737); looking up the route to it sends nothing
_CONNECT_S = 20.0
_HINT = (
    "open the ports between the machines, or set GLOO_SOCKET_IFNAME on each to the interface that reaches the others"
)


def bind_towards(host: str) -> Interface | None:
    """Makes gloo listen on the interface that other machines reach, unless GLOO_SOCKET_IFNAME is set; returns it. NCCL
    uses it, too, unless NCCL_SOCKET_IFNAME is set.

    To be called before the process group is made. `host` is the store's: if it is a loopback address, every rank is on
    this machine. None if the interface is unknown, and gloo decides.
    """
    if _only_here(host):
        bind_loopback()
    elif (card := towards(host)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", card.name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={card.name}")  # exactly this one, not a prefix
    chosen, _, _ = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")
    return next((interface for interface in interfaces() if interface.name == chosen), None)


def _only_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# ---- can all machines be reached? ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Doorstep:
    """The interface on which a rank can be reached from other machines."""

    interface: Interface
    first: bool  # whether it is the first rank of its machine, which listens for all of them


def check_reach(board: Board, here: Doorstep, limit: timedelta, name: Callable[[int], str]) -> None:
    """Connects to every other machine of the run, on the first rank of each; all call this together. Raises E609 that
    names all failed pairs."""
    with ExitStack() as stack:
        port = 0
        if here.first:
            door = stack.enter_context(socket.create_server((here.interface.address, 0), backlog=1024))
            port = door.getsockname()[1]
        doorstep = {"host": socket.gethostname(), **here.interface._asdict(), "port": port}
        board.meet("doorstep", limit, json.dumps(doorstep) if here.first else "")
        texts = enumerate(board.said("doorstep") if here.first else ())
        said = {rank: json.loads(text) for rank, text in texts if text}
        peers = [rank for rank, host in said.items() if host["address"] != here.interface.address]
        failed = [(rank, why) for rank in peers if (why := _try(said[rank])) is not None]

        def where(rank: int) -> str:
            return f"{name(rank)} ({said[rank]['host']}, {said[rank]['name']} {said[rank]['address']})"

        def judge(texts: list[str]) -> ZbcError | None:
            failures = [(a, b, why) for a, text in enumerate(texts) for b, why in json.loads(text)]
            lines = [f"{where(a)} cannot reach {where(b)}: {why}" for a, b, why in failures]
            text = "run: the machines of this run cannot reach each other"
            return ZbcError("E609", text, hint=_HINT, details=few(lines, 8)) if lines else None

        board.judge("reached", limit, json.dumps(failed), judge)


def _try(other: dict[str, Any]) -> str | None:
    """The reason why another machine cannot be reached; None if it can."""
    try:
        socket.create_connection((other["address"], other["port"]), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


# ---- the transport ---------------------------------------------------------------------------------------------


def connected(
    manifest: Manifest, device: torch.device, board: Board, connect: Connect, limit: timedelta
) -> tuple[Transport, bool]:
    """A rank's transport, and whether ranks share GPUs. Raises E609 if the others cannot be reached, E603 if ranks
    share a GPU although each could have one. NCCL refuses ranks that share a GPU; if any do, all of them use gloo."""
    shared = device.type == "cuda" and _shared(manifest, device, board, limit)
    backend = "nccl" if device.type == "cuda" and not shared else "gloo"
    store = prefixed("groups", connect())
    try:
        dist.init_process_group(backend, store=store, rank=board.rank, world_size=board.ranks, timeout=limit)
    except RuntimeError as error:
        text = f"run: {manifest.topology.name(board.rank)} cannot connect to the others"
        raise ZbcError("E609", text, hint=_HINT, details=[str(error).partition("\n")[0]]) from error
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


# ---- the network interfaces of this machine ------------------------------------------------------------------------


class Interface(NamedTuple):
    name: str
    address: str


def interfaces() -> list[Interface]:
    """The interfaces of this machine; empty on systems other than Linux."""
    with suppress(ImportError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            cards = []
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # an interface without an address
                    packed = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    cards.append(Interface(name, socket.inet_ntoa(packed[20:24])))
            return cards
    return []


def towards(host: str) -> Interface | None:
    """The interface through which `host` is reached, and reaches this machine. If `host` is this machine itself, the
    interface of the default route, or the only one. None if it is unknown."""
    by_address = {interface.address: interface for interface in interfaces()}
    outside = [interface for interface in by_address.values() if not ip_address(interface.address).is_loopback]
    for target in (host, _ANYWHERE):
        local = _local_end(target)
        if local is not None and local in by_address and by_address[local] in outside:
            return by_address[local]
    return outside[0] if len(outside) == 1 else None


def _local_end(host: str) -> str | None:
    """The source address of packets to `host`."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 9))
        return str(way.getsockname()[0])
    return None
