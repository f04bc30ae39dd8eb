"""Temporary outages of links between machines: reported once when they begin and once when they end, and survived.

TCP retransmits with doubling intervals, so a link that was down for a minute may stay unused for another one. On Linux
from 6.15 the interval of a socket can be limited to a second: this is set for all sockets of this process, also those
of gloo, NCCL and the store, which are not Python's. Other kernels keep their intervals.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from zbc.training.launch.board import Board, Heard

TOLD_S = 10.0  # without a heartbeat, after which a machine's outage is reported
_AGAIN_MS = 1000  # the minimum on Linux
_RTO_MAX = 44  # TCP_RTO_MAX_MS, in no version of Python yet
_EXIT_CODE = 49  # index of the field in /proc/PID/stat after the command's name


class Outages:
    """Reports outages of machines: the first rank of the run for all machines, that of a machine for its own."""

    def __init__(self, rank: int, hosts: Sequence[str], say: Callable[[str], None]) -> None:
        self._rank, self._hosts, self._say = rank, hosts, say
        self._since: dict[str, float] = {}  # reported machines, and the times of their last heartbeats

    def look(self, heard: Mapping[int, Heard], awake: float, now: float) -> None:
        """Evaluates heartbeats up to `now`, in a process that has run since `awake`."""
        here, ages = self._hosts[self._rank], dict[str, float]()
        for rank, last in heard.items():
            if self._rank in (0, self._hosts.index(here)):
                host = self._hosts[rank]
                ages[host] = max(ages.get(host, 0.0), last.at, awake)
        if now - ages.get(here, now) > TOLD_S:
            ages = {here: ages[here]}  # it does not read its own heartbeat, so silence of others means nothing
        elif self._rank:
            ages = {host: at for host, at in ages.items() if host == here}
        for host, at in ages.items():
            if now - at > TOLD_S and host not in self._since:
                self._since[host] = at
                reaches = f"this machine ({host}) reaches nobody: " if host == here else ""
                self._say(f"{reaches}nothing from {'the others' if reaches else host} for {TOLD_S:g} s")
            elif now - at <= TOLD_S and host in self._since:
                who = f"this machine ({host}) hears the others" if host == here else f"{host} is heard"
                self._say(f"{who} again, after {at - self._since.pop(host):.0f} s")


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


def watch_siblings(processes: Sequence[str], rank: int, board: Callable[[], Board]) -> None:
    """Publishes each rank of this machine that a signal kills, in a thread: its peers only lose a connection.

    `processes`: `host:pid` of each rank.
    """
    host = processes[rank].rpartition(":")[0]
    opened = dict[int, int]()  # file descriptors of processes -> ranks
    for sibling, process in enumerate(processes):
        where, _, pid = process.rpartition(":")
        if where == host and sibling != rank:
            with suppress(OSError, AttributeError):  # already ended; not Linux
                opened[os.pidfd_open(int(pid))] = sibling

    def watch() -> None:
        poll = select.poll()
        for number in opened:
            poll.register(number, select.POLLIN)
        while opened:
            for number, _ in poll.poll():
                dead = opened.pop(number)
                killed = _killed_by(int(processes[dead].rpartition(":")[2]))  # before its parent reaps it
                poll.unregister(number)
                os.close(number)
                if killed is not None:
                    with suppress(Exception):  # the store may be gone as well
                        board().tell(f"killed/{dead}", killed)

    threading.Thread(target=watch, name="zbc-siblings", daemon=True).start()


def _killed_by(pid: int) -> str | None:
    """The signal that ended a process that its parent has not reaped yet."""
    with suppress(OSError, ValueError, IndexError):
        code = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_EXIT_CODE])
        return signal.Signals(os.WTERMSIG(code)).name if os.WIFSIGNALED(code) else None
    return None
