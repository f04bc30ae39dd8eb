"""Times of each op of a rig, step after step; and of slices of a block, by their tokens and those before them.

Steps alternate: stages keep their activations in one, and recompute them in the next. For jobs with slices a built-in
family's block runs on its sequences whole and in 2, 4 and 8 even slices, with separate B and W.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from zbc.ir import Kind, Op
from zbc.job.profile import Measured, spread
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.optimizer import Masters, build_optimizer
from zbc.runtime.core.state import Handler, Worker
from zbc.training.devices import Laps
from zbc.training.profiling.rig import FUSED, IDLE, SPLIT, Rig

WARM_UP = 2  # rounds that do not count
NAMES = ("f", "f fused", "b", "w", "bw", "step", "norm", "tentative")
KEEP, AGAIN = "f and b", "f and b with recompute"
CLOSE = "close"  # the end of a step without the norm and the optimizer

Samples = dict[tuple[str, str], list[float]]  # kind of layer ("" for CLOSE), and one of these names -> ms


@dataclass
class Stopwatch:
    """Runs a rig and collects its measurements in `samples`."""

    rig: Rig
    device: torch.device
    samples: Samples = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self._worker = worker = self.rig.worker(self.device)
        self._took: dict[tuple[int, str], list[float]] = defaultdict(list)  # stage, name -> ms in this step
        self._steps, self._laps = 0, Laps(self.device)
        worker.phase_run.wrap([kind for kind in Kind if kind.computes or kind.steps], self._timed)
        at = next(index for index, (_, op, _) in enumerate(worker.script) if op.kind.is_barrier)
        steps = [op for _, op, _ in worker.script if op.kind.steps]
        norm = lambda worker, op: self._measure(op.stage, "norm", worker.optimizers[op.stage].squares)  # noqa
        ends = [(norm, op, "NORM") for op in steps]
        ahead = [(self._tentative(op.stage), op, "TENTATIVE") for op in steps]
        worker.script[at:at] = [*ends, *ahead]

    def round(self) -> None:
        """Runs one step that keeps activations and one that recomputes them; the first rounds warm up."""
        keep = self._step(recompute=False)
        again = self._step(recompute=True)
        self._steps += 1
        if self._steps <= WARM_UP:
            return
        for stage, kind in enumerate(self.rig.kinds):
            for name in NAMES:
                self.samples[kind, name] += keep[stage, name]
            for name, took in ((KEEP, keep), (AGAIN, again)):
                self.samples[kind, name] += [f + b for f, b in zip(took[stage, "f"], took[stage, "b"], strict=True)]
        self.samples["", CLOSE] += keep[-1, CLOSE]

    def close(self) -> None:
        self._worker.close()

    def _step(self, *, recompute: bool) -> dict[tuple[int, str], list[float]]:
        worker = self._worker
        for stage, kind in enumerate(self.rig.kinds):
            worker.stages[stage].recompute = len(worker.stages[stage].layers) if recompute and kind != IDLE else 0
        self._took.clear()
        began = time.perf_counter()
        run_step(worker, self._steps)
        self._laps.read()
        whole = (time.perf_counter() - began) * 1e3
        known = sum(sum(found) for found in self._took.values())
        norms = sum(sum(self._took[stage, "norm"]) for stage in worker.stages)  # VALIDATE has them once more
        self._took[-1, CLOSE] = [max(0.0, whole - known - norms)]
        return {key: list(found) for key, found in self._took.items()}

    def _timed(self, handler: Handler, worker: Worker, op: Op) -> None:
        name = op.kind.value.lower()
        if op.kind.computes and op.mb not in (*SPLIT, *FUSED):
            name = "first"  # it makes gradients, all others accumulate
        elif op.kind.is_forward and op.mb in FUSED:
            name = "f fused"
        self._measure(op.stage, name, lambda: handler(worker, op))

    def _tentative(self, stage: int) -> Callable[[Worker, Op], None]:
        """A handler that measures a tentative step of a stage, by a separate optimizer that has made one step."""
        built: list[Masters] = []

        def run(worker: Worker, op: Op) -> None:
            if not built:
                of, model = worker.stages[stage], self.rig.job.model
                low = torch.bfloat16 if model.lowered else None
                how: Any = {"lowered": low, "masters": model.master, "ahead": True}
                options = self.rig.job.optimizer.model_copy(update={"lr": 0.0})
                made: Any = build_optimizer(options, of.parameters, of.casts, **how)
                made.commit(None)
                built.append(made)
            self._measure(stage, "tentative", built[0].tentative)

        return run

    def _measure(self, stage: int, name: str, call: Callable[[], object]) -> None:
        self._laps.take(call, self._took[stage, name])


def measured(values: Sequence[float], less: float = 0.0) -> Measured:
    """The median of `values` minus `less`; never below 0."""
    middle = median(values)
    rest = max(0.0, middle - less)
    return Measured(ms=rest, spread=spread(values) * middle / rest if rest > 0.05 * middle else 0.0)


def quick(values: Sequence[float]) -> float:
    """The first decile of `values`: the time of a short call without interruptions by other threads."""
    found = sorted(values)
    return found[len(found) // 10] if found else 0.0


BLOCK = "block"  # the kind of the layers that slices are measured of
COUNTS = (1, 2, 4, 8)
ROUNDS = 3  # steps that count, of one microbatch each, after one that warms up

Took = dict[tuple[int, int], dict[str, float]]  # rows and tokens before them -> ms of f, b and w


def slice_times(rig: Rig, device: torch.device) -> Took:
    """ms of F, B and W of each slice; empty if the job has no slices, or the rig no block of a family."""
    length = rig.job.model.seq_len or 0
    if rig.job.schedule.slices == 1 or BLOCK not in rig.kinds:
        return {}
    rig = rig.plain()
    found: dict[tuple[int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for count in COUNTS:
        if count <= length:
            cuts = [length * j // count for j in range(count + 1)]
            for (part, name), took in _measured(rig, device, cuts).items():
                start, stop = [*pairwise(cuts)][part]
                found[stop - start, start][name] += took
    return {place: {name: quick(took) for name, took in times.items()} for place, times in sorted(found.items())}


def _measured(rig: Rig, device: torch.device, cuts: list[int]) -> dict[tuple[int, str], list[float]]:
    worker, stage = rig.worker(device, microbatches=2, cuts=cuts), rig.kinds.index(BLOCK)
    took: dict[tuple[int, str], list[float]] = defaultdict(list)
    laps = Laps(device)

    def around(handler: Handler, worker: Worker, op: Op) -> None:
        if op.stage != stage:
            handler(worker, op)
            return
        into = took[op.slice, op.kind.value.lower()] if op.mb else []  # the first microbatch makes the gradients
        laps.take(partial(handler, worker, op), into)

    worker.phase_run.wrap([kind for kind in Kind if kind.computes], around)
    run_step(worker, 0)
    laps.read()
    took.clear()
    for step in range(ROUNDS):
        run_step(worker, step)
    laps.read()
    worker.close()
    return took
