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

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.ir import Key, Kind, Op
from zbc.runtime.core.optimizer import OptimizerOver, StageOptimizer, also_kept, inside
from zbc.runtime.core.private import copy_all, go_on, unversioned
from zbc.runtime.core.split import SplitLinear
from zbc.runtime.features.sharded import Sharded
from zbc.runtime.transports.transport import Transport

OLDER = "older"  # what checkpoints have of a parameter beside the optimizer's own state


class TwoVersions(OptimizerOver):
    """A `StageOptimizer` that knows which weights a batch runs on. Between runs of steps the newest are there.

    `casts` of weights are kept for either version.
    """

    def __init__(self, inner: StageOptimizer, casts: Iterable[SplitLinear] = ()) -> None:
        super().__init__(inner)
        also_kept(inner, OLDER)
        trained = {name: p for name, p in inner.parameters.items() if p.requires_grad}
        self._names, self._trained = list(trained), list(trained.values())
        self._newer = [p.data for p in self._trained]
        self._older = [p.data.clone() for p in self._trained]
        self._casts = tuple(casts)
        self._lows: list[tuple[int, Tensor, Tensor] | None] = [None] * len(self._casts)  # casts of the others
        self.newer = True  # whether the newer ones are the parameters'
        self._partial = False  # of the older ones other ranks have parts
        self.steps = 0  # taken so far, skipped ones too

    def begin(self, step: int, transport: Transport) -> None:
        """Steps follow one another from here on, after `step` of them; blocks after a checkpoint was read."""
        self.steps = step
        dealt = inside(self._inner, Sharded) if self._partial else None
        if dealt is not None:
            self._show(newer=False)
            dealt.moved()
            dealt.start_gather(transport, whole=True)
            dealt.finish_gather()
            self._show(newer=True)
            dealt.moved()
        self._partial = False

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
        for older, newer in zip(self._older, self._newer, strict=True):
            older.copy_(newer)
        read_older(self._inner, dict(zip(self._names, self._older, strict=True)))
        self._partial = self.apart
        self._keep()
        self._inner.loaded()
        self._forget()

    def _turn(self) -> None:
        if self._trained:
            copy_all(self._older, self._newer)
        self._older, self._newer = self._newer, self._older
        self.newer = False
        self._show(newer=True)
        if (dealt := inside(self._inner, Sharded)) is not None:
            dealt.moved()
        self._forget()
        self.steps += 1

    def _show(self, *, newer: bool) -> None:
        if newer == self.newer:
            return
        for parameter, data in zip(self._trained, self._newer if newer else self._older, strict=True):
            parameter.data = data
        self._lows = [cast.exchange(low) for cast, low in zip(self._casts, self._lows, strict=True)]
        self.newer = newer

    def _forget(self) -> None:
        for cast in self._casts:
            cast.forget()
        self._lows = [None] * len(self._casts)

    def _keep(self) -> None:
        keep_older(self._inner, dict(zip(self._names, self._older, strict=True)))


class OneVersion(OptimizerOver):
    """A `StageOptimizer` that steps while microbatches are between their forward and their backward.

    `lookahead`: how many steps forwards look ahead, 0 for none.
    """

    newer = True

    def __init__(self, inner: StageOptimizer, casts: Iterable[SplitLinear] = (), lookahead: int = 0) -> None:
        super().__init__(inner)
        self._casts = tuple(casts)
        trained = {name: p for name, p in inner.parameters.items() if p.requires_grad}
        self._names, self._trained = list(trained), list(trained.values())
        self._lookahead = lookahead
        looks = self._trained if lookahead else []
        self._before = [p.data.clone() for p in looks]  # the last step
        self._aside = [torch.empty_like(p.data) for p in looks]
        self._read: dict[Key, int] = {}  # the steps that were made when a microbatch's forward ran
        self.steps = 0
        self.stalest = 0  # of all gradients so far, by how many steps the most delayed one came late

    def begin(self, step: int, transport: Transport) -> None:
        """Steps follow one another from here on."""

    def before(self, op: Op, batch: int) -> None:
        """Count how late a gradient is; have a forward look ahead."""
        if op.kind is not Kind.F:
            read = self._read.pop(op.key, self.steps)  # a W comes after its B
            self.stalest = max(self.stalest, self.steps - read)
            return
        self._read[op.key] = self.steps
        if self._lookahead and self._trained:
            own = [p.data for p in self._trained]
            copy_all(self._aside, own)
            go_on(own, self._before, self._lookahead)
            self._forget()

    def after(self, op: Op) -> None:
        """A forward has looked ahead: back to the weights."""
        if op.kind is Kind.F and self._lookahead and self._trained:
            copy_all([p.data for p in self._trained], self._aside)
            self._forget()

    def _forget(self) -> None:
        for cast in self._casts:
            cast.forget()

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
            before.copy_(parameter.data)
        read_older(self._inner, dict(zip(self._names, self._before, strict=False)))
        self._keep()
        self._inner.loaded()

    def _keep(self) -> None:
        keep_older(self._inner, dict(zip(self._names, self._before, strict=False)))


def keep_older(inner: StageOptimizer, older: Mapping[str, Tensor]) -> None:
    """Leave older weights, by name, where checkpoints look. Adam takes a state that is not empty for its own, so not
    before it has made that: until then they are those that there are."""
    for stepped, before in _parts(inner, older):
        state = _state_of(inner, stepped)
        if state or isinstance(inner.optimizer, torch.optim.SGD):
            state[OLDER] = before


def read_older(inner: StageOptimizer, older: Mapping[str, Tensor]) -> None:
    """Overwrite older weights, or this rank's parts of them, with what a checkpoint left there."""
    for stepped, before in _parts(inner, older):
        if OLDER in (state := _state_of(inner, stepped)):
            before.copy_(state[OLDER])


def _parts(inner: StageOptimizer, older: Mapping[str, Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """What is stepped here, and what there is of that in older weights."""
    for one in inner.held():
        if (whole := older.get(one.name)) is not None:
            size = one.tensor.numel()
            part = whole if size == whole.numel() else whole.view(-1)[one.start : one.start + size]
            yield one.tensor, part.view(one.tensor.shape)


def _state_of(inner: StageOptimizer, parameter: nn.Parameter) -> dict[str, Any]:
    state: dict[str, Any] = {} if inner.optimizer is None else inner.optimizer.state[parameter]
    return state


Unflushed = TwoVersions | OneVersion
