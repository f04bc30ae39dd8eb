"""`zbc run --local N --threads`: all ranks as threads of this process, on one device.

Everything else of a run is as with processes: metrics, checkpoints, traces, the watchdog. On a GPU each rank has a
stream of its own. Ranks share torch's random generators, the GIL and the process: if one crashes, all do.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from zbc.errors import EXIT_INTERRUPTED
from zbc.host.closed_pipe import EXIT_PIPE
from zbc.host.cores import threads_of
from zbc.host.signals import Signals
from zbc.plan.directory import Manifest
from zbc.runtime.cuda import StreamHub
from zbc.runtime.transports.hub import Hub
from zbc.training.launch.board import Place
from zbc.training.launch.local import HOST, PREFIX, host_store
from zbc.training.launch.options import Ended, RunOptions
from zbc.training.metrics.live import Screen
from zbc.training.train import Building, Failure, RankContext, StopFlag, end, run_rank
from zbc.training.watchdog import in_time

_LEAVE_S = 5.0  # for the other ranks to end after a failure


@dataclass(frozen=True)
class _Run:
    """The state shared by the threads of a run."""

    options: RunOptions
    device: torch.device
    hub: Hub
    store: object  # lives as long as a thread that waits in it, which would else abort the process as it ends
    port: int
    screen: Screen
    stops: list[StopFlag]
    ends: queue.SimpleQueue[tuple[int, Failure | Ended]] = field(default_factory=queue.SimpleQueue)
    building: Building = field(default_factory=Building)


def run_threads(manifest: Manifest, options: RunOptions, screen: Screen) -> Ended:
    """Trains with a thread per rank of the plan. Raises the error of the first rank to fail."""
    world = manifest.topology.world
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    store, port = host_store()
    hub = (StreamHub if device.type == "cuda" else Hub)(world, inside=manifest.topology.inside)
    run = _Run(options, device, hub, store, port, screen, [StopFlag() for _ in range(world)])
    threads = [
        threading.Thread(target=_rank, args=(run, rank), name=f"rank {rank}", daemon=True) for rank in range(world)
    ]
    with Signals(lambda name: _ask(run, name), lambda name: end(EXIT_INTERRUPTED)):
        for thread in threads:
            thread.start()
        ended = dict[int, Ended]()
        for _ in threads:
            rank, said = run.ends.get()
            if not isinstance(said, Ended):
                hub.poison(rank, said.render().partition("\n")[0])
                for thread in threads:
                    thread.join(_LEAVE_S / world)
                raise said
            ended[rank] = said
        for thread in threads:
            thread.join()
    return ended[0]


def _ask(run: _Run, name: str) -> None:
    """Asks all ranks to stop. Ends at once before training: nothing is lost, and a rank might wait forever."""
    for stop in run.stops:
        stop.reason = name
    if not all(stop.training for stop in run.stops):
        end(EXIT_INTERRUPTED)


def _rank(run: _Run, rank: int) -> None:
    torch.set_num_threads(threads_of(run.hub.ranks))  # for this thread's kernels, as in a rank's process
    place = Place(rank, run.hub.ranks, HOST, run.port, PREFIX)

    def report(failure: Failure) -> NoReturn:
        run.ends.put((rank, failure))
        in_time(lambda: place.board().report(failure.exit_code), 5.0)
        raise SystemExit

    def leave(code: int) -> NoReturn:
        raise SystemExit  # ends this thread; the rank that reports ends the run

    def show(line: str) -> None:
        try:
            run.screen.say(line)
        except SystemExit:  # the output is closed
            end(EXIT_PIPE)

    context = RankContext(
        place,
        run.options,
        run.device,
        show,
        report,
        leave,
        run.screen.show,
        run.stops[rank],
        transport=run.hub.end(rank),
        building=run.building,
    )
    with suppress(SystemExit), own_stream(run.device):
        run.ends.put((rank, run_rank(context)))


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Makes a new stream current for this thread inside of the block; does nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
