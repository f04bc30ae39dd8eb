"""Ranks as processes of a benchmark: started together, watched, and ended with it."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zbc.plan.directory import StoredPlan
    from zbc.runtime.core.state import Worker


@contextmanager
def joined(rank: int, port: int, plan: StoredPlan) -> Iterator[Worker]:
    """The worker of a rank's process, on gloo with the others of the plan; closed behind the block."""
    import torch
    import torch.distributed as dist
    from sleeping import calibrate

    from zbc.plan.directory import RankPlan
    from zbc.runtime.transports.network import Network, bind_loopback
    from zbc.training.worker import build_worker

    torch.set_num_threads(1)
    bind_loopback()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=plan.manifest.topology.world)
    cpu, seat = torch.device("cpu"), plan.manifest.topology.of(rank).pp
    network = Network(plan.manifest, cpu, timedelta(seconds=60))
    ramp = [RankPlan(seat, one.program.ranks[seat], one.manifest) for one in plan.ramp]
    worker = build_worker(RankPlan(seat, plan.program.ranks[seat], plan.manifest), network, cpu, ramp)
    calibrate()
    yield worker
    worker.close()
    dist.destroy_process_group()


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
