"""Weight versions of a stage whose steps follow one another without a flush.

TwoVersions (arXiv 2006.09503). Before STEP of batch t the newer version has the steps up to t - 1, the older one those
up to t - 2. Batch t runs on the older one, batch t + 1 on the newer one. STEP copies the newer into the older, makes
the copy the parameters' data, and updates it in place: it then is the newest.

Graphs recorded by batch t + 1 hold the version that has become the older one, whose storage does not change until their
backward. Autograd counts versions per parameter, not per storage, and would take the step for a change of their saved
tensors: so the version counter is preserved.

OneVersion, for stages that step within a batch: between the forward and the backward of a microbatch the weights change
by some steps, and its gradient is applied anyway (asynchronous training). With a lookahead a forward runs on the
weights extrapolated to its backward, as if all steps until then were like the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.ir import Key, Op
from zbc.job import spec
from zbc.runtime.core.optimizer import Masters, StageOptimizer, also_kept, inside
from zbc.runtime.core.private import copy_all, go_on, unversioned
from zbc.runtime.core.split import SplitLinear
from zbc.runtime.features.shards.sharded import Sharded
from zbc.runtime.transports.transport import Transport

OLDER = "older"  # key of a parameter's older weights in the optimizer's state, for checkpoints
FED = "fed"  # likewise of its last update


class Unflushed(StageOptimizer):
    """A `StageOptimizer` that steps while graphs of later forwards wait for their backward. Between runs of steps the
    newest weights are the parameters' data; `_older` are earlier ones, if any are kept. `casts`: of its weights."""

    newer = True  # whether the parameters' data are the newest version

    def __init__(self, inner: StageOptimizer, casts: Iterable[SplitLinear] = ()) -> None:
        super().__init__(inner)
        self._casts = tuple(casts)
        trained = {name: p for name, p in inner.parameters.items() if p.requires_grad}
        self._names, self._trained, self._older = list(trained), list(trained.values()), list[Tensor]()
        self.steps = 0  # taken so far, skipped ones too

    def begin(self, step: int, transport: Transport) -> None:
        """Starts a run of steps after `step` steps."""

    def before(self, op: Op, batch: int) -> None:
        """Called before an op of a batch."""

    def after(self, op: Op) -> None:
        """Called after the op."""

    def newest(self) -> None:
        """Sets the parameters to the newest version."""

    def step(self, scale: float | None) -> None:
        self._turn()
        with unversioned(tuple(self._trained)):
            self._inner.step(scale)
        self._keep()

    def skip(self) -> None:
        self._turn()
        self._keep()

    def _turn(self) -> None:
        """The newest weights become the older ones; a step follows, or nothing does."""
        self.steps += 1

    def loaded(self) -> None:
        """The newest weights were overwritten, and with the optimizer's state the older ones, if it has any."""
        for older, parameter in zip(self._older, self._trained, strict=False):
            older.copy_(parameter.data)
        for stepped, part in self._parts():
            if OLDER in (state := self.state_of(stepped) or {}):
                part.copy_(state[OLDER])
        self._keep()
        self._inner.loaded()
        self._forget()

    def _forget(self) -> None:
        for cast in self._casts:
            cast.forget()

    def _keep(self) -> None:
        """Stores older weights in the optimizer's state, for checkpoints. As long as they cannot be, they are the
        current ones."""
        for stepped, part in self._parts():
            if (state := self.state_of(stepped)) is not None:
                state[OLDER] = part

    def _parts(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each tensor that this rank updates, and the same elements of the older weights."""
        wholes = dict(zip(self._names, self._older, strict=False))
        for held in self._inner.held():
            if (whole := wholes.get(held.name)) is not None:
                size = held.tensor.numel()
                part = whole if size == whole.numel() else whole.view(-1)[held.start : held.start + size]
                yield held.tensor, part.view(held.tensor.shape)


class TwoVersions(Unflushed):
    """Two versions of the weights, each with casts of its own."""

    def __init__(self, inner: StageOptimizer, casts: Iterable[SplitLinear] = ()) -> None:
        super().__init__(inner, casts)
        also_kept(inner, OLDER)
        self._newer, self._older = [p.data for p in self._trained], [p.data.clone() for p in self._trained]
        self._lows: list[tuple[int, Tensor, Tensor] | None] = [None] * len(self._casts)  # casts of the other version
        self._partial = False  # whether only this rank's shards of the older version are valid

    def begin(self, step: int, transport: Transport) -> None:
        """After a checkpoint was read, gathers the older version (blocks)."""
        self.steps = step
        dealt = inside(self._inner, Sharded) if self._partial else None
        if dealt is not None:
            self._show(newer=False)
            dealt.weights.moved()
            dealt.start_gather(transport, whole=True)
            dealt.finish_gather()
            self._show(newer=True)
            dealt.weights.moved()
        self._partial = False

    def before(self, op: Op, batch: int) -> None:
        """Sets the parameters to the version that a batch runs on. Raises E703 if there is no such version."""
        ahead = batch - self.steps
        if ahead not in (0, 1):
            text = f"run: an op of step {batch + 1} reads weights that are not here: {self.steps} steps are made"
            raise ZbcError("E703", text, hint="plan again")
        self._show(newer=ahead == 1)

    def newest(self) -> None:
        self._show(newer=True)

    def loaded(self) -> None:
        super().loaded()
        self._partial = self.apart

    def _turn(self) -> None:
        super()._turn()
        if self._trained:
            copy_all(self._older, self._newer)
        self._older, self._newer = self._newer, self._older
        self.newer = False
        self._show(newer=True)
        if (dealt := inside(self._inner, Sharded)) is not None:
            dealt.weights.moved()
        self._forget()

    def _show(self, *, newer: bool) -> None:
        if newer == self.newer:
            return
        for parameter, data in zip(self._trained, self._newer if newer else self._older, strict=True):
            parameter.data = data
        self._lows = [cast.exchange(low) for cast, low in zip(self._casts, self._lows, strict=True)]
        self.newer = newer

    def _forget(self) -> None:
        super()._forget()
        self._lows = [None] * len(self._casts)


class OneVersion(Unflushed):
    """Steps while microbatches are between their forward and their backward. `lookahead`: the number of steps by which
    forwards extrapolate weights, 0 for none; the older weights are then those before the last step."""

    def __init__(self, inner: StageOptimizer, casts: Iterable[SplitLinear] = (), lookahead: int = 0) -> None:
        super().__init__(inner, casts)
        self._lookahead = lookahead
        looks = self._trained if lookahead else []
        self._older, self._aside = [p.data.clone() for p in looks], [torch.empty_like(p.data) for p in looks]
        self._read: dict[Key, int] = {}  # steps made before a microbatch's forward
        self.stalest = 0  # largest delay of a gradient so far, in steps

    def before(self, op: Op, batch: int) -> None:
        """For a backward, updates the largest delay; for a forward, extrapolates the weights."""
        if not op.kind.is_forward:
            read = self._read.pop(op.key, self.steps)  # a W comes after its B
            self.stalest = max(self.stalest, self.steps - read)
            return
        self._read[op.key] = self.steps
        if self._older:
            own = [p.data for p in self._trained]
            copy_all(self._aside, own)
            go_on(own, self._older, self._lookahead)
            self._forget()

    def after(self, op: Op) -> None:
        if op.kind.is_forward and self._older:
            copy_all([p.data for p in self._trained], self._aside)
            self._forget()

    def _turn(self) -> None:
        super()._turn()
        if self._older:
            copy_all(self._older, [p.data for p in self._trained])


def versioned(options: spec.Optimizer, inner: StageOptimizer, casts: Iterable[SplitLinear], late: int) -> Unflushed:
    """The optimizer for steps without a flush, in asynchronous training with gradients `late` by so many steps."""
    if options.sync == "asynchronous":
        return OneVersion(inner, casts, late if options.lookahead else 0)
    return TwoVersions(Feedback(inner, options.feedback) if options.feedback else inner, casts)


class Feedback(StageOptimizer):
    """A `StageOptimizer` whose steps correct a `share` of the last step's error (after arXiv 2606.30634). Each step
    applies the update of the previous one, u(t - 1) in place of u(t). The error is known a step later: W(t + 1) = W(t)
    + u(t - 1) + c (u(t - 1) - u(t - 2))."""

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
            if (state := self.state_of(weight)) is None:
                continue
            moved = torch.sub(weight.data, before, out=before)
            if FED in state:
                weight.data.add_(moved - state[FED], alpha=self._share)
            state[FED] = moved
        if (masters := inside(self._inner, Masters)) is not None:
            masters.publish()
