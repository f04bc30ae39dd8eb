"""The network interfaces of this machine, and the one through which another machine is reached."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

_SIOCGIFADDR = 0x8915  # Linux
_ANYWHERE = "192.0.2.1"  # of no machine (RFC 5737); looking up the route to it sends nothing


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


def _local_end(host: str) -> str | None:
    """The source address of packets to `host`."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 9))
        return str(way.getsockname()[0])
    return None
