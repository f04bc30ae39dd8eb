"""Experts that replicas of a rank share out: each has its own, and rows go to them and come back.

    F   rows to the ranks that have their experts, and what these give back: two swaps, behind one of how many
    B   the same of gradients, the other way round
    W   none

All ranks of a group run the same ops in the same order. What is waited for may be hidden as the sums of ranks that
share layers are (tensor_parallel.py): by weight gradients of the same op, or by the other op of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbc.runtime.core.slot import current_slot
from zbc.runtime.features.tensor_parallel import Group


class Swaps(NamedTuple):
    """What this rank does with others of `group` in the experts of a block, of which each has `each`."""

    group: Group
    each: int

    def run(self, rows: Tensor, counts: Tensor, experts: Iterable[nn.Module]) -> Tensor:
        """What all experts make of `rows` (N, H), which lie expert after expert, `counts` (E) of each."""
        size, each = self.group.size, self.each
        got = torch.empty_like(counts)
        self.group.swap(counts, (each,) * size, got, (each,) * size)
        come = got.view(size, each)  # by the rank that they come from
        out, into = counts.view(size, each).sum(1).tolist(), come.sum(1).tolist()
        mine = _swapped(rows, out, into, self.group)
        kind = torch.arange(each, device=rows.device).repeat(size).repeat_interleave(got)
        order = kind.argsort(stable=True)  # by expert, of one by the rank that they come from
        parts = torch.split(mine.index_select(0, order), come.sum(0).tolist())
        made = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
        return _swapped(made.index_select(0, order.argsort()), into, out, self.group)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, out: list[int], into: list[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group, ctx.slot = (out, into), group, current_slot()
        found = rows.new_empty(sum(into), rows.shape[1])
        group.swap(rows, out, found, into)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        out, into = ctx.sizes
        found = grads[0].new_empty(sum(out), grads[0].shape[1])
        ctx.group.swap(grads[0], into, found, out, ctx.slot)
        return found, None, None, None


def _swapped(rows: Tensor, out: list[int], into: list[int], group: Group) -> Tensor:
    found: Tensor = _Swap.apply(rows, out, into, group)  # type: ignore[no-untyped-call]
    return found


def split(parameters: Mapping[str, nn.Parameter], experts: Iterable[str]) -> tuple[dict[str, nn.Parameter], ...]:
    """The parameters of a stage without those under these names, and those."""
    starts = tuple(f"{name}." for name in experts)
    own = {name: p for name, p in parameters.items() if name.startswith(starts)}
    return {name: p for name, p in parameters.items() if name not in own}, own
