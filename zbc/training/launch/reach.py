"""The interface on which ranks listen for other machines, and a check that these can reach it.

gloo listens at the address of this machine's host name unless GLOO_SOCKET_IFNAME is set, and on many machines
/etc/hosts maps the name to 127.0.0.1: then no other machine can connect. This is checked before the process groups are
made, which would wait for long.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, NamedTuple

from zbc.errors import ZbcError
from zbc.runtime.transports.network import bind_loopback
from zbc.training.launch.board import Board

_SIOCGIFADDR = 0x8915  # Linux
_ANYWHERE = "192.0.2.1"  # of no machine (RFC 5737); looking up the route to it sends nothing

_CONNECT_S = 20.0
_HINT = (
    "open the ports between the machines, or set GLOO_SOCKET_IFNAME on each to the interface that reaches the others"
)


class Interface(NamedTuple):
    """A network interface with an IPv4 address."""

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
    """The interface through which `host` is reached, and reaches this machine.

    If `host` is this machine itself, the interface of the default route, or the only one. None if it is unknown.
    """
    by_address = {interface.address: interface for interface in interfaces()}
    outside = [interface for interface in by_address.values() if not ip_address(interface.address).is_loopback]
    for target in (host, _ANYWHERE):
        local = _local_end(target)
        if local is not None and local in by_address and by_address[local] in outside:
            return by_address[local]
    return outside[0] if len(outside) == 1 else None


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


def _local_end(host: str) -> str | None:
    """The source address of packets to `host`."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 9))
        return str(way.getsockname()[0])
    return None


# ---- can all machines be reached? ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Doorstep:
    """The interface on which a rank can be reached from other machines."""

    interface: Interface
    first: bool  # whether it is the first rank of its machine, which listens for all of them


def check_reach(board: Board, here: Doorstep, limit: timedelta, name: Callable[[int], str]) -> None:
    """Connects to every other machine of the run, on all ranks together. Raises E615 that names all failed pairs."""
    with ExitStack() as stack:
        port = 0
        if here.first:
            door = stack.enter_context(socket.create_server((here.interface.address, 0), backlog=1024))
            port = door.getsockname()[1]
        doorstep = {"host": socket.gethostname(), **here.interface._asdict(), "port": port}
        said = [json.loads(text) for text in board.meet("doorstep", limit, json.dumps(doorstep))]
        peers = [rank for rank, host in enumerate(said) if host["port"] and host["address"] != here.interface.address]
        failed = [(rank, why) for rank in peers if (why := _try(said[rank])) is not None]
        failures = [json.loads(text) for text in board.meet("reached", limit, json.dumps(failed))]
    if any(failures):
        raise _unreachable(failures, said, name)


def _try(other: dict[str, Any]) -> str | None:
    """The reason why another machine cannot be reached; None if it can."""
    try:
        socket.create_connection((other["address"], other["port"]), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def unconnected(who: str, error: BaseException) -> ZbcError:
    """E615 for a group that cannot be made, with torch's message."""
    text = f"run: {who} cannot connect to the others"
    return ZbcError("E615", text, hint=_HINT, details=[str(error).partition("\n")[0]])


def _unreachable(failures: list[list[Any]], said: list[dict[str, Any]], name: Callable[[int], str]) -> ZbcError:
    def where(rank: int) -> str:
        place = said[rank]
        return f"{name(rank)} ({place['host']}, {place['name']} {place['address']})"

    lines = [f"{where(a)} cannot reach {where(b)}: {why}" for a, pairs in enumerate(failures) for b, why in pairs]
    details = [*lines[:8], *([f"and {len(lines) - 8} more"] if len(lines) > 8 else [])]
    return ZbcError("E615", "run: the machines of this run cannot reach each other", hint=_HINT, details=details)
