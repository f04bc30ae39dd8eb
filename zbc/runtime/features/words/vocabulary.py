"""Vocabulary parallelism: embedding and output layer sharded over all ranks of a pipeline (arXiv 2411.05288).

    I       looks up this rank's words, 0 for others
    GIVE    reduces these to the first stage's rank
    SPREAD  broadcasts the last stage's output
    S       logits of this rank's words, and their softmax statistics (words.py)
    MEET    all-gathers the statistics
    T       the gradient of the output layer's rows
    SUM     reduces the gradient of the last stage's output, if T makes it
    TAKE    broadcasts the gradient of the first stage's input
    E       the gradient of the embedding's rows

With 1 sum S makes its part of the output's gradient, too, before it knows the sum over all words: `soft @ weight` minus
the target's row. MEET then scales it, `exp(maximum - log) * .. `, and reduces it at once. With 2 sums T makes it.

Statistics and reduced tensors are float32 at least, whatever the model's type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from zbc.runtime.core.bucket import gradient_type
from zbc.runtime.core.slot import accumulate_product
from zbc.runtime.core.split import SplitLinear
from zbc.runtime.core.tensors import IGNORED
from zbc.runtime.features.words import words
from zbc.runtime.features.words.words import AS_IS, PLAIN, Own, Shaped, Terms


@dataclass
class Told:
    """The results of S for N tokens: for T `hidden` (N, H) and `soft` (N, rows); for MEET `mine` (3, N); with 1 sum
    `spread` and `row`, both (N, H), the terms of the gradient of `hidden`. `weight` (N): the weight of each token in
    the loss of its microbatch, which has the weight `step` in the loss of a step."""

    hidden: Tensor
    soft: Tensor
    target: Own
    mine: Tensor
    weight: Tensor
    step: float
    spread: Tensor | None = None
    row: Tensor | None = None
    said: Tensor | None = None  # for MEET in place of `mine`: merged over tensor parallel ranks
    terms: Terms = PLAIN

    @property
    def factor(self) -> Tensor:
        """(N): the weight of each token in the loss of a step."""
        return self.weight * self.step

    def loss(self, log: Tensor, logit: Tensor) -> Tensor:
        """The contribution of these tokens to the loss of their microbatch."""
        return (self.terms.losses(log, logit) * self.weight).where(self.weight != 0, self.weight).sum()

    def scale(self, log: Tensor) -> Tensor:
        """(N): the factor that makes `soft` the softmax over all words, and with a z loss that of its gradient."""
        return self.terms.soft((self.mine[0] - log).exp(), log)

    def part(self, log: Tensor) -> Tensor:
        """This rank's part of the gradient of `hidden` (N, H), if S has made its terms, which are consumed."""
        spread, row = cast(Tensor, self.spread), cast(Tensor, self.row)
        self.spread = self.row = None
        for tensor in (spread, row) if row.is_cuda else ():  # made on the rank's stream, read here on a side stream
            tensor.record_stream(torch.cuda.current_stream())
        return spread.mul_(self.scale(log)[:, None]).sub_(row).mul_(self.factor[:, None])


class Output:
    """This rank's rows of the output layer, `weight` (rows, H), the words from `first` on. `dtype`: the type of
    products under autocast, if it is not the weight's."""

    def __init__(
        self,
        weight: nn.Parameter,
        first: int,
        dtype: torch.dtype | None = None,
        terms: Terms = PLAIN,
        shaped: Shaped = AS_IS,
    ) -> None:
        layer = nn.Linear(1, 1, bias=False, device="meta")  # draws nothing: ranks as threads share the generator
        layer.weight = weight
        self.weight, self.first, self._dtype, self.terms, self._shaped = weight, first, dtype, terms, shaped
        self.cast = SplitLinear(layer)  # keeps the cast of the weight for all microbatches

    def _multiplier(self) -> Tensor:
        low = None if self._dtype is None else self.cast.cast(self._dtype)
        return self.weight.detach() if low is None else low

    def tell(
        self, hidden: Tensor, targets: Tensor, weight: Tensor, step: float, *, early: bool, keep: bool = True
    ) -> Told:
        """S, for `hidden` (.., H) and `targets` (..); `weight` and `step` as in `Told`, one number for all that count.
        `early`: makes the terms of the gradient, too; without `keep` nothing is saved for T."""
        by = self._multiplier()
        flat, wanted = hidden.detach().reshape(-1, hidden.shape[-1]).to(by.dtype), targets.reshape(-1)
        target = words.own(wanted, self.first, by.shape[0])
        logits = self._shaped.logits(words.wide(flat.mm(by.t())))
        mine, soft = words.tell(logits, target, self.terms, over=True)
        weights = weight.to(soft.dtype) * (wanted != IGNORED)  # nan if none counts, like a mean
        told = Told(flat, soft if keep else soft.new_empty(0), target, mine, weights, step, terms=self.terms)
        if early:
            slope = self._shaped.slope(soft, mine[0])
            d, one = soft, target.mine
            if slope is not None:
                d, one = soft * slope, slope.gather(-1, target.row[:, None])[:, 0] * one
            told.spread = words.wide(d.to(by.dtype).mm(by))
            told.row = words.wide(by[target.row]).mul_(one[:, None])
            if self.terms.smoothing:
                each = by.sum(0) if slope is None else slope.to(by.dtype).mm(by)
                told.row.mul_(1 - self.terms.smoothing).add_(words.wide(each), alpha=self.terms.each)
        return told

    def learn(self, told: Told, log: Tensor, *, part: bool) -> Tensor | None:
        """T: accumulates the gradient of the rows, unless they are frozen; with `part` returns this rank's part of the
        gradient of `hidden`, (N, H). Consumes `told`: `soft` becomes the gradient of the logits."""
        if not (part or self.weight.requires_grad):
            return None
        slope = self._shaped.slope(told.soft, told.mine[0])
        d = self.terms.less(told.soft.mul_(told.scale(log)[:, None]), told.target)
        d = d if slope is None else d.mul_(slope)
        d = d.mul_(told.factor[:, None]).to(told.hidden.dtype)
        if self.weight.requires_grad:
            accumulate_product(self.weight, d, told.hidden)
        told.soft = told.hidden = d.new_empty(0)
        return words.wide(d.mm(self._multiplier())) if part else None


class Embedding:
    """This rank's rows of the embedding, `weight` (rows, H), the words from `first` on; the word `still` does not learn
    here."""

    def __init__(self, weight: nn.Parameter, first: int, still: int | None = None) -> None:
        self.weight, self.first, self._still = weight, first, still

    def look_up(self, tokens: Tensor) -> tuple[Own, Tensor]:
        """I: the tokens that are this rank's, and embeddings (.., H), 0 for other ranks' words."""
        own = words.own(tokens, self.first, len(self.weight))
        looked = functional.embedding(own.row, self.weight.detach()).masked_fill_(~own.mine[..., None], 0.0)
        return own, looked

    def learn(self, looked: Own, grad: Tensor) -> None:
        """E: adds the gradient (.., H) of the embeddings to this rank's rows."""
        weight = self.weight
        if not weight.requires_grad:
            return
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight, dtype=gradient_type(weight))
        into, rows = weight.grad, looked.row.reshape(-1)
        mine = looked.mine if self._still is None else looked.mine & (looked.row != self._still - self.first)
        own = grad.reshape(-1, grad.shape[-1]).to(into.dtype) * mine.reshape(-1, 1)
        if into.is_cuda:  # where index_add_ is not deterministic
            into.index_put_((rows,), own, accumulate=True)
        else:
            into.index_add_(0, rows, own)
