"""`zbc run --local N`: all ranks as processes of this machine, on its CPU or its GPUs; or as threads of this one.

This process hosts the store, starts the ranks from a fork server that has torch loaded (0.2 s for four ranks instead of
8 s), shows the output of rank 0 and supervises. If a rank dies or fails the others are killed at once, stopped ones
too, and a rank whose parent is gone ends itself. With `--max-restarts` all of them are then started again, with another
store, and resume from the newest checkpoint.

With `--threads` everything else of a run is as with processes: metrics, checkpoints, traces, the watchdog. On a GPU
each rank has a stream of its own. Ranks share torch's random generators, the GIL and the process: if one crashes, all
do.
"""

from __future__ import annotations

import functools
import os
import queue
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from zbc.errors import EXIT_INTERRUPTED, RUN_FAILED, ZbcError
from zbc.host.closed_pipe import EXIT_PIPE
from zbc.host.cores import threads_of
from zbc.host.signals import Signals, handled
from zbc.plan.directory import Manifest
from zbc.runtime.cuda import StreamHub
from zbc.runtime.transports.hub import Hub
from zbc.runtime.transports.network import bind_loopback
from zbc.training import devices
from zbc.training.launch.board import Board, Place, plain_name, prefixed
from zbc.training.launch.forking import Child, kill
from zbc.training.launch.launch import Ended, RunOptions
from zbc.training.metrics.live import Screen
from zbc.training.train import Building, Failure, RankContext, RankFailed, StopFlag, end, run_rank
from zbc.training.watchdog import in_time

if TYPE_CHECKING:
    from zbc.runtime.core.private import Store

HOST, PREFIX = "127.0.0.1", "zbc"
_NOT_STARTED = "it had not started yet"
_ASK_S = 2.0  # for the store, which this process hosts, to answer
_LAST_WORD_S = 20.0  # for a rank that is about to report why the run ends


@dataclass
class Parent:
    emit: Callable[[str], None]
    board: Board | None = None
    children: dict[int, Child] = field(default_factory=dict)
    name: Callable[[int], str] = plain_name  # of a rank, for messages
    asked: str | None = None
    insisted: bool = False
    live: Callable[[str], None] = lambda text: None
    saves: bool = False  # whether there are checkpoints to continue from


def run_local(manifest: Manifest, options: RunOptions, screen: Screen) -> Ended:
    """Trains with one process per rank of the plan, for each replica of the pipeline.

    Raises the error of the first rank to fail: ZbcError (E702 if it died), RankFailed for an unexpected one;
    KeyboardInterrupt if signals ended it before its first step, or at once.
    """
    saves = bool(manifest.training.get("checkpoint", {}).get("every"))
    parent = Parent(screen.say, name=manifest.topology.name, live=screen.show, saves=saves)
    read, write = os.pipe()

    def asked(name: str) -> None:
        parent.asked = name
        os.write(write, b"a")

    def insisted(name: str) -> None:
        parent.insisted = True
        os.write(write, b"i")

    options = replace(options, launch=uuid.uuid4().hex, plan=options.plan.absolute())
    try:
        with Signals(asked, insisted):
            _run_again(parent, options, lambda again: _run_once(parent, manifest.topology.world, again, read))
    finally:
        os.close(read)
        os.close(write)
    ended: Ended = parent.children[0].ended  # else the parent raises
    return ended


def _run_again(parent: Parent, options: RunOptions, once: Callable[[RunOptions], None]) -> None:
    """Runs until the training ends, or has failed more than `max_restarts` times."""
    for restart in range(1, options.max_restarts + 1):
        try:
            return once(options)
        except (ZbcError, RankFailed) as failure:
            if parent.asked is not None or not worth_a_restart(failure):
                raise
            told = failure.message if isinstance(failure, ZbcError) else str(failure).rstrip().rpartition("\n")[2]
            parent.emit(f"restart {restart} of {options.max_restarts}, since {told.removeprefix('run: ')}")
            options = replace(options, restarted=True)
    return once(options)


def worth_a_restart(failure: Failure) -> bool:
    """Whether a restart may succeed: not after errors of the job, the data, the environment or the gradients."""
    return isinstance(failure, RankFailed) or (failure.exit_code == RUN_FAILED and failure.code != "E704")


def _run_once(parent: Parent, ranks: int, options: RunOptions, wake: int) -> None:
    """Starts all ranks, with a store of their own, and supervises them to their end."""
    store, port = host_store()
    parent.board = Board(prefixed(PREFIX, store), rank=-1, ranks=ranks)
    parent.children = {}
    try:
        with _ended(parent):
            for rank in range(ranks):
                place = Place(rank, ranks, HOST, port, PREFIX, local_rank=rank)
                parent.children[rank] = Child.start(f"rank {rank}", _rank, place, options)
            _supervise(parent, wake)
    finally:  # an exception may keep this frame, and thereby the port, alive
        parent.board = None
        del store


def host_store() -> tuple[Store, int]:
    """A store that listens on the loopback interface only."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    limit = timedelta(seconds=30)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        HOST, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
    )
    return store, port


# ---- the parent ----------------------------------------------------------------------------------------------


@contextmanager
def _ended(parent: Parent) -> Iterator[None]:
    """Kills all ranks at the end of its block. That is safe: files of a rank are complete after every line. If the run
    has failed, output that ranks had sent by then is still shown."""
    try:
        yield
    except (ZbcError, RankFailed):
        kill(parent.children.values())
        for child in parent.children.values():
            with suppress(EOFError, OSError):  # the last message may be cut off
                while not child.pipe.closed and child.pipe.poll():
                    kind, content = child.pipe.recv()
                    if kind == "line":  # failures other than the first are ignored
                        parent.emit(content)
        raise
    finally:
        kill(parent.children.values())
        for child in parent.children.values():
            child.pipe.close()


def _supervise(parent: Parent, wake: int) -> None:
    told = False
    while not all(child.ended for child in parent.children.values()):
        pipes = {child.pipe: rank for rank, child in parent.children.items() if not child.pipe.closed}
        ends = {child.process.sentinel: rank for rank, child in parent.children.items() if not child.ended}
        ready = wait([*pipes, *ends, wake])
        for pipe in (event for event in ready if isinstance(event, Connection)):
            _listen(parent, parent.children[pipes[pipe]])
        for rank in (ends[event] for event in ready if isinstance(event, int) and event in ends):
            _bury(parent, rank)
        if parent.insisted:
            raise KeyboardInterrupt
        if parent.asked is not None and not told:
            told = True
            os.read(wake, 1)
            for child in parent.children.values():
                _send(child.pipe, parent.asked)


def _listen(parent: Parent, child: Child) -> None:
    try:
        kind, content = child.pipe.recv()
    except (EOFError, OSError):
        child.pipe.close()
        return
    if kind == "line":
        parent.emit(content)
    elif kind == "live":
        parent.live(content)
    elif kind == "failed":
        if isinstance(content, ZbcError) and content.code == "E702":  # perhaps the lost connection of a dead rank
            for rank, other in parent.children.items():
                if not other.ended and other.process.exitcode not in (None, 0, RUN_FAILED):
                    _bury(parent, rank)
        raise content
    else:
        child.ended = content


def _bury(parent: Parent, rank: int) -> None:
    """Handles the end of a rank's process: reads its last messages, and raises if it was not done. A terminal sends its
    signals to ranks as well. One that did not yet ignore them is not a failure of the run."""
    child = parent.children[rank]
    while not child.pipe.closed and child.pipe.poll():
        _listen(parent, child)
    if child.ended:
        return
    child.process.join()
    code = child.process.exitcode
    if code == RUN_FAILED:  # it ends silently if another one reports, whose messages are read
        reporter = None if parent.board is None else in_time(parent.board.failed, _ASK_S)
        other = None if reporter is None or reporter == rank else parent.children.get(reporter)
        while other is not None and not other.pipe.closed and other.pipe.poll(_LAST_WORD_S):
            _listen(parent, other)
    how = f"ended with exit code {code}" if code is None or code >= 0 else f"was killed by {signal.Signals(-code).name}"
    memory = "if nobody killed it, the kernel did for want of memory: see its log (dmesg)"
    hints = [memory] * (code == -signal.SIGKILL) + ["--resume auto goes on from the newest checkpoint"] * parent.saves
    seen = _last_seen(parent, rank)
    if parent.asked is not None and seen == [_NOT_STARTED]:
        raise KeyboardInterrupt
    raise ZbcError("E702", f"run: {parent.name(rank)} {how}", hint="; ".join(hints) or None, details=seen)


def _last_seen(parent: Parent, rank: int) -> list[str]:
    beats = None if parent.board is None else in_time(parent.board.beats, _ASK_S)
    if beats is None:
        return []
    beat = beats.get(rank)
    if beat is None:
        return [_NOT_STARTED]
    if not beat.total:
        return [f"it was last heard outside of a step: {beat.op}"]
    return [f"it was last heard in step {beat.step + 1}, op {beat.index} of {beat.total}: {beat.op}"]


# ---- the ranks -----------------------------------------------------------------------------------------------


def _rank(place: Place, options: RunOptions, pipe: Connection) -> None:
    for number in handled():
        signal.signal(number, signal.SIG_IGN)  # the terminal sends them to all; the parent asks to stop
    lock, stop = threading.Lock(), StopFlag()

    def tell(kind: str, content: Any) -> None:
        with lock:  # the watchdog writes, too
            _send(pipe, (kind, content))

    def fail(failure: Failure) -> NoReturn:
        tell("failed", failure)
        end(failure.exit_code)

    threading.Thread(target=_obey, args=(pipe, stop), name="zbc-parent", daemon=True).start()
    bind_loopback()
    torch.set_num_threads(threads_of(place.ranks))
    device = torch.device("cpu") if options.device == "cpu" else devices.place(place.local_rank)
    say, show = (functools.partial(tell, kind) for kind in ("line", "live"))
    tell("done", run_rank(RankContext(place, options, device, say, fail, end, show, stop)))
    end(0)


def _obey(pipe: Connection, stop: StopFlag) -> None:
    """Waits for the parent's request to stop. Ends this process if the parent is gone."""
    while True:
        try:
            stop.reason = pipe.recv()
        except (EOFError, OSError):
            os._exit(RankFailed.exit_code)


def _send(pipe: Connection, content: Any) -> None:
    try:
        pipe.send(content)
    except (BrokenPipeError, ConnectionResetError):
        return  # the other end is gone, which both sides detect by other means


# ---- ranks as threads, on one device ---------------------------------------------------------------------------

_LEAVE_S = 5.0  # for the other ranks to end after a failure


def run_threads(manifest: Manifest, options: RunOptions, screen: Screen) -> Ended:
    """Trains with a thread per rank of the plan. Raises the error of the first rank to fail."""
    world = manifest.topology.world
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    store, port = host_store()
    hub = (StreamHub if device.type == "cuda" else Hub)(world, inside=manifest.topology.inside)
    stops, building = [StopFlag() for _ in range(world)], Building()
    ends = queue.SimpleQueue[tuple[int, Failure | Ended]]()

    def show(line: str) -> None:
        try:
            screen.say(line)
        except SystemExit:  # the output is closed
            end(EXIT_PIPE)

    def leave(code: int) -> NoReturn:
        raise SystemExit  # ends this thread; the rank that reports ends the run

    def run(rank: int, held: Store) -> None:  # a thread that waits in the store would abort the process as it ends
        torch.set_num_threads(threads_of(world))  # for this thread's kernels, as in a rank's process
        place = Place(rank, world, HOST, port, PREFIX)

        def report(failure: Failure) -> NoReturn:
            ends.put((rank, failure))
            in_time(lambda: place.board().report(failure.exit_code), 5.0)
            raise SystemExit

        context = RankContext(
            place, options, device, show, report, leave, screen.show, stops[rank], None, hub.end(rank), building
        )
        with suppress(SystemExit), own_stream(device):
            ends.put((rank, run_rank(context)))

    def ask(name: str) -> None:
        """Asks all ranks to stop. Ends at once before training: nothing is lost, and a rank might wait forever."""
        for stop in stops:
            stop.reason = name
        if not all(stop.training for stop in stops):
            end(EXIT_INTERRUPTED)

    threads = [
        threading.Thread(target=run, args=(rank, store), name=f"rank {rank}", daemon=True) for rank in range(world)
    ]
    with Signals(ask, lambda name: end(EXIT_INTERRUPTED)):
        for thread in threads:
            thread.start()
        ended = dict[int, Ended]()
        for _ in threads:
            rank, said = ends.get()
            if not isinstance(said, Ended):
                hub.poison(rank, said.render().partition("\n")[0])
                for thread in threads:
                    thread.join(_LEAVE_S / world)
                raise said
            ended[rank] = said
        for thread in threads:
            thread.join()
    return ended[0]


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Makes a new stream current for this thread inside of the block; does nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
