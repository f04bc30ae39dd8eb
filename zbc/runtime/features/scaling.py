"""Loss scaling for float16, by the rule of torch.amp.GradScaler (arXiv 1710.03740, section 3.2).

Gradients are computed times `Worker.scale`, and are divided by it in the update. A step in which any gradient overflows
is skipped on all ranks by its verdict, and halves the scale; steps without an overflow, as many as `loss_scale` says,
double it.
"""

from __future__ import annotations

from typing import NamedTuple

from zbc.runtime.core.feature import Context, Feature
from zbc.runtime.core.state import Worker

_GROWTH, _BACKOFF = 2.0, 0.5


class Scale(NamedTuple):
    """`factor` of the loss; `good`: steps in a row without an overflow since it last changed."""

    factor: float
    good: int = 0

    def after(self, skipped: bool, growth_steps: int) -> Scale:
        """The scale of the next step."""
        if skipped:
            return Scale(self.factor * _BACKOFF)
        if self.good + 1 < growth_steps:
            return self._replace(good=self.good + 1)
        return Scale(min(self.factor * _GROWTH, 2.0**127))


class Scaling(Feature):
    """The scale of a training; all ranks have the same, since each follows the verdicts."""

    def __init__(self, first: float, growth_steps: int) -> None:
        self.scale, self._growth_steps = Scale(first), growth_steps

    def opens(self, worker: Worker) -> None:
        worker.scale = self.scale.factor

    def closes(self, worker: Worker) -> None:
        if worker.verdict is not None:
            self.scale = self.scale.after(worker.verdict.skipped, self._growth_steps)


def build(context: Context) -> Scaling | None:
    model = context.manifest.planning["model"]
    if model["dtype"] != "float16":
        return None
    said = model.get("loss_scale", 65536.0)
    return Scaling(*(said if isinstance(said, list | tuple) else (said, 2000)))
