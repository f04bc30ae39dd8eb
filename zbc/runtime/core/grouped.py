"""Products of many rows with one matrix of a stack each, as one kernel: the experts of a layer.

Rows are sorted by matrix. `torch.nn.functional.grouped_mm` multiplies all of them in one launch, and on a CPU gives the
bits of a loop of products; types and sizes that it refuses are multiplied one matrix after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from zbc.runtime.core.slot import add_product, trained

_ALIGNED = 16  # bytes, of which the strides of a grouped product are multiples
AT_ONCE = 2**26  # elements of gradients made at a time: room for them, against launches for each few experts


class Groups(NamedTuple):
    """The rows of each matrix, one group after the other: their `counts` on the host, and the place after each group
    as `ends` (int32) on the device of the rows."""

    counts: list[int]
    ends: Tensor

    @staticmethod
    def of(counts: Tensor, on_host: list[int]) -> Groups:
        """Groups of `counts` (E) rows; `on_host`: the same numbers."""
        return Groups(on_host, counts.cumsum(0, dtype=torch.int32))


class Loads:
    """The numbers of rows as the host needs them, from counts on the device. A dry run answers for it."""

    answer: Callable[[int, list[int]], list[list[int]]] | None = None

    @classmethod
    def of(cls, rows: int, counts: Sequence[Tensor]) -> list[list[int]]:
        """Each of `counts` as a list, fetched together since a GPU's host waits. The first is how this rank's `rows`
        are shared out, the others how those that it gets are."""
        sizes = [len(each) for each in counts]
        if cls.answer is not None:
            return cls.answer(rows, sizes)
        found, ends = torch.cat([*counts]).tolist(), accumulate(sizes)
        return [found[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def forward(rows: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    """(N, in) -> (N, out): each group times its matrix of `weight` (E, out, in), transposed, plus `bias` (E, out)."""
    if _together(rows, *weight.shape[1:]):
        y: Tensor = _Grouped.apply(rows, weight, groups)  # type: ignore[no-untyped-call]
    else:
        parts = zip(rows.split_with_sizes(groups.counts), weight.unbind(), strict=True)
        y = torch.cat([functional.linear(part, matrix) for part, matrix in parts])
    return y if bias is None else y + _spread(bias, groups)


class _Grouped(torch.autograd.Function):
    """Torch's kernel with a backward of our own, since its own refuses some gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        ctx.groups, (first, second) = groups, ctx.needs_input_grad[:2]
        ctx.save_for_backward(rows if second else None, weight if first else None)
        y: Tensor = functional.grouped_mm(rows, weight.transpose(-1, -2), offs=groups.ends)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (rows, weight), grad, (first, second) = ctx.saved_tensors, grads[0].contiguous(), ctx.needs_input_grad[:2]
        made = backward(grad, weight, ctx.groups) if first else None
        if not second:
            return made, None, None
        sizes = grad.shape[-1], rows.shape[-1]
        return made, torch.cat([*_weight_grads(grad, rows, ctx.groups, *sizes)]), None


def backward(grad: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """(N, out) -> (N, in): the gradient of the rows."""
    if _together(grad, *weight.shape[1:]):
        found: Tensor = functional.grouped_mm(grad, weight, offs=groups.ends)
        return found
    parts = zip(grad.split_with_sizes(groups.counts), weight.unbind(), strict=True)
    return torch.cat([part.mm(matrix) for part, matrix in parts])


def accumulate_weights(weight: Tensor, grad: Tensor, rows: Tensor, groups: Groups, *, fused: bool) -> None:
    """Adds the gradient of `weight` (E, out, in), from those of the outputs (N, out) and the `rows` (N, in). A matrix
    without rows gets zeros; `fused`: matrix after matrix, added inside the product."""
    if (parameter := trained(weight)) is None:
        return
    total = parameter.grad
    if fused and total is not None:
        for into, (g, r) in zip(total.unbind(), _pairs(grad, rows, groups.counts), strict=True):
            add_product(into, g.t(), r)
        return
    wanted, parts = parameter.grad_dtype or parameter.dtype, tuple[Tensor, ...]()
    for k, product in enumerate(_weight_grads(grad, rows, groups, *parameter.shape[1:])):
        if total is None and len(product) == len(parameter):
            parameter.grad = product.to(wanted)
            return
        if not parts:
            into = torch.empty(parameter.shape, dtype=wanted, device=parameter.device) if total is None else total
            parameter.grad, parts = into, torch.split(into, len(product))
        (parts[k].copy_ if total is None else parts[k].add_)(product)


def _weight_grads(grad: Tensor, rows: Tensor, groups: Groups, outputs: int, inputs: int) -> Iterator[Tensor]:
    """Gradients of some matrices at a time."""
    each, at = max(1, AT_ONCE // max(1, outputs * inputs)), 0
    some = [groups.counts[start : start + each] for start in range(0, len(groups.counts), each)]
    sizes = [sum(counts) for counts in some]
    parts = grad.t().split_with_sizes(sizes, 1), rows.split_with_sizes(sizes), torch.split(groups.ends, each)
    for counts, g, r, ends in zip(some, *parts, strict=True):
        if _together(grad, outputs, inputs):
            product = functional.grouped_mm(g, r, offs=ends - at)
            empty = [place for place, count in enumerate(counts) if not count]
            if empty:  # on some GPUs their result is not written
                product[empty] = 0.0
        else:
            product = torch.stack([a.t().mm(b) for a, b in _pairs(g.t(), r, counts)])
        yield product
        at += sum(counts)


def _pairs(grad: Tensor, rows: Tensor, counts: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(grad.split_with_sizes(counts), rows.split_with_sizes(counts), strict=True)


def of_expert(name: str, place: int) -> str:
    """The name in files of one expert's part of a stack; other names are unchanged."""
    before, inside, after = f".{name}".rpartition(".experts.")
    return f"{before}.experts.{place}.{after}"[1:] if inside and not after[0].isdigit() else name


def _spread(bias: Tensor, groups: Groups) -> Tensor:
    counts = groups.ends.diff(prepend=groups.ends.new_zeros(1))
    return bias.repeat_interleave(counts, 0, output_size=sum(groups.counts))


def _together(rows: Tensor, *sizes: int) -> bool:
    """Whether one kernel multiplies these: not in float64, in bfloat16 alone on a GPU, nor with odd strides."""
    known = (torch.bfloat16,) if rows.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    aligned = all(size * rows.itemsize % _ALIGNED == 0 for size in sizes)
    return rows.dtype in known and aligned
