"""Times of slices of a block, by their tokens and those before them, for planning jobs with slices.

A built-in family's block runs on its sequences whole and in 2, 4 and 8 even slices, with separate B and W.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import pairwise

import torch

from zbc.ir import Kind, Op
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.state import Handler, Worker
from zbc.training.devices import Laps
from zbc.training.profiling.rig import Rig
from zbc.training.profiling.times import quick

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
    """ms of each slice's ops on the block's stage."""
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
