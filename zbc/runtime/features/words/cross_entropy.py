"""The cross entropy of built-in heads with more options than torch's: a sharded vocabulary, a z loss, label smoothing,
chunks.

With chunks only the logits of a chunk of tokens exist at once. F saves the output layer's input and one number per
token, log(sum of exp); B recomputes the logits of a chunk, and makes both gradients from them. The weight gradient is
part of B even if W is a separate op: W would have to keep the gradients of all logits or recompute them once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbc.runtime.core.slot import Slot, accumulate, add_product, current_slot
from zbc.runtime.core.split import SplitLinear
from zbc.runtime.core.tensors import IGNORED
from zbc.runtime.features.tensor_parallel import Group
from zbc.runtime.features.words import words
from zbc.runtime.features.words.words import AS_IS, Shaped, Terms


class Chunks(NamedTuple):
    """Logits of `size` tokens at once, the output of `layer`, `shaped`."""

    layer: nn.Linear
    size: int
    shaped: Shaped = AS_IS

    def multiplier(self) -> Tensor:
        """The weight in the type of products."""
        weight, kind, patch = self.layer.weight, self.layer.weight.device.type, self.layer.forward
        if not torch.is_autocast_enabled(kind):
            return weight.detach()
        dtype = torch.get_autocast_dtype(kind)
        low = patch.cast(dtype) if isinstance(patch, SplitLinear) else None
        return weight.detach().to(dtype) if low is None else low

    def logits(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self.shaped.logits(words.wide(rows.mm(weight.t())))


class How(NamedTuple):
    """Options of a cross entropy; with a vocabulary sharded over `group` this rank has the words from `first` on."""

    terms: Terms
    group: Group | None = None
    first: int = 0
    chunks: Chunks | None = None

    def spans(self, count: int) -> Iterator[slice]:
        size = count if self.chunks is None else self.chunks.size
        return (slice(start, min(count, start + size)) for start in range(0, count, max(size, 1)))


class _CrossEntropy(torch.autograd.Function):
    """The mean of `Terms.losses` over targets that count. `x` are logits (N, words of this rank), or with chunks the
    inputs (N, H) of the layer with `weight`. Ranks exchange three numbers per token; see words.py."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, targets: Tensor, how: How) -> Tensor:
        x, by, (log, logit) = _found(x, targets, how)
        counted = targets != IGNORED
        count = counted.sum()
        ctx.save_for_backward(x, by, log, targets, count)
        ctx.how, ctx.weight, ctx.slot = how, weight, current_slot()
        return how.terms.losses(log, logit).where(counted, log.new_zeros(())).sum() / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, by, log, targets, count = ctx.saved_tensors
        how: How = ctx.how
        share = (grads[0] / count).to(log.dtype)
        if how.chunks is None or by is None:
            d = (x.to(log.dtype) - log[:, None]).exp_()
            return _gradient(d, log, targets, share, how).to(x.dtype), None, None, None
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        into = torch.empty_like(x) if needs_x else None
        learnt = torch.zeros(by.shape, dtype=log.dtype, device=by.device) if needs_weight else None
        for span in how.spans(len(x)):
            d = how.chunks.logits(x[span], by).sub_(log[span, None]).exp_()
            slope = how.chunks.shaped.slope(d, log[span])
            d = _gradient(d, log[span], targets[span], share, how)
            d = (d if slope is None else d.mul_(slope)).to(by.dtype)
            if into is not None:
                torch.mm(d, by, out=into[span])
            if learnt is not None:
                add_product(learnt, d.t(), x[span])
            del d
        return into, _learn(ctx.weight, learnt, ctx.slot), None, None


def _found(x: Tensor, targets: Tensor, how: How) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]:
    """Both factors of the products, inputs and weight, and the results of `words.combine`."""
    chunks, told = how.chunks, list[Tensor]()
    by = None if chunks is None else chunks.multiplier()
    x = x if by is None else x.to(by.dtype)
    with torch.autocast(x.device.type, enabled=False):
        for span in how.spans(len(x)):
            logits = words.wide(x[span]) if chunks is None or by is None else chunks.logits(x[span], by)
            target = words.own(targets[span], how.first, logits.shape[-1])
            told.append(words.tell(logits, target, how.terms, over=by is not None)[0])
            del logits
    mine = told[0] if len(told) == 1 else torch.cat(told, -1)
    return x, by, words.combine(mine[None] if how.group is None else how.group.collect(mine))


def _gradient(d: Tensor, log: Tensor, targets: Tensor, share: Tensor, how: How) -> Tensor:
    """The gradient of the loss by logits, computed in place from `d`, the softmax."""
    if how.terms.z:
        d *= how.terms.soft(torch.ones_like(log), log)[:, None]
    how.terms.less(d, words.own(targets, how.first, d.shape[-1]))
    d *= (targets != IGNORED).to(d.dtype)[:, None] * share
    return d


def _learn(weight: Tensor, grad: Tensor | None, slot: Slot | None) -> Tensor | None:
    """Accumulates a weight's gradient, or returns it for autograd to do so."""
    if grad is None or slot is None:
        return None if grad is None else grad.to(weight.dtype)
    with torch.no_grad():
        accumulate(weight, grad)
    return None


def cross_entropy(
    vocab: int, terms: Terms = words.PLAIN, group: Group | None = None, chunks: Chunks | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss function of logits (..., words of this rank), or with `chunks` of the inputs of the output layer, and
    `targets` (...); the ranks of a group compute it together."""
    how = _how(vocab, terms, group, chunks)

    def loss(x: Tensor, targets: Tensor) -> Tensor:
        weight = None if chunks is None else chunks.layer.weight
        return _CrossEntropy.apply(x.flatten(0, -2), weight, targets.flatten(), how)  # type: ignore[no-any-return, no-untyped-call]

    return loss


def log_probabilities(vocab: int, group: Group | None, chunks: Chunks | None) -> Callable[[Tensor, Tensor], Tensor]:
    """As `cross_entropy`, a function that returns the log probabilities of `targets` (...), 0 if one does not count."""
    how = _how(vocab, words.PLAIN, group, chunks)

    def found(x: Tensor, targets: Tensor) -> Tensor:
        flat = targets.flatten()
        log, logit = _found(x.flatten(0, -2), flat, how)[2]
        return (logit - log).where(flat != IGNORED, log.new_zeros(())).view(targets.shape)

    return found


def _how(vocab: int, terms: Terms, group: Group | None, chunks: Chunks | None) -> How:
    return How(terms, group, 0 if group is None else group.bounds(vocab)[0], chunks)
