"""Packed rows of a microbatch: several samples per row, without attention between them, each from position 0.

A forward runs inside of `packed`, which sets the lengths of the samples of each row for attention and positions. The
rest of a row is padding: no token attends to it, and its targets do not count.

Or microbatches with rows of unequal length: in each step their ops take the routes of stages for these lengths.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zbc.ir import Kind, Op
from zbc.runtime.core.current import Current
from zbc.runtime.core.feature import Context, Feature
from zbc.runtime.core.route import route_of
from zbc.runtime.core.state import Handler, PhaseRun, Worker
from zbc.runtime.core.tensors import Length, cached

Rows = tuple[tuple[int, ...], ...]  # lengths of the samples of each row, in their order
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]  # attention of queries, keys and values


_current = Current[Rows]()
packed = _current.using  # forwards, or backwards that run them again, on rows of several samples


def rows_now() -> Rows | None:
    """The rows of this thread's current microbatch; None if a row is one sample."""
    return _current.value


@cached(64)
def places(rows: Rows, length: int, device: torch.device) -> Tensor:
    """The position of each token in its sample: (rows, length) int64; padding starts from 0, too."""
    positions = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, lengths in zip(positions, rows, strict=True):
        row.copy_(torch.cat([torch.arange(n) for n in (*lengths, length - sum(lengths))]))
    return positions.to(device)


def each_alone(attend: Mix, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Attention of (batch, heads, tokens, features), sample by sample; zeros for padding."""
    length, outputs = q.shape[-2], list[Tensor]()
    for number, lengths in enumerate(rows):
        row = slice(number, number + 1)
        cuts = [*lengths, length - sum(lengths)]
        parts = [torch.split(tensor[row], cuts, dim=-2) for tensor in (q, k, v)]
        mixed = [attend(*part) for part in zip(*(part[:-1] for part in parts), strict=True)]
        if cuts[-1]:
            mixed.append(zeros_like(q[row, :, length - cuts[-1] :], v, mixed))
        outputs.append(torch.cat(mixed, dim=-2) if len(mixed) > 1 else mixed[0])
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def zeros_like(q: Tensor, v: Tensor, mixed: list[Tensor]) -> Tensor:
    """Zeros of the dtype that attention of these queries returns, with the features of values."""
    kind = q.device.type
    low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
    return q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=mixed[0].dtype if mixed else low)


class Packed(Feature):
    """Sets the rows of the microbatch of each op that runs layers; a backward may run forwards again."""

    def completes(self, worker: Worker, run: PhaseRun) -> None:
        run.wrap([kind for kind in Kind if kind.is_forward or kind.is_backward], _in_rows)


def _in_rows(handler: Handler, worker: Worker, op: Op) -> None:
    with packed(worker.work.share(worker.step, worker.number(op.mb)).samples):
        handler(worker, op)


class Lengths(Feature):
    """`_now`: the length for which each op has a route."""

    def __init__(self) -> None:
        self._now: dict[Op, Length | None] = {}

    def opens(self, worker: Worker) -> None:
        run, now = worker.phase_run, self._now
        for op in run.routes:  # without a flush also those of the next step
            step = worker.step if run.ending.due(worker, op.mb) else worker.step + 1
            length = worker.work.share(step, worker.number(op.mb)).length
            if now.get(op) != length and (route := route_of(worker, run, op, length)) is not None:
                run.routes[op], now[op] = route, length


def build(context: Context) -> Feature | None:
    if context.unequal:
        return Lengths()
    return None if context.manifest.balance is None else Packed()
