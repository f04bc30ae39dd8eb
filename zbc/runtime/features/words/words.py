"""Softmax statistics of vocabulary shards.

A rank's words are rows [first, first + rows) of a table. Its logits give three numbers per token: the maximum, the sum
of exp(logit - maximum), the target's logit. All ranks combine these in rank order, so that their results are bitwise
equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOW = (torch.bfloat16, torch.float16)


class Own(NamedTuple):
    """`row`: each token's row in this rank's shard, 0 if it has none; `mine`: whether it has one. Of tokens' shape."""

    row: Tensor
    mine: Tensor


class Terms(NamedTuple):
    """Additional terms of a cross entropy over V words: a z loss z log(sum of exp)^2, and label smoothing: the part
    `smoothing` of the target's weight is spread over all words, `each` = smoothing / V."""

    z: float = 0.0
    smoothing: float = 0.0
    each: float = 0.0

    def losses(self, log: Tensor, logit: Tensor) -> Tensor:
        """(N): losses, from the results of `combine`."""
        return log - logit + self.z * log * log if self.z else log - logit

    def logit(self, target: Tensor, logits: Tensor) -> Tensor:
        """(N): the sum of a rank's `logits` (N, rows) weighted per word; `target`: the logits of targets."""
        return target * (1 - self.smoothing) + logits.sum(-1) * self.each if self.smoothing else target

    def soft(self, scale: Tensor, log: Tensor) -> Tensor:
        """(N): the factor of exp in the gradient of log(sum of exp) and of its z loss; `scale` if z is 0."""
        return scale * (1 + 2 * self.z * log) if self.z else scale

    def less(self, d: Tensor, target: Own) -> Tensor:
        """Subtracts the target weight of each word from `d` (N, rows), in place."""
        d.scatter_add_(-1, target.row[:, None], (self.smoothing - 1) * target.mine[:, None].to(d.dtype))
        return d.sub_(self.each) if self.smoothing else d


PLAIN = Terms()


class Shaped(NamedTuple):
    """What a model makes of the products x of its output layer: cap tanh(scale x / cap), or scale x if cap is 0."""

    scale: float = 1.0
    cap: float = 0.0

    def logits(self, x: Tensor) -> Tensor:
        """In place."""
        x = x if self.scale == 1 else x.mul_(self.scale)
        return x.div_(self.cap).tanh_().mul_(self.cap) if self.cap else x

    def slope(self, soft: Tensor, top: Tensor) -> Tensor | None:
        """(N, rows): the derivative of the logits by x, from `soft` = exp(logits - top); None if it is 1."""
        if not self.cap:
            return None if self.scale == 1 else soft.new_full((1, 1), self.scale).expand_as(soft)
        return soft.log().add_(top[:, None]).div_(self.cap).square_().neg_().add_(1).mul_(self.scale)


AS_IS = Shaped()


def own(tokens: Tensor, first: int, rows: int) -> Own:
    """The rows in this rank's shard of `tokens`, int64."""
    row = tokens - first
    mine = (row >= 0) & (row < rows)
    return Own(row.where(mine, torch.zeros_like(row)), mine)


def tell(logits: Tensor, target: Own, terms: Terms = PLAIN, *, over: bool = False) -> tuple[Tensor, Tensor]:
    """Statistics (3, N) of float32 or float64 `logits` (N, rows), and exp(logits - maximum), (N, rows). The statistics:
    the maximum, the sum of exp(logit - maximum), the target's logit, 0 if another rank has it. `over`: overwrites the
    logits."""
    most = logits.max(-1).values
    logit = logits.gather(-1, target.row[:, None])[:, 0].where(target.mine, logits.new_zeros(()))
    logit = terms.logit(logit, logits)
    soft = torch.sub(logits, most[:, None], out=logits if over else None).exp_()
    return torch.stack([most, soft.sum(-1), logit]), soft


def combine(told: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the sum of exp over the vocabulary and the target's logit, (N) each, from all statistics (ranks, 3, N)."""
    top = told[:, 0].max(0).values
    total, target = torch.zeros_like(top), torch.zeros_like(top)
    for most, part, logit in told:
        total = total + part * (most - top).exp()
        target = target + logit
    return top + total.log(), target


def as_one(told: Tensor) -> Tensor:
    """Merges the statistics of several ranks, (ranks, 3, N), into statistics (3, N) of their joint shard."""
    log, logit = combine(told)
    return torch.stack([log, torch.ones_like(log), logit])


def wide(logits: Tensor) -> Tensor:
    """Logits in float32 at least: statistics over a vocabulary are inaccurate in lower precision."""
    return logits.float() if logits.dtype in LOW else logits
