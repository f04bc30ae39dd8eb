"""Connections of this process that outlive a link that is down for a while.

TCP retransmits with doubling intervals, so a link that was down for a minute may stay unused for another one. On Linux
from 6.15 the interval of a socket can be limited to a second: this is set for all sockets of this process, also those
of gloo, NCCL and the store, which are not Python's. Other kernels keep their intervals.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

_AGAIN_MS = 1000  # the minimum on Linux
_RTO_MAX = 44  # TCP_RTO_MAX_MS, in no version of Python yet


class Retrying:
    """Limits the retransmission interval of this process's TCP connections to a second; each call sets new ones."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds after which a connection without an answer is given up."""
        self._patience, self._known = patience, set[str]()

    def look(self) -> None:
        with suppress(OSError):  # no /proc
            for name in os.listdir("/proc/self/fd"):
                with suppress(OSError):  # closed meanwhile, or a kernel without the option
                    kind = os.readlink(f"/proc/self/fd/{name}")
                    if kind.startswith("socket:") and kind not in self._known:
                        self._known.add(kind)
                        self._set(int(name))

    def _set(self, number: int) -> None:
        with socket.socket(fileno=os.dup(number)) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX, _AGAIN_MS)
                # Without this the shorter times of all tries would add up to an end after 15 s.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._patience))
