"""Tokens of a microbatch that several ranks share out (context parallel; gathers as in arXiv 2407.21783, 3.3.2).

Of 2n chunks of a sequence rank i of n has the chunks i and 2n-1-i, so that causal attention is as much for each. A
block treats its tokens alone but for attention, which meets the keys and values of all ranks:

    F   they are gathered, and each chunk of queries attends to those up to its own end
    B   their gradients are summed, for each rank those of its own tokens
    W   none

Of a sequence that is cut into slices each slice is shared out so; what earlier slices have gathered stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from zbc.runtime.core.slot import current_slot
from zbc.runtime.features.slicing import Limits, attend, causal
from zbc.runtime.features.tensor_parallel import Group


def rows_of(cuts: Sequence[int], place: int, ranks: int) -> Tensor:
    """The places of a rank's tokens in their sequence, slice by slice; `cuts`: where slices begin, and the end."""
    found = list[Tensor]()
    for start, stop in pairwise(cuts):
        size = (stop - start) // (2 * ranks)
        found += [torch.arange(size) + start + chunk * size for chunk in (place, 2 * ranks - 1 - place)]
    return torch.cat(found)


class Spread(NamedTuple):
    """How the tokens of a microbatch are shared out among the ranks of `group`."""

    group: Group

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, cap: float | None = None) -> Any:
        """As slicing.attention, of this rank's tokens: (batch, heads, own tokens, features)."""
        keys, values = _Gather.apply(k, v, self.group)  # type: ignore[no-untyped-call]
        # Queries alone: a view of what queries, keys and values come from would keep all of it.
        return attend(q.contiguous(), keys, values, partial(self._mix, Limits(window, cap)), self.group.size)

    def _mix(self, limits: Limits, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Of two chunks of queries, with the keys of all tokens up to the end of their slice."""
        size, place, ranks = q.shape[-2] // 2, self.group.place, self.group.size
        past = keys.shape[-2] - 2 * ranks * size
        ends = [past + (chunk + 1) * size for chunk in (place, 2 * ranks - 1 - place)]
        seen = _Seen.apply(keys, values, *ends)  # type: ignore[no-untyped-call]
        parts = zip(q.chunk(2, -2), seen[::2], seen[1::2], strict=True)
        return torch.cat([causal(*part, limits).transpose(1, 2) for part in parts], 1).transpose(1, 2)


class _Seen(torch.autograd.Function):
    """Keys and values up to one end, and up to another; their gradients are added in one place, which autograd's own
    would each have of their own."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, values: Tensor, first: int, second: int) -> tuple[Tensor, ...]:
        ctx.length = keys.shape[-2]
        return tuple(whole[..., :end, :] for end in (first, second) for whole in (keys, values))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = list[Tensor]()
        for short, long in zip(grads[:2], grads[2:], strict=True):
            found.append(functional.pad(long, (0, 0, 0, ctx.length - long.shape[-2])))
            found[-1][..., : short.shape[-2], :] += short
        return *found, None, None


class _Gather(torch.autograd.Function):
    """Keys and values of all tokens, in their order; of their gradients the sum over ranks, of a rank's own tokens."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, ...]:
        ctx.group, ctx.slot = group, current_slot()
        early, late = group.collect(torch.stack((k, v))).chunk(2, -2)
        return torch.cat([*early, *reversed([*late])], -2).unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        group: Group = ctx.group
        mine = grads[0].new_empty((2, *grads[0].shape[:-2], grads[0].shape[-2] // group.size, grads[0].shape[-1]))
        parts = mine.new_empty((group.size, *mine.shape))
        for place, part in enumerate(parts):
            for one, grad in zip(part, grads, strict=True):
                chunks = grad.chunk(2 * group.size, -2)
                torch.cat((chunks[place], chunks[-1 - place]), -2, out=one)
        pending = group.transport.start_scatter(parts.view(group.size, -1), mine.view(-1), group.ranks)
        group.settle(pending, ctx.slot)
        return *mine.unbind(0), None
