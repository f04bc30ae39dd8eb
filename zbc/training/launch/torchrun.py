"""Runs this process as one of the ranks started by torchrun or a similar launcher."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch

from zbc.errors import EXIT_INTERRUPTED, RUN_FAILED
from zbc.host.closed_pipe import EXIT_PIPE
from zbc.host.signals import Signals, shares_terminal
from zbc.plan.directory import Manifest
from zbc.runtime.core.private import flight_record
from zbc.runtime.transports.network import bind_loopback
from zbc.text import visible
from zbc.training import devices
from zbc.training.launch.board import Place, open_store
from zbc.training.launch.launch import Ended, RunOptions
from zbc.training.launch.reach import Doorstep, bind_towards
from zbc.training.launch.rounds import joined, launch_of
from zbc.training.metrics.live import Screen
from zbc.training.train import Failure, RankContext, StopFlag, end, run_rank
from zbc.training.watchdog import in_time

_LINGER_S = 10.0  # for the others' last messages to the store, if a rank hosts it and the run has failed
_LAST_S = 30.0  # the same if it has not failed, and all ranks end
_SAY_S = 2.0  # for this rank's own messages
_LEFT = "left"


def run_place(place: Place, manifest: Manifest, options: RunOptions, screen: Screen) -> Ended:
    """Runs this rank. Raises E609 if the store cannot be reached.

    The first rank that fails writes its failure to stderr in one piece, and all processes end here: torchrun hides exit
    codes, and an orderly exit could wait for transfers that never end.
    """
    patience = max(60.0, 2 * float(manifest.training["train"]["watchdog_s"]))
    with ExitStack() as stack:
        early = _end_early if place.local_rank == 0 else lambda name: end(EXIT_INTERRUPTED)
        with Signals(early, early):
            hosted = open_store(place.host, place.port, host_it=True) if place.hosts_store else None
            store = place.connect()
            number = stack.enter_context(joined(store, place.rank, place.ranks, patience))
        launch = launch_of(store, options.launch, number, restarted=options.restarted)
        options = replace(options, restarted=options.restarted or number > 1, launch=launch)
        place = replace(place, keys=f"{place.keys}/{number}")
        ended = _run(place, options, screen)
        part(place, _LAST_S)
    del hosted
    return ended


def _run(place: Place, options: RunOptions, screen: Screen) -> Ended:
    stop = StopFlag()
    device = devices.place(place.local_rank) if options.device == "cuda" else torch.device("cpu")

    def asked(name: str) -> None:
        stop.reason = name
        if not stop.training:  # nothing is lost, and the ranks it waits for may never start
            claimed = in_time(lambda: place.board().claim(), _SAY_S)
            if claimed or (claimed is None and place.rank == 0):
                _end_early(name, lambda: place.board().report(EXIT_INTERRUPTED))
            end(EXIT_INTERRUPTED)

    def leave(code: int) -> NoReturn:
        if code == RUN_FAILED and place.recorder_file is not None and device.type == "cuda":
            in_time(functools.partial(write_flight_record, Path(place.recorder_file)), 5.0)
        part(place, _LINGER_S)
        end(code)

    def report(failure: Failure) -> NoReturn:
        with suppress(OSError):  # all ranks have to end, even if the message cannot be shown
            sys.stdout.flush()
        with suppress(OSError):
            told = visible(failure.render()) + "\n"
            os.write(2, told.encode())  # one write: no other rank's output gets in between
        _tell_torchrun(failure, place.error_file)
        in_time(lambda: place.board().report(failure.exit_code), 5.0)
        leave(failure.exit_code)

    def show(line: str) -> None:
        try:
            screen.say(line)
        except SystemExit:  # the output is closed: end all ranks silently
            board = place.board()
            if in_time(board.claim, 5.0):
                in_time(lambda: board.report(EXIT_PIPE), 5.0)
            leave(EXIT_PIPE)

    doorstep = None
    if place.one_machine:
        bind_loopback()
    elif (interface := bind_towards(place.host)) is not None:
        doorstep = Doorstep(interface, first=place.local_rank == 0)
    context = RankContext(place, options, device, show, report, leave, screen.show, stop, doorstep)
    with Signals(asked, lambda name: end(EXIT_INTERRUPTED), repeated=shares_terminal()):
        return run_rank(context)


def _end_early(name: str, tell: Callable[[], None] = lambda: None) -> NoReturn:
    """Ends this process with a message: a signal came before the first step."""
    with suppress(OSError):
        os.write(2, f"stopped before the first step (asked by {name}); there is nothing to resume\n".encode())
    in_time(tell, _SAY_S)
    end(EXIT_INTERRUPTED)


def part(place: Place, patience: float) -> None:
    """The rank's last message to the store; the rank that hosts it waits for those of all, with a timeout."""

    def say() -> None:
        (board := place.board()).be_there(_LEFT)
        if place.hosts_store:
            board.hear(_LEFT, timedelta(seconds=patience))

    if place.ranks > 1:
        in_time(say, patience if place.hosts_store else _SAY_S)


def write_flight_record(path: Path) -> None:
    """Writes NCCL's last operations, for `torchfrtrace`. torch does so when NCCL times out, but the watchdog ends the
    run long before."""
    with suppress(OSError, TypeError):
        if record := flight_record():
            path.write_bytes(record)


def _tell_torchrun(failure: Failure, path: str | None) -> None:
    """Writes the message for torchrun's own summary, like `elastic.multiprocessing.errors.record`."""
    if path:
        text = failure.render()
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
