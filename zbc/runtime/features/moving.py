"""Exponential moving average (EMA) of the weights that each rank updates, saved in checkpoints, used by evaluations."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zbc.runtime.core.feature import Context, Feature, Pause
from zbc.runtime.core.optimizer import Masters, StageOptimizer, also_kept, inside
from zbc.runtime.core.state import Worker
from zbc.runtime.features.shards.gathers import Gathers

MEAN = "ema"  # key of a parameter's average in the optimizer's state, for checkpoints


class Mean(StageOptimizer):
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
        optimizer, stepped = self.optimizer, [held.tensor for held in self._inner.held() if held.tensor.requires_grad]
        first = [] if optimizer is None else [p for p in stepped if MEAN not in optimizer.state.get(p, {})]
        begun = [(p, p.data.clone()) for p in first]  # the average begins with the weights before the first step
        step(scale)
        if optimizer is None:
            return
        for p, before in begun:
            if (state := self.state_of(p)) is not None:
                state[MEAN] = before
        for p in stepped:
            if (mean := optimizer.state.get(p, {}).get(MEAN)) is not None:
                mean.lerp_(p.data, 1 - self._decay)

    def swap(self) -> None:
        state = {} if self.optimizer is None else self.optimizer.state
        for held in self._inner.held():
            if (mean := state.get(held.tensor, {}).get(MEAN)) is not None:
                before = held.tensor.data.clone()
                held.tensor.data.copy_(mean)
                mean.copy_(before)
        if (masters := inside(self._inner, Masters)) is not None:
            masters.publish()


class Moving(Feature):
    def __init__(self, means: list[Mean]) -> None:
        self._means = means

    def pauses(self, worker: Worker, pause: Pause) -> None:
        if pause.means:
            self._swap(worker)

    def resumes(self, worker: Worker) -> None:
        self._swap(worker)

    def _swap(self, worker: Worker) -> None:
        """Swaps averages and weights, and gathers sharded weights again."""
        for mean in self._means:
            mean.swap()
        gathers = worker.features.of(Gathers)
        for dealt in gathers.stages.values():
            if dealt not in gathers.gathered:  # these are gathered anyway for a task between steps
                gathers.start(worker, dealt, whole=True)
                gathers.finish(worker)
        for stage in worker.stages.values():
            for cast in stage.casts:
                cast.forget()


def build(context: Context) -> Moving | None:
    found = (inside(optimizer, Mean) for optimizer in context.optimizers.values())
    means = [mean for mean in found if mean is not None]
    return Moving(means) if means else None
