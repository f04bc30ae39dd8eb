"""Ranks as processes of a benchmark: started together, watched, and ended with it."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


def results(
    target: Callable[..., None],
    arguments: tuple[Any, ...],
    *,
    ranks: int,
    count: int,
    preload: tuple[str, ...],
    limit: float,
) -> Iterator[Any]:
    """Run `target(rank, *arguments, sender)` on every rank; gives the `count` things that rank 0 sends.

    `preload` is imported once for all ranks. Ends the benchmark if a rank fails or not all came in `limit` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", *preload])
    receiver, sender = context.Pipe(duplex=False)
    processes = [context.Process(target=target, args=(rank, *arguments, sender), daemon=True) for rank in range(ranks)]
    end = time.monotonic() + limit
    try:
        for process in processes:
            process.start()
        for _ in range(count):
            while not receiver.poll(0.5):
                if any(process.exitcode for process in processes):
                    sys.exit(f"{sys.argv[0]}: a rank failed")
                if time.monotonic() > end:
                    sys.exit(f"{sys.argv[0]}: no result after {limit:.0f} s")
            yield receiver.recv()
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
