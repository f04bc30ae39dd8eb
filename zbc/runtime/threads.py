"""All ranks of a plan as threads of this process, over a hub: for tests and small demonstrations.

Threads share torch's random generators. Dropout is still that of separate processes, since a layer that draws is seeded
and holds a lock while it runs; a layer that also checkpoints its activations draws again in B, outside that lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from zbc.plan import Plan, RankPlan
from zbc.runtime.evaluate import due, evaluate
from zbc.runtime.execute import Step, finish, run_step
from zbc.runtime.hub import Hub
from zbc.runtime.nonfinite import Skips
from zbc.runtime.progress import StepResult
from zbc.runtime.state import Worker
from zbc.runtime.worker import build_worker

CPU = torch.device("cpu")


def run_threads(
    plan: Plan,
    steps: int,
    *,
    setup: Callable[[Worker], None] | None = None,
    device: torch.device = CPU,
    hub: Hub | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    step: Callable[[Worker], Step] = lambda worker: run_step,
) -> list[Worker]:
    """Train `steps` steps; the workers, by rank of the run, have their `StepResult`s in `results`.

    `setup` may change each worker before training; each rank's thread runs inside `around()`, and its steps are run by
    `step(worker)`. The first rank that fails stops the others at their next transfer, and its exception is raised here.
    """
    manifest = plan.manifest
    hub = hub or Hub(manifest.world)
    workers = []
    for rank in range(manifest.world):
        part = rank % manifest.ranks
        own = RankPlan(part, plan.program.ranks[part], manifest)
        ramp = [RankPlan(part, start.program.ranks[part], start.manifest) for start in plan.ramp]
        worker = build_worker(own, hub.end(rank), device, ramp)
        if setup is not None:
            setup(worker)
        workers.append(worker)
    failures: list[BaseException] = []  # in the order they happened; the others' E702 come after the cause
    threads = [
        threading.Thread(
            target=_run, args=(worker, steps, hub, failures, around, step(worker)), name=f"rank {worker.rank}"
        )
        for worker in workers
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        hub.poison(0, "interrupted")
        raise
    if failures:
        raise failures[0]
    return workers


def _run(
    worker: Worker,
    steps: int,
    hub: Hub,
    failures: list[BaseException],
    around: Callable[[], AbstractContextManager[object]],
    step: Step,
) -> None:
    # A new thread has OpenMP's own idea of its number of threads until torch first uses it; oneDNN asks earlier, and
    # convolutions then sum in another order.
    torch.set_num_threads(torch.get_num_threads())
    try:
        with around():
            _train(worker, steps, step)
    except BaseException as error:
        failures.append(error)
        hub.poison(worker.rank, f"{type(error).__name__}: {error}")
    finally:
        worker.close()


def _train(worker: Worker, steps: int, run: Step) -> None:
    skips = Skips(worker.plan.manifest)

    def keep(result: StepResult | None) -> None:
        worker.results += [] if result is None else [result]
        skips.look(result)

    for step in range(steps):
        result = run(worker, step)
        keep(result)
        if result is not None and result.stop:
            break
        if due(worker, step, last=step + 1 == steps):
            keep(finish(worker))
            evaluate(worker, step)
    keep(finish(worker))
