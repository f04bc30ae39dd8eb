"""Replicas that average their weights instead of their gradients, one part at a time, overlapped with training.

    step k    AVERAGE s: applies the average started in the previous step; then starts that of part k of the weights

It adds the difference between the mean over replicas and this replica's weights as sent (after AsyncMesh, arXiv
2601.22442): its updates since are kept. With `ema` e a weight is changed by d = e d' + (1 - e) (mean - sent), d' being
the change when its part was averaged last. Without a delay the step waits, and the part becomes the mean.

The parts are equal pieces of the concatenated weights of a stage, averaged in turn; the step determines the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zbc.ir import Op
from zbc.job.sections import Average
from zbc.ops import TIED
from zbc.plan.directory import averaging
from zbc.runtime.core.feature import Context, Feature, Pause
from zbc.runtime.core.state import Worker
from zbc.runtime.transports.transport import Pending, Transport


class _Sent(NamedTuple):
    """An average in flight: the part, this replica's weights as sent, the buffer of the sum over replicas."""

    part: int
    mine: Tensor
    sum: Tensor
    pending: Pending


class Averaging:
    """Averages the weights of one owner over `ranks`, one of each replica."""

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: tuple[int, ...], asked: Average) -> None:
        self._parameters, self.ranks, self._asked = list(parameters), ranks, asked
        self._size = sum(p.numel() for p in self._parameters)
        self._sent: _Sent | None = None
        self._last: dict[int, Tensor] = {}  # by part, its last change

    def turn(self, step: int, transport: Transport) -> None:
        """Runs the AVERAGE of a step: applies the last average, and starts the next if one is due."""
        self.land()
        asked = self._asked
        if step % asked.every:
            return
        part = step // asked.every % asked.parts
        views = self._views(part)
        if not views:  # a stage without adapters has nothing to train
            return
        mine = torch.cat(views)
        total = mine.clone()
        self._sent = _Sent(part, mine, total, transport.start_sum(total, self.ranks))
        if not asked.delay:
            self.land()

    def land(self) -> None:
        if self._sent is None:
            return
        (part, mine, total, pending), self._sent = self._sent, None
        pending.wait()
        mean = total.div_(len(self.ranks))
        views = self._views(part)
        if not self._asked.delay and not self._asked.smooth:
            _spread(mean, views, Tensor.copy_)
            return
        change = mean.sub_(mine)
        if self._asked.smooth:
            change.mul_(1 - self._asked.smooth)
            before = self._last.get(part)
            change = change if before is None else change.add_(before, alpha=self._asked.smooth)
            self._last[part] = change
        _spread(change, views, Tensor.add_)

    def forget(self) -> None:
        """Drops the average in flight, and all last changes: all replicas are about to be equal."""
        if self._sent is not None:
            self._sent.pending.wait()
        self._sent = None
        self._last.clear()

    def _views(self, part: int) -> list[Tensor]:
        """The pieces of weights in a part, as flat views."""
        low, high = (self._size * (part + k) // self._asked.parts for k in (0, 1))
        views, start = [], 0
        for parameter in self._parameters:
            a, b = max(low, start) - start, min(high, start + parameter.numel()) - start
            if a < b:
                flat = (parameter.numel(),), (1,), parameter.storage_offset()  # dense, in any order of its dimensions
                views.append(parameter.detach().as_strided(*flat)[a:b])
            start += parameter.numel()
        return views


def _spread(values: Tensor, views: Sequence[Tensor], put: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Copies or adds consecutive values to views of weights."""
    for view, piece in zip(views, torch.split(values, [view.numel() for view in views]), strict=True):
        put(view, piece)


class Averages(Feature):
    def __init__(self, stages: Mapping[int, Averaging]) -> None:
        self.stages = stages

    def pauses(self, worker: Worker, pause: Pause) -> None:
        """Weights and optimizer states become means."""
        for owner, one in sorted(self.stages.items()) if pause.equal else ():
            one.forget()
            if owner == TIED:  # they are among the weights of their stages
                continue
            optimizer = worker.optimizers[owner]
            state = {} if optimizer.optimizer is None else optimizer.optimizer.state
            parameters = [p for _, p in sorted(optimizer.parameters.items())]
            kept = [state[p][key] for p in parameters if p in state for key in sorted(state[p])]
            numbers = [value for value in kept if isinstance(value, Tensor) and value.is_floating_point()]
            meet(one.ranks, [*parameters, *numbers], worker.transport)


def average(worker: Worker, op: Op) -> None:
    """AVERAGE: applies the average of the previous step, and starts that of the next part of an owner's weights."""
    worker.before_update()
    worker.features.of(Averages).stages[op.stage].turn(worker.step, worker.transport)


def meet(ranks: tuple[int, ...], tensors: Sequence[Tensor], transport: Transport) -> None:
    """Replaces each tensor by its mean over all ranks, which pass them in the same order; blocks."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        alike, wide = [one for one in tensors if one.dtype is dtype], torch.promote_types(dtype, torch.float32)
        flat = torch.cat([tensor.detach().reshape(-1).to(wide) for tensor in alike])
        transport.all_reduce(flat, ranks)
        flat.div_(len(ranks))
        for tensor, piece in zip(alike, torch.split(flat, [tensor.numel() for tensor in alike]), strict=True):
            tensor.detach().copy_(piece.view(tensor.shape))


def build(context: Context) -> Averages | None:
    """Tied weights belong to several stages."""
    manifest = context.manifest
    if not manifest.averages:
        return None
    asked = Average.model_validate(manifest.planning["parallel"]["average"], strict=False)
    ranks = averaging(manifest, context.rank)
    owned = {
        owner: {name: p for name, p in opt.parameters.items() if p.requires_grad}
        for owner, opt in context.optimizers.items()
    }
    shared = {name: mine.pop(name) for mine in owned.values() for name in context.tied if name in mine}
    owned |= {TIED: shared} if shared else {}
    return Averages(
        {owner: Averaging([p for _, p in sorted(mine.items())], ranks, asked) for owner, mine in owned.items()}
    )
