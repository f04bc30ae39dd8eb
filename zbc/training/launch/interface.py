"""Which network interface the ranks of this machine listen on, where ranks are on several.

gloo listens at the address that this machine's name stands for unless GLOO_SOCKET_IFNAME says otherwise, and on many
machines /etc/hosts has the name stand for 127.0.0.1: then no other machine gets through.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

_SIOCGIFADDR = 0x8915  # Linux
_ANYWHERE = "192.0.2.1"  # of no machine (RFC 5737); asking for the way there sends nothing


class Interface(NamedTuple):
    """One with an IPv4 address."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """Those of this machine; empty where the system has another way to tell."""
    with suppress(ImportError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            found = []
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # up without an address
                    packed = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    found.append(Interface(name, socket.inet_ntoa(packed[20:24])))
            return found
    return []


def towards(host: str) -> Interface | None:
    """The interface through which `host` is reached, and reaches this machine.

    Where `host` is this machine itself it is the one of the default route, or the only one there is. None if all that
    does not tell.
    """
    known = {one.address: one for one in interfaces()}
    outside = [one for one in known.values() if not ip_address(one.address).is_loopback]
    for target in (host, _ANYWHERE):
        local = _local_end(target)
        if local is not None and local in known and known[local] in outside:
            return known[local]
    return outside[0] if len(outside) == 1 else None


def bind_towards(host: str) -> Interface | None:
    """Have gloo listen where other machines reach this one, unless GLOO_SOCKET_IFNAME says otherwise; where that is.

    Has to come before the process group. `host` is that of the store: under a name of this machine alone (127.0.0.1)
    every rank is on it. None if nothing can be told, and gloo decides.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen is None:
        found = _loopback() if _only_here(host) else towards(host)
        if found is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = found.name
        return found
    return next((one for one in interfaces() if one.name == chosen.partition(",")[0]), None)


def _loopback() -> Interface | None:
    return next((one for one in interfaces() if ip_address(one.address).is_loopback), None)


def _only_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _local_end(host: str) -> str | None:
    """The address that packets to `host` would have as their source."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 9))
        return str(way.getsockname()[0])
    return None
