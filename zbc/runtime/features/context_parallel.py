"""Context parallelism: the tokens of a microbatch are sharded over ranks (gathers as in arXiv 2407.21783, 3.3.2).

Of 2n chunks of a sequence rank i of n has the chunks i and 2n-1-i, which balances causal attention. Only attention
needs the tokens of other ranks, namely their keys and values:

    F   an all-gather of keys and values; each chunk of queries attends to those up to its own end
    B   a reduce-scatter of their gradients
    W   none

If a sequence has slices, each slice is sharded like this; keys and values gathered for earlier slices are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from zbc.runtime.core.slot import current_slot
from zbc.runtime.core.tensors import cached
from zbc.runtime.features.packing import Rows, rows_now, zeros_like
from zbc.runtime.features.slices.slicing import Limits, attend, causal
from zbc.runtime.features.tensor_parallel import Group


def rows_of(cuts: Sequence[int], place: int, ranks: int) -> Tensor:
    """Positions of a rank's tokens in their sequence, slice by slice; `cuts`: starts of slices, then the length."""
    positions = list[Tensor]()
    for start, stop in pairwise(cuts):
        size = (stop - start) // (2 * ranks)
        positions += [torch.arange(size) + start + chunk * size for chunk in (place, 2 * ranks - 1 - place)]
    return torch.cat(positions)


@cached(256)
def rows_in(length: int, place: int, ranks: int, device: torch.device | str = "cpu") -> Tensor:
    """Positions of a rank's tokens in rows of `length` tokens without slices; each is copied to a device once."""
    return rows_of((0, length), place, ranks).to(device)


class Spread(NamedTuple):
    """Attention of a microbatch whose tokens are sharded over the ranks of `group`."""

    group: Group

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Positions of this rank's `count` tokens in a row without slices."""
        return rows_in(count * self.group.size, self.group.place, self.group.size, device)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **limits: Any) -> Any:
        """As slicing.attention, for this rank's tokens: (batch, heads, own tokens, features)."""
        keys, values = _Gather.apply(k, v, self.group)  # type: ignore[no-untyped-call]
        rows, own = rows_now(), Limits(**limits)
        mix = partial(self._mix, own) if rows is None else partial(self._each_alone, own, rows)
        # A copy of the queries: a view would keep the joint tensor of queries, keys and values.
        return attend(q.contiguous(), keys, values, mix, self.group.size)

    def _mix(self, limits: Limits, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of two chunks of queries to the keys of all tokens up to the end of their slice."""
        size, place, ranks = q.shape[-2] // 2, self.group.place, self.group.size
        past = keys.shape[-2] - 2 * ranks * size
        ends = [past + (chunk + 1) * size for chunk in (place, 2 * ranks - 1 - place)]
        seen = _Seen.apply(keys, values, *ends)  # type: ignore[no-untyped-call]
        parts = zip(q.chunk(2, -2), seen[::2], seen[1::2], strict=True)
        return torch.cat([causal(*part, limits).transpose(1, 2) for part in parts], 1).transpose(1, 2)

    def _each_alone(self, limits: Limits, rows: Rows, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As `_mix`, sample by sample; zeros for padding, with gradients of zero, since all ranks sum those of keys."""
        size, place, outputs = q.shape[-2] // 2, self.group.place, list[Tensor]()
        for number, lengths in enumerate(rows):
            one, mixed = slice(number, number + 1), list[Tensor]()
            for half, chunk in enumerate((place, 2 * self.group.size - 1 - place)):
                first, ends = chunk * size, [*accumulate(lengths)]
                for begin, end in pairwise((0, *ends)):
                    low, high = max(begin, first), min(end, first + size)
                    if low < high:
                        own = q[one, :, half * size + low - first : half * size + high - first]
                        mixed.append(causal(own, keys[one, :, begin:high], values[one, :, begin:high], limits))
                left = min(size, first + size - sum(lengths))
                if left > 0:
                    nothing = zeros_like(q[one, :, :left], values, mixed)
                    mixed.append(nothing + 0.0 * (keys[one, :1, :1, :1] + values[one, :1, :1, :1]).to(nothing.dtype))
            outputs.append(torch.cat(mixed, -2))
        return torch.cat(outputs)


class _Seen(torch.autograd.Function):
    """Keys and values up to one end, and up to another; their gradients are added into one buffer, whereas autograd
    would make one for each view."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, values: Tensor, first: int, second: int) -> tuple[Tensor, ...]:
        ctx.length = keys.shape[-2]
        return tuple(whole[..., :end, :] for end in (first, second) for whole in (keys, values))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sums = list[Tensor]()
        for short, long in zip(grads[:2], grads[2:], strict=True):
            sums.append(functional.pad(long, (0, 0, 0, ctx.length - long.shape[-2])))
            sums[-1][..., : short.shape[-2], :] += short
        return *sums, None, None


class _Gather(torch.autograd.Function):
    """All-gathers keys and values of all tokens, in their order; backward reduce-scatters their gradients."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, ...]:
        ctx.group, ctx.slot = group, current_slot()
        early, late = group.collect(torch.stack((k, v)), ctx.slot).chunk(2, -2)
        return torch.cat([*early, *reversed([*late])], -2).unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        group: Group = ctx.group
        mine = grads[0].new_empty((2, *grads[0].shape[:-2], grads[0].shape[-2] // group.size, grads[0].shape[-1]))
        parts = mine.new_empty((group.size, *mine.shape))
        for place, part in enumerate(parts):
            for target, grad in zip(part, grads, strict=True):
                chunks = grad.chunk(2 * group.size, -2)
                torch.cat((chunks[place], chunks[-1 - place]), -2, out=target)
        pending = group.transport.start_scatter(parts.view(group.size, -1), mine.view(-1), group.ranks)
        group.settle(pending, ctx.slot)
        return *mine.unbind(0), None
