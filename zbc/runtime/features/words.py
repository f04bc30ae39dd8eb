"""What ranks that each have some words of a vocabulary say to each other: its rows are cut, and so is the softmax.

A rank's words are rows [first, first + rows) of a table. Of the logits of its own it tells three numbers per token: the
largest, the sum of exp behind it, the target's logit. All combine those in the order of the ranks, so that all have the
same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # a target that does not count, as in torch's cross entropy
LOW = (torch.bfloat16, torch.float16)


class Own(NamedTuple):
    """Which tokens are words of this rank, and their rows; 0 where they are not. Both of the tokens' shape."""

    row: Tensor
    mine: Tensor


class Terms(NamedTuple):
    """What a cross entropy over V words has beside the log-likelihood of its targets: z log(sum of exp)^2, and of the
    target's weight the share `smoothing` for all words, `each` of which has smoothing / V."""

    z: float = 0.0
    smoothing: float = 0.0
    each: float = 0.0

    def losses(self, log: Tensor, logit: Tensor) -> Tensor:
        """(N), of what `combine` finds."""
        return log - logit + self.z * log * log if self.z else log - logit

    def logit(self, target: Tensor, logits: Tensor) -> Tensor:
        """(N): the sum of a rank's `logits` (N, rows), each by the weight of its word; `target`: those of targets."""
        return target * (1 - self.smoothing) + logits.sum(-1) * self.each if self.smoothing else target

    def soft(self, scale: Tensor, log: Tensor) -> Tensor:
        """(N): what exp is multiplied with, `scale` where z is 0, for the gradient of log(sum of exp) and of its z."""
        return scale * (1 + 2 * self.z * log) if self.z else scale

    def less(self, d: Tensor, target: Own) -> Tensor:
        """`d` (N, rows), in place less the weight of each word."""
        d.scatter_add_(-1, target.row[:, None], (self.smoothing - 1) * target.mine[:, None].to(d.dtype))
        return d.sub_(self.each) if self.smoothing else d


PLAIN = Terms()


def own(tokens: Tensor, first: int, rows: int) -> Own:
    """What of `tokens`, int64, this rank has."""
    row = tokens - first
    mine = (row >= 0) & (row < rows)
    return Own(row.where(mine, torch.zeros_like(row)), mine)


def tell(logits: Tensor, target: Own, terms: Terms = PLAIN, *, over: bool = False) -> tuple[Tensor, Tensor]:
    """Of float32 `logits` (N, rows), or float64: (3, N), what is told of them; and exp(logits - largest), (N, rows).

    What is told: the largest, the sum of exp behind it, the target's logit, 0 where another rank has that. `over`: the
    logits are overwritten.
    """
    most = logits.max(-1).values
    logit = logits.gather(-1, target.row[:, None])[:, 0].where(target.mine, logits.new_zeros(()))
    logit = terms.logit(logit, logits)
    soft = torch.sub(logits, most[:, None], out=logits if over else None).exp_()
    return torch.stack([most, soft.sum(-1), logit]), soft


def combine(told: Tensor) -> tuple[Tensor, Tensor]:
    """(N) each, of what all ranks tell, (ranks, 3, N): log of the sum of exp over all words, the target's logit."""
    top = told[:, 0].max(0).values
    total, target = torch.zeros_like(top), torch.zeros_like(top)
    for most, part, logit in told:
        total = total + part * (most - top).exp()
        target = target + logit
    return top + total.log(), target


def as_one(told: Tensor) -> Tensor:
    """(3, N) that stands for what several ranks tell, (ranks, 3, N)."""
    log, logit = combine(told)
    return torch.stack([log, torch.ones_like(log), logit])


def wide(logits: Tensor) -> Tensor:
    """At least float32: statistics of many words are wrong in less."""
    return logits.float() if logits.dtype in LOW else logits
