"""Mixture of experts in place of a block's MLP: the router sends each token to `top_k` experts; no token is dropped.

    router      (N, H) -> (N, E), float32 from there on: scores by softmax or sigmoid, the top_k largest of which are
                the weights of experts; they add up to 1 with `normed`
    experts     MLPs of the family with their weights in stacks, each for the rows of the tokens routed to it, in the
                order of the tokens; in files expert by expert (`Stack`)
    shared      an MLP for all tokens; its output is weighted by a sigmoid of its own gate

Rows are sorted by expert, run, and put back; a token adds the outputs of its experts in the router's order.
A recomputed forward reuses the choices of the first one.
An expert without tokens runs on zero rows, so that all have gradients in every microbatch.

Tensor parallel ranks have a shard of the width of each expert, and the whole router: outputs of experts and gradients
of their weights (scores) are all-reduced. Or, `fold`, each has whole experts and routes a share of the tokens, whose
outputs are all-gathered.

With a `rate` a bias, which STEP changes (expert_parallel.py), is added to the scores when experts are chosen.
`balance` c adds c E sum(f P) to the loss, of each block: f the share of all choices that an expert got, P its mean
share of a token's scores (arXiv 2101.03961, section 2.2; 2412.19437, section 2.1.2); `z` c adds c
mean(logsumexp(logits)^2) (arXiv 2202.08906).

The weights of a stack are one parameter of a layer in memory, one for each expert in files; with expert parallelism a
rank has a part of a stack:

    layers.3.mlp.experts.down.weight        (E, out, in) in memory
    layers.3.mlp.experts.7.down.weight      (out, in) in checkpoints and Hugging Face folders
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zbc.job.model_section import Model
from zbc.runtime.core.again import made_again
from zbc.runtime.core.grouped import Groups, of_expert
from zbc.runtime.core.private import valued
from zbc.runtime.core.remembered import decided
from zbc.runtime.core.split import GroupedLinear
from zbc.runtime.core.state import Worker
from zbc.runtime.features.added import add_loss, tell_load
from zbc.runtime.features.experts.expert_parallel import Swaps
from zbc.runtime.features.tensor_parallel import Group
from zbc.training.models.parts import linear, same

softmax: Callable[[Tensor], Tensor] = functools.partial(torch.softmax, dim=-1)  # of logits


class Expert(nn.Module):
    """(rows, H) -> (rows, H): the MLP of a family; `gated` as in Llama, otherwise with biases as in GPT-2."""

    def __init__(self, hidden: int, width: int, layers: int, *, gated: bool, activation: nn.Module) -> None:
        super().__init__()
        self.gated, self.activation = gated, activation
        self.enter = self.leave = same  # as of `Experts`, for a shared expert alone
        if gated:
            self.gate_up = linear(hidden, 2 * width, bias=False)  # rows: gate, then up
        else:
            self.up = linear(hidden, width)
        self.down = linear(width, hidden, layers, bias=not gated)

    def forward(self, x: Tensor, *groups: Groups) -> Tensor:
        x = self.enter(x)
        if not self.gated:
            return self.leave(self.down(made_again(self.activation, self.up(x, *groups)), *groups))
        return self.leave(self.down(made_again(self._gated, self.gate_up(x, *groups)), *groups))

    def _gated(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.activation(gate) * up  # type: ignore[no-any-return]


class ExpertStack(Expert):
    """`count` experts in one: (rows, H) -> (rows, H), each group of rows by its own weights. `made` makes an expert."""

    def __init__(self, count: int, made: Callable[[], Expert]) -> None:
        nn.Module.__init__(self)
        one = made()
        self.gated, self.activation, self.enter, self.leave = one.gated, one.activation, same, same
        for name, inner in one.named_children():
            if isinstance(inner, nn.Linear):
                bias = inner.bias is not None
                setattr(self, name, GroupedLinear(count, inner.in_features, inner.out_features, bias=bias))
        for place in range(count if valued(one.down.weight) else 0):
            one = made() if place else one
            for name, parameter in one.named_parameters():
                self.get_parameter(name).data[place] = parameter.data


def keep_own(experts: nn.Module, group: Group) -> None:
    """Keeps the experts of this rank of `group`."""
    for inner in experts.modules():
        if isinstance(inner, GroupedLinear):
            inner.keep(*group.bounds(inner.all))


def lowered(rows: Tensor) -> Tensor:
    """Rows in the type in which experts read them, and in which they are sent to other ranks and saved."""
    kind = rows.device.type
    lower = torch.is_autocast_enabled(kind) and rows.dtype is torch.float32
    return rows.to(torch.get_autocast_dtype(kind)) if lower else rows


class Experts(nn.Module):
    """(.., H) -> (.., H)."""

    def __init__(self, model: Model, activation: nn.Module) -> None:
        """Those of a block of a model, with the `activation` of its family."""
        super().__init__()
        hidden, count, shared = model.hidden or 0, model.experts or 0, model.shared_hidden
        self.count, self.top_k, self.normed, self.groups = count, model.met, model.normed, model.expert_groups or (1, 1)
        (self.balance, self.rate), (_, self.z) = model.balances, model.z_losses
        self.scores: Callable[[Tensor], Tensor] = torch.sigmoid if model.router == "sigmoid" else softmax
        gated = model.family == "llama"
        made = functools.partial(Expert, hidden, layers=model.layers, gated=gated, activation=activation)
        self.router = linear(hidden, count, bias=False)
        self.experts = ExpertStack(count, functools.partial(made, model.mlp_width))
        self.shared = made(shared) if shared else None
        self.shared_gate = linear(hidden, 1, bias=False) if shared else None
        self.swaps = Swaps()
        self.enter = self.leave = same  # with tensor parallelism: input and output of the sharded experts;
        self.whole = self.meet = same  # gather of tokens for a computation that all repeat; its results into experts
        self.fold: Group | None = None  # the group each rank of which routes a share of the tokens, if any
        self.tokens: tuple[Group, ...] = ()  # the groups that share the tokens of a microbatch
        # The layout of its input: tokens flat, or by sequences, if they are gathered.
        self.rows: Callable[[Tensor], Tensor] = functools.partial(torch.flatten, end_dim=-2)
        self.place: int | None = None  # index of its first expert among those of all blocks
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(count) if self.rate else None)

    def forward(self, x: Tensor) -> Tensor:
        own = x if self.fold is None else self.fold.share(x)
        logits = self.whole(self.router(own)).flatten(0, -2)
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        likely = self.scores(logits)
        chosen = decided(lambda: self._chosen(likely.detach()))
        weights = likely.gather(-1, chosen)
        if self.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        each = chosen.flatten()
        counts = each.new_zeros(self.count).scatter_add_(0, each, torch.ones_like(each))  # bincount waits for a GPU
        if self.place is not None:
            tell_load(self.place, counts)
        all_x = self.enter(own)
        given, weights = all_x.flatten(0, -2), self.meet(weights)
        met = self.swaps.dispatch(given, chosen, weights, counts, lowered)
        y = self.swaps.combine(met, self.experts)
        tokens, shape = len(likely), all_x.shape
        if self.fold is not None:  # from here on all tokens of this rank, of which it has routed a share
            y, given, shape = self.fold.shared(y, x), x, x.shape
            tokens = shape[:-1].numel() * (self.fold.size if self.fold.sequence else 1)
        if self.shared is not None and self.shared_gate is not None:
            gates = self.whole(self.shared_gate(x)).view(*y.shape[:-1], 1)
            y = y + self.meet(gates.sigmoid()) * self.shared(given)
        y = self.leave(y.view(shape))
        adds = self.training and (self.balance or self.z)
        return add_loss(y, self._added(logits, likely, counts, tokens)) if adds else y

    def _chosen(self, likely: Tensor) -> Tensor:
        """(N, top_k): the experts of each token, by descending score plus bias."""
        likely, (groups, met) = likely if self.bias is None else likely + self.bias, self.groups
        if met < groups:  # of groups with the largest sums of two scores (arXiv 2412.19437, section 2.1.2)
            apart = likely.view(-1, groups, self.count // groups)
            some = apart.topk(min(2, apart.shape[-1]), -1).values.sum(-1).topk(met, -1).indices
            others = torch.ones_like(apart[..., 0], dtype=torch.bool).scatter_(1, some, value=False)
            likely = apart.masked_fill(others[..., None], -torch.inf).view_as(likely)
        return likely.topk(self.top_k, -1).indices

    def share_experts(self, group: Group) -> str:
        """Keeps only this rank's experts, with expert parallelism over `group`."""
        self.swaps = Swaps(group)
        keep_own(self.experts, group)
        return "experts"

    def _added(self, logits: Tensor, likely: Tensor, counts: Tensor, tokens: int) -> Tensor:
        """This rank's part of the losses, which are means over `tokens`."""
        for group in self.tokens if self.balance else ():
            counts = group.collect(counts).sum(0)
        share = counts.to(likely.dtype) / counts.sum()
        normed = likely if self.scores is softmax else likely / likely.sum(-1, keepdim=True)
        found = self.balance * self.count * (share * normed.sum(0)).sum() / tokens
        return found + self.z * logits.logsumexp(-1).square().sum() / tokens if self.z else found


class Balance(NamedTuple):
    """The loss of routers, of `experts` of which a token meets `met`: `weight` x experts x the sum over these of
    the choices of each, and of its scores, both per token of a microbatch in all layers.

    Layers pass on both, (2, experts), of the routers so far.
    """

    experts: int
    met: int
    weight: float

    def told(self, told: Tensor, logits: Iterable[Tensor]) -> Tensor:
        """With those of routers with `logits` (N, experts)."""
        for each in logits:
            scores = each.softmax(-1)
            chosen = scores.topk(self.met, -1).indices.flatten()
            counts = torch.zeros_like(told[0]).scatter_add_(0, chosen, torch.ones_like(chosen, dtype=told.dtype))
            told = told + torch.stack([counts, scores.float().sum(0)])
        return told

    def loss(self, told: Tensor, group: Group | None = None) -> Tensor:
        """Of this rank's tokens, of which a group's choices are counted together."""
        mine = told.detach()[0]
        counts = mine if group is None else group.collect(mine).sum(0)
        return self.weight * self.experts * self.met**2 * (counts / counts.sum() * told[1]).sum() / mine.sum()


class Stack(NamedTuple):
    """The experts in a rank's parameter: `own` from `first` on, of `all`."""

    first: int
    own: int
    all: int


def stacks_in(layers: Iterable[tuple[str, nn.Module]]) -> dict[str, Stack]:
    """The stacked parameters of named layers."""
    return {
        ".".join(filter(None, (name, path, key))): Stack(inner.first, len(inner.weight), inner.all)
        for name, layer in layers
        for path, inner in layer.named_modules()
        if isinstance(inner, GroupedLinear)
        for key, _ in inner.named_parameters(recurse=False)
    }


def stacks_of(worker: Worker) -> dict[str, Stack]:
    """Those of a rank, by global name."""
    return stacks_in((one.name, one.module) for stage in worker.stages.values() for one in stage.layers)


def unstacked(parameters: Iterable[tuple[str, Tensor]], stacks: Mapping[str, Stack]) -> Iterator[tuple[str, Tensor]]:
    """Parameters by their names in files, stacks expert by expert."""
    for name, parameter in parameters:
        if (stack := stacks.get(name)) is None:
            yield name, parameter
        else:
            yield from ((of_expert(name, stack.first + place), one) for place, one in enumerate(parameter))


def pieces(shape: tuple[int, ...], start: int, tensor: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """The elements of a stack of this shape from `start` on as the place of an expert, the first element in its weight,
    and the elements of that."""
    flat, size, at = tensor.reshape(-1), math.prod(shape[1:]), 0
    while at < len(flat):
        place, begin = divmod(start + at, size)
        stop = min(len(flat), at + size - begin)
        yield place, begin, flat[at:stop]
        at = stop
