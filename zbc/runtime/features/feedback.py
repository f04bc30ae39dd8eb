"""Error feedback for gradients that are delayed by one step (after arXiv 2606.30634).

Each step applies the update of the previous one, u(t - 1) in place of u(t). The error is known a step later, and the
next update corrects it:

    W(t + 1) = W(t) + u(t - 1) + c (u(t - 1) - u(t - 2))
"""

from __future__ import annotations

import torch

from zbc.runtime.core.optimizer import Masters, OptimizerOver, StageOptimizer, also_kept, inside

FED = "fed"  # key of a parameter's last update in the optimizer's state, for checkpoints


class Feedback(OptimizerOver):
    """A `StageOptimizer` whose steps correct a `share` of the last step's error."""

    def __init__(self, inner: StageOptimizer, share: float) -> None:
        super().__init__(inner)
        also_kept(inner, FED)
        self._share = share

    @torch.no_grad()
    def step(self, scale: float | None) -> None:
        stepped = [held.tensor for held in self._inner.held() if held.tensor.requires_grad]
        then = [weight.data.clone() for weight in stepped]
        self._inner.step(scale)
        if self.optimizer is None:
            return
        for weight, before in zip(stepped, then, strict=True):
            state = self.optimizer.state[weight]
            if not state and not isinstance(self.optimizer, torch.optim.SGD):
                continue  # Adam would take any state for its own
            moved = torch.sub(weight.data, before, out=before)
            if FED in state:
                weight.data.add_(moved - state[FED], alpha=self._share)
            state[FED] = moved
        if (masters := inside(self._inner, Masters)) is not None:
            masters.publish()
