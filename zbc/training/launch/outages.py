"""Temporary outages of links between machines: reported once when they begin and once when they end, and survived."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from zbc.host.signals import killed_by
from zbc.training.launch.board import Board, Heard, near

TOLD_S = 10.0  # without a heartbeat, after which a machine's outage is reported


class Outages:
    """Reports outages of machines: the first rank of the run for all machines, that of a machine for its own."""

    def __init__(self, rank: int, ranks: int, host: Callable[[int], str], say: Callable[[str], None]) -> None:
        self._rank, self._host, self._say = rank, host, say
        ours = [other for other in near(rank, ranks) if host(other) == host(rank)]
        self._told = range(ranks) if rank == 0 else ours if rank == ours[0] else ()  # the ranks that it speaks for
        self._since: dict[str, float] = {}  # reported machines, and the times of their last heartbeats

    def look(self, heard: Mapping[int, Heard], awake: float, now: float) -> None:
        """Evaluates heartbeats up to `now`, in a process that has run since `awake`."""
        here, ages = self._host(self._rank), dict[str, float]()
        for rank in (rank for rank in self._told if rank in heard):
            host = self._host(rank)
            ages[host] = max(ages.get(host, 0.0), heard[rank].at, awake)
        if now - ages.get(here, now) > TOLD_S:
            ages = {here: ages[here]}  # it does not read its own heartbeat, so silence of others means nothing
        for host, at in ages.items():
            if now - at > TOLD_S and host not in self._since:
                self._since[host] = at
                reaches = f"this machine ({host}) reaches nobody: " if host == here else ""
                self._say(f"{reaches}nothing from {'the others' if reaches else host} for {TOLD_S:g} s")
            elif now - at <= TOLD_S and host in self._since:
                who = f"this machine ({host}) hears the others" if host == here else f"{host} is heard"
                self._say(f"{who} again, after {at - self._since.pop(host):.0f} s")


def watch_siblings(processes: Mapping[int, str], rank: int, board: Callable[[], Board]) -> None:
    """Publishes each rank of this machine that a signal kills, in a thread: its peers only lose a connection.

    `processes`: `host:pid` of this rank and its neighbours.
    """
    host = processes[rank].rpartition(":")[0]
    opened = dict[int, int]()  # file descriptors of processes -> ranks
    for sibling, process in processes.items():
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
                killed = killed_by(int(processes[dead].rpartition(":")[2]))  # before its parent reaps it
                poll.unregister(number)
                os.close(number)
                if killed is not None:
                    with suppress(Exception):  # the store may be gone as well
                        board().tell_killed(dead, killed)

    threading.Thread(target=watch, name="zbc-siblings", daemon=True).start()
