"""The watchdog thread of each rank: publishes the rank's op, reads those of the others, and ends a run that hangs.

A rank that waits cannot tell whether its peer is slow, stuck or gone. The watchdogs can: each publishes the op of its
rank and the time it has taken. When no rank has begun another op for `limit` seconds, the first watchdog to notice
reports the op of every rank. A rank with a silent watchdog (stopped, swapped out, its machine gone) is named as such.

A GPU runs asynchronously: there the op is the one that the device is in, by events on its stream, and a rank waits if
the inputs of that op have not arrived.

On a busy machine a heartbeat may be read seconds after it was written. So a rank counts as hanging only by its own
heartbeats, and as silent once reads of the store, not the clock alone, have shown nothing new for a while.

Outages of links between machines are reported once when they begin and once when they end, and survived.
"""

from __future__ import annotations

import functools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from zbc.errors import ZbcError
from zbc.host.signals import killed_by
from zbc.runtime.core.progress import Progress
from zbc.training import frames
from zbc.training.launch.board import Beat, Board, Heard, before, near, plain_name

_AGAIN_MS = 1000  # the minimum on Linux
_RTO_MAX = 44  # TCP_RTO_MAX_MS, in no version of Python yet
_ENDED = ZbcError("E702", "run: another rank failed").exit_code
_Result = TypeVar("_Result")
_CLAIM_S = 5.0  # for the store to decide which rank reports a failure
_MUTE = "it was stopped, its machine is gone, or native code holds Python's lock"
_ALONE_S = 5.0  # for the cause of the store's end to show in this rank, too
_LATE = "it did not answer in time"
_DEAF_S = 10.0  # without reading its own heartbeat, after which a rank extrapolates the others' last ones
_HEARD_S = 0.5  # for the others to read that a phase begins
_GRACE_S = 20.0  # for the rank that claimed a failure to report it, before the others end silently


class Listener:
    """Reads the heartbeats of a rank's neighbours, in a thread of its own: a store that does not answer blocks only
    this one. The first rank of the run reads those of all; if it is silent, the first of the next neighbours does."""

    def __init__(self, board: Callable[[], Board], tick: float, silence: float) -> None:
        self._board, self._tick, self._silence = board, tick, silence
        self._asked = dict[int, float]()  # ranks that are to listen to all, and when this one began to look
        self.everyone = False  # whether it is to hear all ranks; set by a rank that reports a failure
        self._done = threading.Event()
        self.heard: dict[int, Heard] = {}  # replaced, never changed: other threads read it
        self.looked = 0.0  # when it was last read (`time.monotonic`)
        self.failed: int | None = None
        self.reported: int | None = None
        self.cut_off = False  # the store is gone
        self.all = True  # whether it hears all ranks
        self._thread = threading.Thread(target=self._run, name="zbc-listener", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        try:
            board = self._board()
            while not self._done.wait(self._tick):
                self.hear(board, time.monotonic())
                self.failed, self.reported = board.failed(), board.reported()
        except (RuntimeError, ZbcError):
            self.cut_off = True  # the last heartbeats stay, and age

    def hear(self, board: Board, now: float) -> None:
        """Reads the heartbeats that this rank listens to."""
        old, beats = self.heard, board.beats(self._of(board, now))
        new = {rank: beat for rank, beat in beats.items() if rank not in old or old[rank].beat.count != beat.count}
        self.heard = old | {rank: Heard(beat, now) for rank, beat in new.items()}
        self.looked = now

    def _of(self, board: Board, now: float) -> Iterable[int]:
        """The ranks to read: the neighbours, and of those that are to listen to all up to one that is not silent."""
        found = {*near(board.rank, board.ranks)}
        for rank in before(board.rank):
            found.add(rank)
            last = self.heard[rank].at if rank in self.heard else self._asked.setdefault(rank, now)
            if now - last <= self._silence and not self.everyone:
                self.all = len(found) == board.ranks
                return found
        self.all = True
        return range(board.ranks)


class Watchdog:
    """`hung(error)` and `orphaned(exit code)` run in the watchdog's thread and are expected to end the process."""

    def __init__(
        self,
        board: Callable[[], Board],
        *,
        rank: int,
        ranks: int,
        limit: float,
        hung: Callable[[ZbcError], None],
        orphaned: Callable[[int], None],
        name: Callable[[int], str] = plain_name,
    ) -> None:
        self.rank, self.ranks, self.limit = rank, ranks, limit
        self.name = name
        self._host: Callable[[int], str] | None = None  # of a rank, if there are several hosts
        self._outages: Outages | None = None
        # Only the watchdog may give up a connection that does not answer.
        self._retrying = Retrying(600 + 4 * limit)
        self.tick = min(2.0, max(0.2, limit / 10))
        self._silence = max(1.5, 3 * self.tick + 0.5)
        self._board, self._hung, self._orphaned = board, hung, orphaned
        # Building a model, reading data or writing weights takes longer than an op, and counts as one long op.
        self._patience = self._long = max(60.0, 2 * limit)
        self._progress = Progress(since=time.monotonic())
        self._awake_since = time.monotonic()
        # The rank's own thread ends the process: from here on the watchdog only publishes and reads.
        self.standing_down = False
        self.nearly_done = False  # the last collective of all ranks has completed: the store may end
        self._main = threading.get_ident()  # the thread that is watched
        self._changed, self._heard = threading.Event(), threading.Event()  # a phase began; it was published
        self._done = threading.Event()
        self._listener = Listener(board, self.tick, self._silence)
        self._thread = threading.Thread(target=self._run, name="zbc-watchdog", daemon=True)

    def start(self) -> None:
        self._listener.start()
        self._thread.start()

    def stop(self) -> None:
        """Stops watching; the run has ended for this rank."""
        self._done.set()
        self._changed.set()
        self._thread.join(timeout=1.0)
        self._listener.stop()

    def phase(self, text: str, *, waiting: bool = False) -> None:
        """Sets the rank's activity outside of training steps."""
        self._progress, self._patience = Progress(op=text, waiting=waiting, since=time.monotonic()), self._long
        self._heard.clear()
        self._changed.set()
        if not waiting and self._thread.is_alive():
            self._heard.wait(_HEARD_S)  # a user's code, which runs now, may end the process silently

    def watch(self, progress: Progress) -> None:
        """Watches training from here on, on all ranks."""
        progress.op, progress.since = "the first step", time.monotonic()
        self._progress, self._patience = progress, self.limit

    def placed(self, host: Callable[[int], str], name: Callable[[int], str], say: Callable[[str], None]) -> None:
        """Sets the machine of each rank, of several; `say` shows messages about outages of machines."""
        self.name = name
        self._host, self._outages = host, Outages(self.rank, self.ranks, host, say)

    def silent(self) -> list[int]:
        """Ranks with heartbeats, but no new one for some ticks before the last read; empty if this rank is one."""
        looked, heard = self._listener.looked, self._listener.heard
        quiet = [rank for rank, last in heard.items() if looked - max(last.at, self._awake_since) > self._silence]
        return [] if self.rank in quiet else quiet

    def await_silence(self) -> list[int]:
        """For a rank that lost a connection: waits until some ranks are silent and returns them; empty if none is."""
        self._listener.everyone = True
        deadline = time.monotonic() + 2 * self._silence + 2.0
        while time.monotonic() < deadline:
            if gone := self.silent():
                return gone
            time.sleep(self.tick / 4)
        return []

    def await_report(self) -> int | None:
        """For a rank that failed because another did: waits for that one's report, so that it still sees this rank.
        Returns the exit code of all ranks; None if there is no report in time."""
        deadline = time.monotonic() + _GRACE_S
        while self._listener.reported is None and time.monotonic() < deadline:
            time.sleep(self.tick / 4)
        return self._listener.reported

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _over(self, seconds: float) -> bool:
        """Waits for `seconds`, or until a phase begins; returns whether the watchdog has been stopped."""
        self._changed.wait(seconds)
        self._changed.clear()
        return self._done.is_set()

    def _run(self) -> None:
        count, ticked, failed_at, alone_since = 0, time.monotonic(), None, None
        board: Board | None = None
        with suppress(RuntimeError, ZbcError):
            board = self._board()
        while not self._over(self.tick if count else 0.0):
            now = time.monotonic()
            if now - ticked > 3 * self.tick + 2.0:
                self._awake_since = now  # this whole process was stopped; its data about the others are outdated
            count, ticked = count + 1, now
            beat = self._beat(count, now)
            try:
                if board is not None:
                    board.beat(beat)
            except RuntimeError:
                board = None
            self._heard.set()
            self._retrying.look()
            if self._outages is not None and failed_at is None:
                self._outages.look(self._listener.heard, self._awake_since, now)
            if failed_at is not None or self._listener.failed not in (None, self.rank):
                if failed_at is None:
                    failed_at = now
                    self._tell_stack(board)
                reported = self._listener.reported
                if (reported is not None or now - failed_at > _GRACE_S) and not self.standing_down:
                    self._orphaned(_ENDED if reported is None else reported)
            elif self._listener.cut_off and not (self.standing_down or self.nearly_done):
                alone_since = alone_since or now
                if now - alone_since > _ALONE_S:  # without the store ranks cannot meet for a checkpoint or the end
                    text = "run: the store of the run is gone, so its ranks cannot meet again"
                    hint = "torchrun's own process has ended, or the first machine: start the run again with"
                    error = ZbcError("E702", text, hint=f"{hint} --resume auto")
                    self._hung(error) if self.rank == 0 else self._orphaned(_ENDED)
                    return
            elif self._stuck(now) and not self.standing_down:
                if self._report(now):
                    return
                failed_at = now  # another one reports, and still needs this one's heartbeats
                self._tell_stack(board)

    def _beat(self, count: int, now: float) -> Beat:
        p = self._progress.seen(now)
        return Beat(count, p.step, p.index, p.total, p.op, p.waiting, now - max(p.since, self._awake_since))

    def _lost(self, now: float) -> bool:
        """Outside of steps: whether a rank, or the store, gave no heartbeat for `limit` seconds, and at least ten.
        Heartbeats go on however long a phase takes."""
        looked, heard = self._listener.looked, self._listener.heard
        if self._progress.total or not looked:
            return False
        signs = [looked, *(heard[rank].at for rank in self.silent())]
        return now - max(min(signs), self._awake_since) > max(self.limit, _DEAF_S)

    def _stuck(self, now: float) -> bool:
        """Whether no rank has begun an op for `limit` seconds, or one is lost, as far as this rank knows: one that does
        not hear all leaves that to those that do, while it hears anything."""
        listener = self._listener
        if not (listener.all or now - max(listener.looked, self._awake_since) > _DEAF_S):
            return False
        if self._lost(now):
            return True
        if now - max(self._progress.seen(now).since, self._awake_since) < self._patience:
            return False
        slack = 2 * self.tick + 0.5  # heartbeats of others are older than the rank's own data
        others = (rank for rank in self._listener.heard if rank != self.rank)
        return all(self._stood_still(rank, now) >= self._patience - slack for rank in others)

    def _stood_still(self, rank: int, now: float) -> float:
        """Seconds that another rank has been in its op: by its last heartbeat, as long as more can be expected."""
        known = self._listener.heard
        heard, own = known[rank], known.get(self.rank)
        deaf = now - max(self._listener.looked if own is None else own.at, self._awake_since) > _DEAF_S
        return self._idle(heard, now) if deaf or rank in self.silent() else heard.beat.seconds

    def _idle(self, heard: Heard, now: float) -> float:
        return heard.beat.seconds + now - max(heard.at, self._awake_since)

    def _report(self, now: float) -> bool:
        """Reports the op of every rank, unless another rank reports; returns whether this one has."""
        (known, culprits), mute = self.rows(now), self.silent()  # the state now, however long the store takes
        claimed = in_time(lambda: self._board().claim(), _CLAIM_S)
        if claimed is False:
            return False
        p, waited = self._progress.seen(now), max(self.limit, _DEAF_S) if self._lost(now) else self._patience
        when = f"at step {p.step + 1}" if p.total else f"while starting ({p.op})"
        shown = culprits if claimed else [rank for rank in culprits if rank == self.rank]  # others are outdated
        rows = self.lines(known, mute, shown) if self.ranks > 1 else [*known.values()]
        if claimed is None:
            rows.append("the store of the run does not answer, so this is what was known before")
            when += f": {self._host(self.rank)} reaches nobody" if self._host else ""
        elif not culprits:
            rows.append("every rank waits for another: the plan is wrong, or a message was lost; see `zbc check`")
        rows += self._where(shown, mute, ask=claimed is True)
        error = ZbcError("E701", f"run: no progress for {waited:g} s {when}", details=rows)
        self._hung(error)
        return True

    def _stack(self) -> list[str]:
        """The Python stack of the rank's own thread, or of the thread of the op that has the turn."""
        return frames.of_thread(self._progress.thread or self._main)

    def _tell_stack(self, board: Board | None) -> None:
        with suppress(RuntimeError):
            if board is not None:
                board.tell(f"stack/{self.rank}", "\n".join(self._stack()))

    def _where(self, culprits: list[int], mute: list[int], *, ask: bool) -> list[str]:
        """The Python stacks of the ranks that hold the others up, except silent ones; `ask`: the store answers."""
        wanted = [rank for rank in culprits if rank in self._listener.heard and rank not in (self.rank, *mute)]
        stacks = in_time(lambda: self._stacks(wanted), 3 * self.tick + 7.0) if ask and wanted else None
        found = {self.rank: self._stack(), **(stacks or {})}
        lines = []
        for rank in culprits:
            if rank in found:
                lines += [f"{self.name(rank)} is here, innermost call last:", *found[rank]]
            elif ask and rank in self._listener.heard and len(self._gone(rank, mute)) < 2:
                lines.append(f"{self.name(rank)} cannot say where it is: {_MUTE if rank in mute else _LATE}")
        return lines

    def _stacks(self, ranks: list[int]) -> dict[int, list[str]]:
        """Waits for the stacks of these ranks, with a timeout."""
        board, deadline = self._board(), time.monotonic() + 3 * self.tick + 5.0
        while len(found := board.stacks(ranks)) < len(ranks) and time.monotonic() < deadline:
            time.sleep(self.tick / 4)
        return found

    def rows(self, now: float | None = None) -> tuple[dict[int, str], list[int]]:
        """One line per rank that is listened to with its op, and the ranks that hold the others up."""
        now = time.monotonic() if now is None else now
        heard = {**self._listener.heard, self.rank: Heard(self._beat(0, now), now)}
        shown = range(self.ranks) if self._listener.all else sorted(heard)
        silent = {*self.silent(), *(rank for rank in shown if rank not in heard)}
        culprits = sorted(silent) or sorted(rank for rank, last in heard.items() if not last.beat.waiting)
        width = max(len(last.beat.op) for last in heard.values())
        return {rank: self._row(rank, heard.get(rank), now, width, silent=rank in silent) for rank in shown}, culprits

    @functools.cached_property
    def _machines(self) -> dict[str, list[int]]:
        found = dict[str, list[int]]()
        for rank, host in enumerate(map(self._host, range(self.ranks)) if self._host else ()):
            found.setdefault(host, []).append(rank)
        return {host: ranks for host, ranks in found.items() if host}

    def _gone(self, rank: int, silent: Collection[int]) -> list[int]:
        """The ranks on the machine of this one, if all of them are silent."""
        its = self._machines.get(self._host(rank), []) if self._host else []
        return its if set(its) <= {*silent} else []

    def lines(
        self,
        rows: Mapping[int, str],
        mute: Iterable[int],
        culprits: Sequence[int] = (),
        of: Iterable[int] | None = None,
    ) -> list[str]:
        """The rows, or rows `of` some ranks, with arrows at `culprits`; one row for a machine that is silent."""
        found, silent = list[tuple[str, str]](), {*mute}
        who = "the rank that holds" if len(culprits) == 1 else "one of the ranks that hold"
        for rank in rows if of is None else of:
            row = rows[rank]
            its = self._gone(rank, silent)
            arrow = f"   <- {who} the others up" if rank in culprits else ""
            if len(its) < 2:
                found.append((row, arrow))
            elif rank == its[0]:
                host = self._host and self._host(rank)
                text = f"{host} (ranks {', '.join(map(str, its))})  {row.rpartition('  ')[2]}"
                found.append((text, arrow and "   <- the machine that holds the others up"))
        width = max((len(text) for text, _ in found), default=0)
        return [f"{text:{width}}{arrow}" if arrow else text for text, arrow in found]

    def _row(self, rank: int, heard: Heard | None, now: float, width: int, *, silent: bool) -> str:
        if heard is None:
            return f"{self.name(rank)}  never heard of"
        beat = heard.beat
        place = f"op {beat.index:3d}/{beat.total}" if beat.total else "outside of a step"
        state = f"{'waiting' if beat.waiting else 'running'} {self._idle(heard, now):.1f} s"
        if silent:
            state = f"not responding (last heard {now - heard.at:.1f} s ago)"
        return f"{self.name(rank)}  {place}  {beat.op:{width}}  {state}"


def in_time(call: Callable[[], _Result], seconds: float) -> _Result | None:
    """The result of `call`, or None if it fails or takes longer; it may go on in a thread of its own."""
    found: list[_Result] = []

    def run() -> None:
        try:
            found.append(call())
        except (RuntimeError, ZbcError):
            return

    thread = threading.Thread(target=run, name="zbc-in-time", daemon=True)
    with suppress(RuntimeError):  # no memory for one more thread
        thread.start()
        thread.join(seconds)
    return found[0] if found else None


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
    `processes`: `host:pid` of this rank and its neighbours."""
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


class Retrying:
    """Limits the retransmission interval of this process's TCP connections to a second; each look sets new ones.

    TCP retransmits with doubling intervals, so a link that was down for a minute may stay unused for another one. On
    Linux from 6.15 the interval of a socket can be limited: this is set for all sockets of this process, also those of
    gloo, NCCL and the store, which are not Python's. Other kernels keep their intervals.
    """

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
