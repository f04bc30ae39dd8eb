"""Microbatches weighted by the number of targets that count, in the mean over a step.

The loss of a step is the mean over all its targets that count. If microbatches have different numbers of them, their
means are weighted by these numbers. For that a rank that computes losses reads the targets of the whole step, of all
replicas; its source keeps its own until they are requested (data.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.job import userobject
from zbc.job.userobject import IN_A_RANK
from zbc.runtime.core.bundle import ByName, shown, taken_apart
from zbc.runtime.core.state import PhaseRun, Work, run_of
from zbc.runtime.core.tensors import IGNORED, Batch, Loss, each
from zbc.runtime.seeding import seed_of, seeded
from zbc.topology import Topology

Count = Callable[[Any], float]  # of a `Batch`
_STEPS = 3  # cached steps: without a flush the next step begins before the end of one


def count_of(loss: Any, name: str, target: Batch) -> Count | None:
    """A function that counts targets: the loss's own attribute `count`, otherwise integers that are not IGNORED. None
    if all microbatches have equal weights: for mean squared errors, a floating-point `target` and several ones."""
    own = getattr(loss, "count", None)
    if own is None:
        if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex() or name == "mse":
            return None
        return counting
    own = ByName(own)

    def counted(target: Batch) -> float:
        found = float(userobject.call(lambda: own(target), {}, f"{name}.count", "model.loss"))
        if not 0 <= found < float("inf"):
            text = f"model: {name}.count gave {found:g} for a target {shown(target)}"
            raise ZbcError("E513", text, hint="return how many targets count: a finite number from 0 on")
        return found

    return counted


def counting(target: Tensor) -> float:
    """The number of integers that are not IGNORED."""
    return int((target != IGNORED).sum())


def rows_of(batch: Batch) -> int:
    return len(batch if isinstance(batch, Tensor) else next(iter(batch.values())))


def no_mean(name: str, loss: Loss, output: Any, targets: Batch) -> str | None:
    """A warning if a loss is not a mean over the targets that count: its value for all samples is not the weighted mean
    of its values for both halves. `targets` are some real ones, `output` is a made-up one of the last layer for them.

    The training then depends on the number of microbatches of a step, as intended for losses that compare samples.
    """
    counts, rows = count_of(loss, name, targets) or rows_of, rows_of(targets)
    half = rows // 2
    tensors, form = taken_apart(output)
    if not half or not any(tensor.is_floating_point() for tensor in tensors):
        return None

    def told(cut: slice) -> tuple[float, float]:
        made = [tensor[cut] if tensor.shape[:1] == (rows,) else tensor for tensor in tensors]
        whole: Any = tuple(made) if form is None else form.around(made)
        target = each(lambda tensor: tensor[cut], targets)
        return counts(target), float(loss(whole, target))

    try:
        with seeded(seed_of("mean")), torch.no_grad():
            (all_, whole), *halves = map(told, (slice(None), slice(half), slice(half, None)))
    except IN_A_RANK:
        return None  # perhaps only for outputs that the model never gives; training would raise it
    mean = sum(weight * value for weight, value in halves if weight) / (all_ or 1.0)
    if not math.isfinite(whole) or math.isclose(whole, mean, rel_tol=1e-3, abs_tol=1e-6):
        return None
    found = f"{whole:.6g} for {rows} samples, {halves[0][1]:.6g} and {halves[1][1]:.6g} for its halves"
    return (
        f"model.loss = {name} is no mean over the targets that count ({found}): what is trained depends on"
        " schedule.microbatches; return the mean, and let its attribute count say how many targets count"
    )


class Weights:
    """The weights of microbatches by the `count` of their targets, on a rank of the run; `runs` by phase."""

    def __init__(self, runs: Sequence[PhaseRun], work: Work, topology: Topology, rank: int, count: Count) -> None:
        self._runs, self._work, self.count = runs, work, count
        self._dp, self._replica = topology.dp, topology.of(rank).dp
        self.of = lru_cache(_STEPS)(self._counted)

    def own(self, step: int, number: int) -> bool:
        """Whether this rank's replica runs a microbatch of a step."""
        return number in self._numbers(step, self._replica)

    def _numbers(self, step: int, replica: int) -> range:
        """The microbatches of a replica in a step."""
        run, here = self._run_of(step), self._work.count(step, replica)
        first = replica * (self._work.most or run.count)
        return range(first, first + (run.count if here is None else here))

    def _run_of(self, step: int) -> PhaseRun:
        return run_of(self._runs, self._work, self._work.phases, step, self._replica)

    def _groups(self, step: int) -> list[list[int]]:
        """All microbatches of a step, those of replicas that average weights, or of a stage's step without a flush."""
        run = self._run_of(step)
        together = self._dp // run.layout.apart
        first = self._replica // together * together
        replicas = [self._numbers(step, replica) for replica in range(first, first + together)]
        if run.layout.weighted:
            return [[number for span in replicas for number in span]]
        every = run.ending.every or run.count
        return [[number for span in replicas for number in span[i : i + every]] for i in range(0, run.count, every)]

    def _counted(self, step: int, counts: Callable[[int, int], tuple[float, float]]) -> dict[int, float]:
        """By microbatch, from the counts of this rank's tokens and of all tokens of each: shares of the whole if losses
        are parts of the step's, otherwise 1 on average."""
        found, layout = dict[int, float](), self._runs[0].layout
        for group in self._groups(step):
            each = [counts(step, mb) for mb in group]
            total, size = sum(every for _, every in each), 1 if layout.weighted else len(group) * layout.tell
            found |= {mb: own * size / total if total else 0.0 for mb, (own, _) in zip(group, each, strict=True)}
        return found
