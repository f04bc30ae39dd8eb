"""Microbatches that weigh as many targets as count in them, in the mean over a step.

A loss is a mean over the targets that count, in the step as a whole. Means of microbatches in which other numbers of
targets count are not to be averaged: each is weighed by its number. A rank that computes losses reads the targets of
the whole step for that, of all replicas; it keeps its own until they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.job import userobject
from zbc.job.userobject import IN_A_RANK
from zbc.plan.phases import Phases
from zbc.runtime.core.state import BatchSource
from zbc.runtime.core.tensors import Loss, TensorSpec
from zbc.runtime.features.words import IGNORED
from zbc.runtime.seeding import seed_of, seeded

Count = Callable[[Tensor], float]
_STEPS = 3  # that are remembered: one without a flush begins the next


def count_of(loss: Any, name: str, target: Tensor) -> Count | None:
    """How many targets count, by what the loss says of itself; else of whole numbers those that are not IGNORED.

    None where all weigh alike: mean squared errors, and floating-point numbers, as `target` is, which all count.
    """
    own = getattr(loss, "count", None)
    if own is None:
        return None if name == "mse" or target.is_floating_point() or target.is_complex() else counting

    def counted(target: Tensor) -> float:
        found = float(userobject.call(lambda: own(target), {}, f"{name}.count", "model.loss"))
        if not 0 <= found < float("inf"):
            text = f"model: {name}.count gave {found:g} for a target of shape {list(target.shape)}"
            raise ZbcError("E513", text, hint="return how many targets count: a finite number from 0 on")
        return found

    return counted


def counting(target: Tensor) -> float:
    """Whole numbers that are not IGNORED."""
    return int((target != IGNORED).sum())


def no_mean(name: str, loss: Loss, output: TensorSpec, targets: Tensor) -> str | None:
    """What to say of a loss that is no mean over the targets that count: of all samples it is not the mean, so weighed,
    of what it is for each half. `targets` are some real ones.

    The training then depends on how many microbatches a step has. Some losses are meant so, which compare samples.
    """
    counts, half = count_of(loss, name, targets) or (lambda target: float(target.numel())), len(targets) // 2
    if not half or not output.dtype.is_floating_point:
        return None
    cuts = (slice(None), slice(half), slice(half, None))
    with seeded(seed_of("mean")), torch.no_grad():
        made = torch.randn((len(targets), *output.shape[1:]), dtype=output.dtype)
        try:
            (all_, whole), *halves = ((counts(targets[cut]), float(loss(made[cut], targets[cut]))) for cut in cuts)
        except IN_A_RANK:
            return None  # for numbers that a model never gives, perhaps; training will tell
    mean = sum(weight * value for weight, value in halves if weight) / (all_ or 1.0)
    if not math.isfinite(whole) or math.isclose(whole, mean, rel_tol=1e-3, abs_tol=1e-6):
        return None
    found = f"{whole:.6g} for {len(targets)} samples, {halves[0][1]:.6g} and {halves[1][1]:.6g} for its halves"
    return (
        f"model.loss = {name} is no mean over the targets that count ({found}): what is trained depends on"
        " schedule.microbatches; return the mean, and let its attribute count say how many targets count"
    )


class Counted(BatchSource):
    """Weighs its microbatches; `groups` are those of a step that one mean is over."""

    def __init__(
        self,
        source: BatchSource,
        count: Count,
        groups: Callable[[int], Sequence[Sequence[int]]],
        own: Callable[[int, int], bool],
        *,
        parts: bool = False,
        tell: int = 1,
    ) -> None:
        """`own`: whether this rank's replica asks for a microbatch of a step. `parts`: weights are shares of the whole,
        instead of 1 on the mean. `tell`: ranks that share the tokens of a microbatch."""
        self._source, self._count, self._groups, self._own, self._parts = source, count, groups, own, parts
        self._tell = tell
        self._weights: dict[int, dict[int, float]] = {}
        self._targets: dict[tuple[int, int], Tensor] = {}

    @property
    def count(self) -> int:
        return self._source.count

    def inputs(self, step: int, mb: int, group: str = "") -> Tensor:
        return self._source.inputs(step, mb, group) if group else self._source.inputs(step, mb)

    def targets(self, step: int, mb: int) -> Tensor:
        self._of(step)
        known = self._targets.pop((step, mb), None)
        return self._source.targets(step, mb) if known is None else known

    def weight(self, step: int, mb: int) -> float:
        return self._of(step)[mb]

    def digest(self) -> int:
        return self._source.digest()

    def follow(self, phases: Phases) -> None:
        self._weights.clear()
        self._targets.clear()
        self._source.follow(phases)

    def close(self) -> None:
        self._source.close()

    def _of(self, step: int) -> dict[int, float]:
        found = self._weights.get(step)
        if found is None:
            while len(self._weights) >= _STEPS:
                del self._weights[next(iter(self._weights))]
            self._targets = {place: target for place, target in self._targets.items() if place[0] in self._weights}
            found = self._weights[step] = {}
            for group in self._groups(step):
                counts = [self._look(step, mb) for mb in group]
                total, size = sum(every for _, every in counts), 1 if self._parts else len(group) * self._tell
                found |= {mb: own * size / total if total else 0.0 for mb, (own, _) in zip(group, counts, strict=True)}
        return found

    def _look(self, step: int, mb: int) -> tuple[float, float]:
        """How many targets count of those that this rank has, and of all of a microbatch."""
        whole = self._source.whole(step, mb)
        target = self._source.own(whole)
        if self._own(step, mb):
            self._targets[step, mb] = target
        every = self._count(whole)
        return every if target is whole else self._count(target), every
