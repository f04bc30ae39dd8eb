"""The weights of a stage whose steps follow one another without a flush.

TwoVersions (arXiv 2006.09503). Before STEP of batch t the newer version is what the steps up to t - 1 made, the older
one what those up to t - 2 made. Batch t runs on the older one, batch t + 1 on the newer one. STEP copies the newer into
the older, makes that the parameters' data, and steps it in place: what was older is the newest then.

Graphs that batch t + 1 has recorded hold what is now the older version, and its storage does not change until they are
used up. Autograd counts versions per parameter, not per storage, and would take the step for a change of what they
saved: so the count is kept.

OneVersion, for stages that step on their own: a backward finds other weights than its forward did, as many steps later
as there were in between, and that is what this training is. With a lookahead a forward runs on the weights as they
would be at its backward if all steps until then were like the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.ir import Key, Kind, Op
from zbc.job import spec
from zbc.runtime.core.optimizer import InPlace, OptimizerOver
from zbc.runtime.core.private import copy_all, go_on, unversioned

OLDER = "older"  # what checkpoints have of a parameter beside the optimizer's own state


class TwoVersions(OptimizerOver):
    """A `StageOptimizer` that knows which weights a batch runs on. Between runs of steps the newest are there."""

    def __init__(self, options: spec.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(InPlace(options, parameters))
        self._trained = [p for p in parameters.values() if p.requires_grad]
        self._newer = [p.data for p in self._trained]
        self._older = [p.data.clone() for p in self._trained]
        self._shows_newer = True
        self.steps = 0  # taken so far, skipped ones too

    def begin(self, step: int) -> None:
        """Steps follow one another from here on, after `step` of them."""
        self.steps = step

    def before(self, op: Op, batch: int) -> None:
        """Have the parameters be what an op of a batch runs on."""
        self.turn_to(batch)

    def after(self, op: Op) -> None:
        """The op is over."""

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

    def step(self, scale: float | None) -> None:
        self._turn()
        with unversioned(tuple(self._trained)):
            self._inner.step(scale)
        self._keep()

    def skip(self) -> None:
        """A step that changes nothing."""
        self._turn()
        self._keep()

    def loaded(self) -> None:
        """The newest weights were overwritten, and with the optimizer's state the older ones, where there were any."""
        for parameter, newer, older in zip(self._trained, self._newer, self._older, strict=True):
            older.copy_(_state_of(self.optimizer, parameter).get(OLDER, newer))
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
        keep_older(self.optimizer, self._trained, self._older)


class OneVersion(OptimizerOver):
    """A `StageOptimizer` that steps while microbatches are between their forward and their backward.

    `lookahead`: how many steps forwards look ahead, 0 for none.
    """

    def __init__(self, options: spec.Optimizer, parameters: Mapping[str, nn.Parameter], lookahead: int = 0) -> None:
        super().__init__(InPlace(options, parameters))
        self._trained = [p for p in parameters.values() if p.requires_grad]
        self._lookahead = lookahead
        looks = self._trained if lookahead else []
        self._before = [p.data.clone() for p in looks]  # the last step
        self._aside = [torch.empty_like(p.data) for p in looks]
        self._read: dict[Key, int] = {}  # the steps that were made when a microbatch's forward ran
        self.steps = 0
        self.stalest = 0  # of all gradients so far, by how many steps the most delayed one came late

    def begin(self, step: int) -> None:
        """Steps follow one another from here on."""

    def before(self, op: Op, batch: int) -> None:
        """Count how late a gradient is; have a forward look ahead."""
        if op.kind is not Kind.F:
            self.stalest = max(self.stalest, self.steps - self._read.pop(op.key))
            return
        self._read[op.key] = self.steps
        if self._lookahead and self._trained:
            own = [p.data for p in self._trained]
            copy_all(self._aside, own)
            go_on(own, self._before, self._lookahead)

    def after(self, op: Op) -> None:
        """A forward has looked ahead: back to the weights."""
        if op.kind is Kind.F and self._lookahead and self._trained:
            copy_all([p.data for p in self._trained], self._aside)

    def newest(self) -> None:
        """They always are."""

    def step(self, scale: float | None) -> None:
        if self._before:
            copy_all(self._before, [p.data for p in self._trained])
        with unversioned(tuple(self._trained)):
            self._inner.step(scale)
        self.steps += 1
        self._keep()

    def skip(self) -> None:
        """A step that changes nothing."""
        if self._before:
            copy_all(self._before, [p.data for p in self._trained])
        self.steps += 1

    def loaded(self) -> None:
        """The weights were overwritten, and with the optimizer's state those before the last step."""
        for parameter, before in zip(self._trained, self._before, strict=bool(self._before)):
            before.copy_(_state_of(self.optimizer, parameter).get(OLDER, parameter.data))
        self._keep()
        self._inner.loaded()

    def _keep(self) -> None:
        keep_older(self.optimizer, self._trained if self._before else [], self._before)


def keep_older(
    optimizer: torch.optim.Optimizer | None, parameters: Sequence[nn.Parameter], older: Sequence[Tensor]
) -> None:
    """Leave older weights where checkpoints look. Adam takes a state that is not empty for its own, so not before it
    has made that: until then they are those that there are."""
    for parameter, before in zip(parameters, older, strict=True):
        state = _state_of(optimizer, parameter)
        if state or isinstance(optimizer, torch.optim.SGD):
            state[OLDER] = before


def _state_of(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> dict[str, Any]:
    state: dict[str, Any] = {} if optimizer is None else optimizer.state[parameter]
    return state


Unflushed = TwoVersions | OneVersion
