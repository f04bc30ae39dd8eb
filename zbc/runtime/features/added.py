"""Values that layers report during a step: auxiliary losses, such as load balancing of experts (arXiv 2101.03961,
section 2.2), the loads of experts, and the largest attention scores.

A gradient that a layer adds in its own backward counts once per microbatch, m times in a step of m microbatches, but
the loss is their mean. `add_loss` corrects for that, and `loss_scale` returns the factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zbc.ir import Key, Op
from zbc.runtime.core.current import Current
from zbc.runtime.core.feature import Context, Feature

if TYPE_CHECKING:
    from zbc.runtime.core.state import Worker


class Adding:
    """Values reported by the forward of one microbatch in a stage; `share`: the weight of its loss in the step's, and
    `scale` that in the gradients, which are `times` the loss's."""

    __slots__ = ("again", "loads", "peaks", "scale", "share", "total")

    def __init__(self, share: float, times: float = 1.0) -> None:
        self.share, self.scale = share, share * times
        self.total: Tensor | None = None
        self.loads: list[tuple[int, Tensor]] = []  # index of the first expert among all blocks, rows of each
        self.peaks: dict[int, Tensor] = {}  # by block, the largest attention score of each head
        self.again = False  # whether the forward has run: what reports later recomputes it


class Added(Feature):
    """The values that layers report on this rank in a step, by the key of their forward."""

    def __init__(self) -> None:
        self._found: dict[Key, Tensor] = {}
        self._loads: dict[Key, list[tuple[int, Tensor]]] = {}
        self.peaks: dict[Key, dict[int, Tensor]] = {}  # see qk_clip.py

    def add(self, key: Key, adding: Adding) -> None:
        if adding.total is not None:
            self._found[key] = adding.total
        if adding.loads:
            self._loads[key] = adding.loads[:]  # a copy: a recomputed forward reports them again
        if adding.peaks:
            self.peaks[key] = adding.peaks
        adding.again = True

    def repeats(self, worker: Worker) -> None:
        self._found.clear()
        self._loads.clear()
        self.peaks.clear()

    def entries(self, worker: Worker, which: Callable[[Key], bool] = lambda key: True) -> Mapping[int, Tensor | float]:
        """Entries after the losses, removed here. Empty without reports, and on tensor parallel ranks but the first, if
        all of these report the same."""
        values, found = [self._found.pop(key) for key in list(self._found) if which(key)], dict[int, Tensor | float]()
        at, loads = worker.layout.microbatches, [key for key in list(self._loads) if which(key)]
        told = [load for key in loads for load in self._loads.pop(key)]
        if worker.share and not worker.plan.manifest.folded:
            return found
        if values:
            device = values[-1].device
            found[at] = torch.stack([value.to(device) for value in values]).sum()
        for place, counts in told:
            before = found.get(at + 1 + place)
            found[at + 1 + place] = counts if before is None else before + counts
        return found


def with_added(handler: Callable[[Worker, Op], None]) -> Callable[[Worker, Op], None]:
    """Wraps the handler of F: collects the values that its layers report."""

    def run(worker: Worker, op: Op) -> None:
        adding = Adding(worker.portion(worker.number(op.mb), worker.routes[op].stage.part), worker.scale)
        outer = _current.swap(adding if worker.phase_run.trains else None)
        try:
            handler(worker, op)
        finally:
            _current.swap(outer)
        worker.features.of(Added).add(op.key, adding)

    return run


_current = Current[Adding]()
adding_to = _current.using  # the context in which layers report to it


def current_adding() -> Adding | None:
    """The object that layers of this thread report to; None outside of a training's forward."""
    return _current.value


def loss_scale() -> float:
    """The weight of this forward's gradients in the step: 1 / (microbatches of a step, over all replicas), for a slice
    times its share of the sequence; in float16 times the loss scale. 1.0 outside of a training.

    A layer multiplies by it the gradients that it adds in its own backward, in an autograd function of its own. To be
    called in the forward.
    """
    adding = _current.value
    return 1.0 if adding is None else adding.scale


def add_loss(x: Tensor, value: Tensor) -> Tensor:
    """Returns `x`; if the result is used in its place, `value`, one number, is minimised in addition to the loss.

    `added_loss` in metrics.jsonl is the sum over all calls of the mean over the step's microbatches. Raises ValueError
    if `value` is not one number.
    """
    if value.numel() != 1 or not value.is_floating_point():
        shape = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        raise ValueError(f"zbc.add_loss takes one floating-point number as its value, not {shape}: a mean, or a sum")
    adding = _current.value
    if adding is None:
        return _Added.apply(x, value, 1.0)  # type: ignore[no-any-return, no-untyped-call]
    mine = value.detach().reshape(()).float() * adding.share
    adding.total = mine if adding.total is None else adding.total + mine
    return _Added.apply(x, value, adding.scale)  # type: ignore[no-any-return, no-untyped-call]


def tell_load(place: int, counts: Tensor) -> None:
    """Reports the rows of experts in the current forward; the first has index `place` among those of all blocks."""
    adding = _current.value
    if adding is not None:
        adding.loads.append((place, counts))


def tell_peaks(block: int, find: Callable[[], Tensor]) -> None:
    """Reports the largest attention score of each head of a block in the current forward, (heads,): the result of
    `find`, which is called in the forwards of a training only, not in those that recompute one."""
    adding = _current.value
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
