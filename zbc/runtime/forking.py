"""The process that ranks are forked from: it has torch loaded and has never used it.

A rank forked from it starts in 50 ms; one that loads torch itself takes 2 s, and forking a process whose torch has run
is not safe. This module does not import torch, so that the fork server can load it while the caller does.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running


def fork_server() -> ForkServerContext:
    """The context whose processes are forked; starts the server, without waiting for it, if it does not run."""
    context = multiprocessing.get_context("forkserver")
    # The first random initialisation on the meta device imports torch._dynamo, for 1.3 s on each rank.
    context.set_forkserver_preload(["zbc.runtime.local", "torch._dynamo"])
    ensure_running()
    return context
