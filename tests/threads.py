"""All ranks of a plan as threads of this process, over a hub: for tests and benches.

Threads share torch's random generators. Dropout is still that of separate processes, since a layer that draws is seeded
and holds a lock while it runs; a layer that also checkpoints its activations draws again in B, outside that lock.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from zbc.errors import ZbcError
from zbc.plan.directory import RankPlan, StoredPlan
from zbc.runtime.core.execute import Step, run_step
from zbc.runtime.core.progress import StepResult
from zbc.runtime.core.state import Worker
from zbc.runtime.features.gathers import Gathers
from zbc.runtime.transports.hub import Hub
from zbc.training.building.context import Settings
from zbc.training.checkpoint.loading import load
from zbc.training.checkpoint.saving import Checkpoints
from zbc.training.launch.board import Board
from zbc.training.nonfinite import Skips
from zbc.training.probing.shapes import Shapes
from zbc.training.train import train_steps
from zbc.training.worker import build_worker

CPU = torch.device("cpu")


def run_threads(
    plan: StoredPlan,
    steps: int,
    *,
    setup: Callable[[Worker], None] | None = None,
    device: torch.device = CPU,
    hub: Hub | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    step: Callable[[Worker], Step] = lambda worker: run_step,
    folder: Path | None = None,
    resume: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Worker]:
    """Train up to step `steps`; the workers, by rank of the run, have their `StepResult`s in `results`.

    `folder` is where checkpoints go, as the plan's `[checkpoint]` has it, and `resume` the one to begin with; `tell`
    takes what is said of them.

    `setup` may change each worker before training; each rank's thread runs inside `around()`, and its steps are run by
    `step(worker)`. The first rank that fails stops the others at their next transfer, and its exception is raised here.
    """
    manifest = plan.manifest
    hub = hub or Hub(manifest.topology.world, tp=manifest.tp)
    workers, looks = list[Worker](), dict[int | None, Shapes]()
    for rank in range(manifest.topology.world):
        part = manifest.topology.of(rank).pp
        own = RankPlan(part, plan.program.ranks[part], manifest)
        ramp = [RankPlan(part, start.program.ranks[part], start.manifest) for start in plan.ramp]
        worker = build_worker(own, hub.end(rank), device, ramp, looks=looks)
        if setup is not None:
            setup(worker)
        workers.append(worker)
    failures: list[BaseException] = []
    store = dist.HashStore()  # type: ignore[attr-defined]
    trainings = [
        _Training(worker, Board(store, worker.rank, manifest.topology.world), steps, folder, resume, tell)
        for worker in workers
    ]
    threads = [
        threading.Thread(
            target=_run, args=(one, hub, failures, around, step(one.worker)), name=f"rank {one.worker.rank}"
        )
        for one in trainings
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
        raise next((one for one in failures if not _told(one)), failures[0])
    return workers


def _told(error: BaseException) -> bool:
    """Whether a rank stopped because another one failed; it may end before that one does."""
    return isinstance(error, ZbcError) and error.code == "E702"


@dataclass(frozen=True)
class _Training:
    """What one rank is to do."""

    worker: Worker
    board: Board
    steps: int
    folder: Path | None
    resume: Path | None
    tell: Callable[[str], None]

    def checkpoints(self) -> Checkpoints:
        worker, options = self.worker, Settings.of(self.worker.plan.manifest).checkpoint
        first = 0 if self.resume is None else load(worker, self.board, self.resume)
        folder = self.folder
        if folder is None:
            options, folder = options.model_copy(update={"every": 0}), Path()
        return Checkpoints(worker, self.board, options, folder, tell=self.tell, last=first)


def _run(
    training: _Training,
    hub: Hub,
    failures: list[BaseException],
    around: Callable[[], AbstractContextManager[object]],
    step: Step,
) -> None:
    # A new thread has OpenMP's own idea of its number of threads until torch first uses it; oneDNN asks earlier, and
    # convolutions then sum in another order.
    torch.set_num_threads(torch.get_num_threads())
    worker = training.worker
    try:
        with around():
            _train(worker, training.steps, training.checkpoints(), step)
    except BaseException as error:
        failures.append(error)
        hub.poison(worker.rank, f"{type(error).__name__}: {error}")
    finally:
        worker.close()


def _train(worker: Worker, steps: int, checkpoints: Checkpoints, run: Step) -> None:
    skips = Skips(worker.plan.manifest)

    def keep(result: StepResult | None) -> None:
        worker.results += [] if result is None else [result]
        skips.look(result)

    train_steps(worker, range(checkpoints.last, steps), checkpoints, run=run, show=keep)
    if not worker.features.of(Gathers).freed:  # tests look at whole weights
        worker.features.of(Gathers).gathers(worker)
