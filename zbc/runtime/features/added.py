"""Values that layers report during a step: auxiliary losses, such as load balancing of experts (arXiv 2101.03961,
section 2.2), the loads of experts, and the largest attention scores.

A gradient that a layer adds in its own backward counts once per microbatch, m times in a step of m microbatches, but
the loss is their mean. `add_loss` corrects for that, and `loss_scale` returns the factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zbc.ir import Key, Kind, Op
from zbc.runtime.core.current import ADDING
from zbc.runtime.core.feature import Context, Feature
from zbc.runtime.core.state import Handler, PhaseRun, Worker
from zbc.runtime.core.tensors import TensorSpec


class Adding:
    """Values reported by the forward of one microbatch in a stage; `share`: the weight of its loss in the step's, which
    is asked for once a layer needs it; gradients are `times` the loss's."""

    __slots__ = ("_share", "_times", "again", "loads", "peaks", "total")

    def __init__(self, share: float | Callable[[], float], times: float = 1.0) -> None:
        self._share, self._times = share, times
        self.total: Tensor | None = None
        self.loads: list[tuple[int, Tensor]] = []  # index of the first expert among all blocks, rows of each
        self.peaks: dict[int, Tensor] = {}  # by block, the largest attention score of each head
        self.again = False  # whether the forward has run: what reports later recomputes it

    @property
    def share(self) -> float:
        if not isinstance(self._share, float | int):
            self._share = self._share()
        return self._share

    @property
    def scale(self) -> float:
        """The weight of its gradients in the step's."""
        return self.share * self._times


class Added(Feature):
    """Collects what layers report in the forwards of a training."""

    def __init__(self) -> None:
        self.peaks: dict[Key, dict[int, Tensor]] = {}  # see qk_clip.py

    def completes(self, worker: Worker, run: PhaseRun) -> None:
        if run.trains:
            run.wrap([kind for kind in Kind if kind.is_forward], self._collect)

    def _collect(self, handler: Handler, worker: Worker, op: Op) -> None:
        adding = Adding(lambda: worker.portion(worker.number(op.mb), worker.routes[op].stage.part), worker.scale)
        outer = ADDING.swap(adding)
        try:
            handler(worker, op)
        finally:
            ADDING.swap(outer)
        adding.again = True
        if adding.total is not None or adding.loads or adding.peaks:
            self.add(worker, op.key, adding)

    def add(self, worker: Worker, key: Key, adding: Adding) -> None:
        """Stores the reports of a forward. If all tensor parallel ranks report the same, the first one does."""
        if adding.peaks:
            self.peaks[key] = adding.peaks
        if worker.share and not worker.plan.manifest.folded:
            return
        at = worker.layout.microbatches
        found = [] if adding.total is None else [(at, adding.total)]
        worker.reports[key] = [*found, *((at + 1 + place, counts) for place, counts in adding.loads)]

    def repeats(self, worker: Worker) -> None:
        self.peaks.clear()


adding_to = ADDING.using  # the context in which layers report to it


def loss_scale() -> float:
    """The weight of this forward's gradients in the step: 1 / (microbatches of a step, over all replicas), for a slice
    times its share of the sequence; in float16 times the loss scale. 1.0 outside of a training.

    A layer multiplies by it the gradients that it adds in its own backward, in an autograd function of its own. To be
    called in the forward.
    """
    adding: Adding | None = ADDING.value
    return 1.0 if adding is None else adding.scale


def add_loss(x: Tensor, value: Tensor) -> Tensor:
    """Returns `x`; if the result is used in its place, `value`, one number, is minimised in addition to the loss.

    `added_loss` in metrics.jsonl is the sum over all calls of the mean over the step's microbatches. Raises ValueError
    if `value` is not one number.
    """
    if value.numel() != 1 or not value.is_floating_point():
        text = f"zbc.add_loss takes one floating-point number as its value, not {TensorSpec.of(value)}"
        raise ValueError(f"{text}: a mean, or a sum")
    adding = ADDING.value
    if adding is None:
        return _Added.apply(x, value, 1.0)  # type: ignore[no-any-return, no-untyped-call]
    mine = value.detach().reshape(()).float() * adding.share
    adding.total = mine if adding.total is None else adding.total + mine
    return _Added.apply(x, value, adding.scale)  # type: ignore[no-any-return, no-untyped-call]


def tell_load(place: int, counts: Tensor) -> None:
    """Reports the rows of experts in the current forward; the first has index `place` among those of all blocks."""
    adding = ADDING.value
    if adding is not None:
        adding.loads.append((place, counts))


def tell_peaks(block: int, find: Callable[[], Tensor]) -> None:
    """Reports the largest attention score of each head of a block in the current forward, (heads,): the result of
    `find`, which is called in the forwards of a training only, not in those that recompute one."""
    adding = ADDING.value
    if adding is not None and not adding.again:
        found, before = find(), adding.peaks.get(block)
        adding.peaks[block] = found if before is None else torch.maximum(before, found)


class _Added(torch.autograd.Function):
    """Returns x; backward gives `value` the gradient `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (value.shape, value.dtype, value.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shape, dtype, device = ctx.like
        return grads[0], torch.full(shape, ctx.scale, dtype=dtype, device=device), None


def build(context: Context) -> Added:
    return Added()
