"""Links between machines that fail for a while: told once when they do and once when they are back, and lived through.

TCP sends again what got no answer, after twice the time each time, so a link that was down for a minute may stay unused
for another. On Linux from 6.15 a socket can be told to try at least once a second: all of this process are, those of
gloo, NCCL and the store too, which are none of Python's. Where the kernel cannot, they stay as they are.
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

TOLD_S = 10.0  # without a sign of life, after which a machine is told of
_AGAIN_MS = 1000  # the least that Linux takes
_RTO_MAX = 44  # TCP_RTO_MAX_MS, in no version of Python yet
_EXIT_CODE = 49  # of the fields in /proc/PID/stat behind the command's name


class Outages:
    """What one rank tells of the machines of a run: the first one of others, the first one of a machine of its own."""

    def __init__(self, rank: int, hosts: Sequence[str], say: Callable[[str], None]) -> None:
        self._rank, self._hosts, self._say = rank, hosts, say
        self._since: dict[str, float] = {}  # machines that were told of, and when they were heard last

    def look(self, heard: Mapping[int, Heard], awake: float, now: float) -> None:
        """What was heard by `now`, by a process that has run since `awake`."""
        here, ages = self._hosts[self._rank], dict[str, float]()
        for rank, one in heard.items():
            if self._rank in (0, self._hosts.index(here)):
                host = self._hosts[rank]
                ages[host] = max(ages.get(host, 0.0), one.at, awake)
        if now - ages.get(here, now) > TOLD_S:
            ages = {here: ages[here]}  # it hears nothing of itself, so silence of others says nothing
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
    """Has the TCP connections of this process try again each second, those that are new since the last call."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds after which a connection without an answer is given up."""
        self._patience, self._known = patience, set[str]()

    def look(self) -> None:
        with suppress(OSError):  # no /proc
            for name in os.listdir("/proc/self/fd"):
                with suppress(OSError):  # closed meanwhile, or a kernel that does not know the option
                    kind = os.readlink(f"/proc/self/fd/{name}")
                    if kind.startswith("socket:") and kind not in self._known:
                        self._known.add(kind)
                        self._set(int(name))

    def _set(self, number: int) -> None:
        with socket.socket(fileno=os.dup(number)) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                found.setsockopt(socket.IPPROTO_TCP, _RTO_MAX, _AGAIN_MS)
                # Without this the shorter times of all tries would add up to an end after 15 s.
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._patience))


def watch_siblings(processes: Sequence[str], rank: int, board: Callable[[], Board]) -> None:
    """Leave word of each rank of this machine that a signal kills, in a thread: the others only lose a connection.

    `processes`: `host:pid` of each rank.
    """
    host = processes[rank].rpartition(":")[0]
    opened = dict[int, int]()  # file descriptors of processes -> ranks
    for other, process in enumerate(processes):
        where, _, pid = process.rpartition(":")
        if where == host and other != rank:
            with suppress(OSError, AttributeError):  # gone already; no Linux
                opened[os.pidfd_open(int(pid))] = other

    def watch() -> None:
        poll = select.poll()
        for number in opened:
            poll.register(number, select.POLLIN)
        while opened:
            for number, _ in poll.poll():
                dead = opened.pop(number)
                killed = _killed_by(int(processes[dead].rpartition(":")[2]))  # before its parent asks, and it is gone
                poll.unregister(number)
                os.close(number)
                if killed is not None:
                    with suppress(Exception):  # the store may be gone as well
                        board().tell(f"killed/{dead}", killed)

    threading.Thread(target=watch, name="zbc-siblings", daemon=True).start()


def _killed_by(pid: int) -> str | None:
    """The signal that ended a process which its parent has not asked for yet."""
    with suppress(OSError, ValueError, IndexError):
        code = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_EXIT_CODE])
        return signal.Signals(os.WTERMSIG(code)).name if os.WIFSIGNALED(code) else None
    return None
