"""Exponential moving average (EMA) of the weights that each rank updates, saved in checkpoints, used by evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from zbc.job import spec
from zbc.runtime.core.feature import Context, Feature
from zbc.runtime.core.optimizer import Masters, OptimizerOver, StageOptimizer, also_kept, inside
from zbc.runtime.features.gathers import Gathers

if TYPE_CHECKING:
    from zbc.runtime.core.state import Worker

MEAN = "ema"  # key of a parameter's average in the optimizer's state, for checkpoints


class Mean(OptimizerOver):
    """A `StageOptimizer` that keeps the EMA of the weights it updates, with the factor `decay` per step."""

    def __init__(self, inner: StageOptimizer, decay: float) -> None:
        super().__init__(inner)
        also_kept(inner, MEAN)
        self._decay = decay

    def step(self, scale: float | None) -> None:
        self._behind(super().step, scale)

    def commit(self, scale: float | None) -> None:
        self._behind(super().commit, scale)

    @torch.no_grad()
    def _behind(self, step: Callable[[float | None], None], scale: float | None) -> None:
        """Steps, and updates the average."""
        optimizer, stepped = self.optimizer, [one.tensor for one in self._inner.held() if one.tensor.requires_grad]
        first = [] if optimizer is None else [one for one in stepped if MEAN not in optimizer.state.get(one, {})]
        begun = [(one, one.data.clone()) for one in first]  # the average begins with the weights before the first step
        step(scale)
        if optimizer is None:
            return
        for one, before in begun:
            if optimizer.state[one] or isinstance(optimizer, torch.optim.SGD):  # Adam would take any state for its own
                optimizer.state[one][MEAN] = before
        for one in stepped:
            if (mean := optimizer.state.get(one, {}).get(MEAN)) is not None:
                mean.lerp_(one.data, 1 - self._decay)

    def swap(self) -> None:
        """Swaps the average and the weights."""
        state = {} if self.optimizer is None else self.optimizer.state
        for one in self._inner.held():
            if (mean := state.get(one.tensor, {}).get(MEAN)) is not None:
                before = one.tensor.data.clone()
                one.tensor.data.copy_(mean)
                mean.copy_(before)
        if (masters := inside(self._inner, Masters)) is not None:
            masters.publish()


def with_mean(options: spec.Optimizer, inner: StageOptimizer) -> StageOptimizer:
    """The optimizer with an EMA of its weights, if the job sets one."""
    return inner if options.ema is None else Mean(inner, options.ema)


class Moving(Feature):
    """The averages of all owners of a rank."""

    def __init__(self, means: list[Mean]) -> None:
        self._means = means

    def evaluates(self, worker: Worker) -> None:
        """Swaps averages and weights, and gathers sharded weights again."""
        if not self._means:
            return
        for one in self._means:
            one.swap()
        gathers = worker.features.of(Gathers)
        for dealt in gathers.stages.values():
            if dealt not in gathers.gathered:  # these are gathered anyway for a task between steps
                gathers.start(worker, dealt, whole=True)
                gathers.finish(worker)
        for stage in worker.stages.values():
            for cast in stage.casts:
                cast.forget()

    trains = evaluates


def build(context: Context) -> Moving:
    found = (inside(one, Mean) for one in context.optimizers.values())
    return Moving([one for one in found if one is not None])
