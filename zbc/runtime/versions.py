"""Two versions of a stage's weights, for steps that follow one another without a flush (arXiv 2006.09503).

Before STEP of batch t the newer version is what the steps up to t - 1 made, the older one what those up to t - 2 made.
Batch t runs on the older one, batch t + 1 on the newer one. STEP copies the newer into the older, makes that the
parameters' data, and steps it in place: what was older is the newest then.

Graphs that batch t + 1 has recorded hold what is now the older version, and its storage does not change until they are
used up. Autograd counts versions per parameter, not per storage, and would take the step for a change of what they
saved: so the count is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job import spec
from zbc.runtime.optimizer import Held, InPlace
from zbc.runtime.private import copy_all, unversioned

OLDER = "older"  # what checkpoints have of a parameter beside the optimizer's own state


class TwoVersions:
    """A `StageOptimizer` that knows which weights a batch runs on. Between runs of steps the newest are there."""

    def __init__(self, options: spec.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._inner = InPlace(options, parameters)
        self._trained = [p for p in parameters.values() if p.requires_grad]
        self._newer = [p.data for p in self._trained]
        self._older = [p.data.clone() for p in self._trained]
        self._shows_newer = True
        self.steps = 0  # taken so far, skipped ones too

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._inner.parameters

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._inner.optimizer

    def begin(self, step: int) -> None:
        """Steps follow one another from here on, after `step` of them."""
        self.steps = step

    def turn_to(self, batch: int) -> None:
        """Have the parameters be the version that a batch runs on. Raises E703 where it is not here."""
        ahead = batch - self.steps
        if ahead not in (0, 1):
            text = f"run: an op of step {batch + 1} reads weights that are not here: {self.steps} steps are made"
            raise ZbcError("E703", text, hint="plan again")
        self._show(newer=ahead == 1)

    def newest(self) -> None:
        """Have the parameters be what the last step made."""
        self._show(newer=True)

    def squares(self) -> dict[str, Tensor]:
        return self._inner.squares()

    def step(self, scale: float | None) -> None:
        self._turn()
        with unversioned(tuple(self._trained)):
            self._inner.step(scale)
        self._keep()

    def skip(self) -> None:
        """A step that changes nothing."""
        self._turn()
        self._keep()

    def drop(self) -> None:
        self._inner.drop()

    def held(self) -> list[Held]:
        return self._inner.held()

    def incomplete(self) -> list[Held]:
        return []

    def loaded(self) -> None:
        """The newest weights were overwritten, and with the optimizer's state the older ones, where there were any."""
        for parameter, newer, older in zip(self._trained, self._newer, self._older, strict=True):
            older.copy_(self._state(parameter).get(OLDER, newer))
        self._keep()
        self._inner.loaded()

    def _turn(self) -> None:
        if self._trained:
            copy_all(self._older, self._newer)
        self._older, self._newer = self._newer, self._older
        self._shows_newer = False
        self._show(newer=True)
        self.steps += 1

    def _show(self, *, newer: bool) -> None:
        if newer == self._shows_newer:
            return
        for parameter, data in zip(self._trained, self._newer if newer else self._older, strict=True):
            parameter.data = data
        self._shows_newer = newer

    def _keep(self) -> None:
        """Leave the older version where checkpoints look. Adam takes a state that is not empty for its own, so not
        before it has made that: until then both versions are the same."""
        for parameter, older in zip(self._trained, self._older, strict=True):
            state = self._state(parameter)
            if state or isinstance(self.optimizer, torch.optim.SGD):
                state[OLDER] = older

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = {} if self.optimizer is None else self.optimizer.state[parameter]
        return state
