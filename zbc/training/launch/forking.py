"""The fork server of ranks: a process that has torch loaded and has never used it.

A rank forked from it starts in 50 ms; one that loads torch itself takes 2 s, and forking a process whose torch has run
is not safe. This module does not import torch, so that the fork server can load it while the caller does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from typing import Any

from zbc.host.signals import handled

SAFE = "PYTHONSAFEPATH"


def start_fork_server() -> None:
    """Starts the server, without waiting for it, so that it survives the signals that ask a run to end.

    A job scheduler, `timeout` and a terminal that is closed send them to all processes of the command, and without the
    server the exit codes of the ranks would be lost.
    """
    own = threading.current_thread() is threading.main_thread()  # only this one may ignore signals
    numbers = [number for number in handled() if own and number != signal.SIGINT]  # that the server itself ignores
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in numbers]
    try:
        fork_server()
    finally:
        for number, handler in before:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def fork_server() -> ForkServerContext:
    """The context whose processes are forked; starts the server, without waiting for it, if it does not run."""
    context = multiprocessing.get_context("forkserver")
    # The first random initialisation on the meta device imports torch._dynamo, for 1.3 s on each rank.
    context.set_forkserver_preload(["zbc.training.launch.local", "torch._dynamo"])
    kept = os.environ.get(SAFE)
    os.environ[SAFE] = "1"  # else what is in the current folder comes before the modules that torch looks for
    try:
        ensure_running()
    finally:
        os.environ.pop(SAFE) if kept is None else os.environ.update({SAFE: kept})
    return context


@dataclass
class Child:
    """A forked process, and this end of the pipe to it."""

    process: BaseProcess
    pipe: Connection
    ended: Any = None  # its last word

    @classmethod
    def start(cls, name: str, target: Callable[..., None], *arguments: object) -> Child:
        """Starts a process that runs `target(*arguments, pipe)`."""
        pipe, theirs = multiprocessing.Pipe()
        process = fork_server().Process(target=target, args=(*arguments, theirs), name=name, daemon=True)
        process.start()
        theirs.close()
        return cls(process, pipe)


def kill(children: Collection[Child]) -> None:
    for child in children:
        child.process.kill()
    for child in children:
        child.process.join()
