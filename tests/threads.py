"""All ranks of a plan as threads of this process, over a hub: for tests and benches.

Threads share torch's random generators. Dropout still equals that of separate processes, since a layer that draws is
seeded and holds a lock while it runs; a layer that also checkpoints its activations draws again in B, without the lock.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.plan.directory import RankPlan, StoredPlan
from zbc.runtime.core.execute import Step, run_step
from zbc.runtime.core.feature import Pause
from zbc.runtime.core.progress import StepResult
from zbc.runtime.core.stage import StageLayer
from zbc.runtime.core.state import Worker
from zbc.runtime.features.shards.gathers import Gathers
from zbc.runtime.transports.hub import Hub
from zbc.training.building.context import Settings
from zbc.training.checkpoint.saving import Checkpoints
from zbc.training.checkpoint.state import load
from zbc.training.evaluate import Evaluations
from zbc.training.guest import Guest, Skips
from zbc.training.launch.board import Board
from zbc.training.probing.shapes import Shapes
from zbc.training.recording.measure import Scale
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
    """Trains up to step `steps`; returns the workers by rank of the run, with their `StepResult`s in `results`.

    `folder`: for checkpoints, as set by the plan's `[checkpoint]`; `resume`: the checkpoint to begin with; `tell` takes
    messages about them.

    `setup` may change each worker before training; each rank's thread runs inside `around()`, and its steps are run by
    `step(worker)`. The first rank that fails stops the others at their next transfer, and its exception is raised here.
    """
    manifest = plan.manifest
    hub = hub or Hub(manifest.topology.world, inside=manifest.topology.inside)
    workers, looks = list[Worker](), dict[int | None, Shapes]()
    for rank in range(manifest.topology.world):
        part = manifest.topology.of(rank).pp
        own = RankPlan(part, plan.program.ranks[part], manifest)
        ramp = [RankPlan(part, start.program.ranks[part], start.manifest) for start in plan.ramp]
        worker = build_worker(own, hub.end(rank), device, ramp, looks=looks)
        if setup is not None:
            setup(worker)
        workers.append(worker)
    failures, store = list[BaseException](), dist.HashStore()  # type: ignore[attr-defined]

    def run(worker: Worker, step: Step) -> None:
        # A new thread has OpenMP's own idea of its number of threads until torch first uses it; oneDNN asks earlier,
        # and convolutions then sum in another order.
        torch.set_num_threads(torch.get_num_threads())
        try:
            with around():
                board = Board(store, worker.rank, manifest.topology.world)
                _train(worker, steps, _checkpoints(worker, board, folder, resume, tell), step)
        except BaseException as error:
            failures.append(error)
            hub.poison(worker.rank, f"{type(error).__name__}: {error}")
        finally:
            worker.close()

    threads = [threading.Thread(target=run, args=(one, step(one)), name=f"rank {one.rank}") for one in workers]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        hub.poison(0, "interrupted")
        raise
    if failures:
        stopped = [isinstance(one, ZbcError) and one.code == "E702" for one in failures]  # since another one failed
        raise failures[stopped.index(False) if False in stopped else 0]
    return workers


def side_by_side(count: int, job: Callable[[int], Any]) -> list[Any]:
    """Runs `job(rank)` on a thread per rank; returns the results, or raises the first exception once all have ended."""
    found, failures = [None] * count, list[BaseException]()

    def run(rank: int) -> None:
        try:
            found[rank] = job(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return found


def losses_of(workers: Sequence[Worker]) -> list[float]:
    return [result.loss for result in workers[0].results]


def norms_of(workers: Sequence[Worker]) -> list[float]:
    return [result.grad_norm for result in workers[0].results]


def numbers(workers: Sequence[Worker]) -> list[tuple[float, float]]:
    """The loss and the gradient norm of each step."""
    return [(result.loss, result.grad_norm) for result in workers[0].results]


def each_parameter(workers: Iterable[Worker]) -> Iterator[tuple[Worker, str, torch.nn.Parameter]]:
    """All parameters of all stages, each with its rank and its name."""
    for worker in workers:
        for stage in worker.stages.values():
            for name, parameter in stage.parameters.items():
                yield worker, name, parameter


def each_layer(workers: Iterable[Worker]) -> list[StageLayer]:
    return [layer for worker in workers for stage in worker.stages.values() for layer in stage.layers]


def scaled(plan: StoredPlan, steps: int = 2) -> tuple[list[Worker], list[Scale]]:
    """The workers of a run, and the memory measured for each."""
    scales = dict[int, Scale]()
    workers = run_threads(plan, steps, setup=lambda worker: scales.update({worker.rank: Scale(worker)}))
    return workers, [scales[rank] for rank in range(len(workers))]


Act = Callable[[Worker, Op], object]


def watch(
    worker: Worker, *, before: Act | None = None, after: Act | None = None, of: Callable[[Op], bool] = lambda op: True
) -> None:
    """Adds calls before and after these ops of a worker's script."""

    def around(handler: Act, worker: Worker, op: Op) -> None:
        if before is not None and of(op):
            before(worker, op)
        handler(worker, op)
        if after is not None and of(op):
            after(worker, op)

    worker.phase_run.wrap([*Kind], around)


def begun(act: Callable[[Worker], object]) -> Callable[[Worker], Step]:
    """A `step` function that calls something before the first step, in the thread of the rank."""

    def run(worker: Worker, number: int, **how: Any) -> StepResult | None:
        if number == 0:
            act(worker)
        return run_step(worker, number, **how)

    return lambda worker: run


def last_of(worker: Worker, *kinds: Kind, stage: int | None = None) -> int:
    """The index of the last op of these kinds in a worker's script."""
    ops = [op for _, op, _ in worker.script]
    return max(i for i, op in enumerate(ops) if op.kind in kinds and stage in (None, op.stage))


def _checkpoints(
    worker: Worker, board: Board, folder: Path | None, resume: Path | None, tell: Callable[[str], None]
) -> Checkpoints:
    options = Settings.of(worker.plan.manifest).checkpoint
    first = 0 if resume is None else load(worker, board, resume, tell=tell)
    if folder is None:
        options, folder = options.model_copy(update={"every": 0}), Path()
    return Checkpoints(worker, board, options, folder, tell=tell, last=first)


class _Keeps(Guest):
    def __init__(self, worker: Worker) -> None:
        self._results = worker.results

    def told(self, result: StepResult) -> None:
        self._results.append(result)


def _train(worker: Worker, steps: int, checkpoints: Checkpoints, run: Step) -> None:
    guests = [_Keeps(worker), Skips(worker.plan.manifest), Evaluations(worker), checkpoints]
    train_steps(worker, range(checkpoints.last, steps), guests, run)
    if not worker.features.of(Gathers).freed:  # tests look at whole weights
        worker.features.of(Gathers).pauses(worker, Pause(whole=True))
