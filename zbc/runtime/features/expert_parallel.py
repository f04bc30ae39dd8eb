"""Expert parallelism: replicas of a rank shard the experts, and exchange rows of tokens by all-to-all.

    F   an all-to-all of counts, one that dispatches rows to the ranks of their experts, one that combines the outputs
    B   the same for gradients, in reverse
    W   none

All ranks of a group run the same ops in the same order. Their waits may be hidden like the all-reduces of tensor
parallelism (tensor_parallel.py): by weight gradients of the same op, or by the other op of an overlap group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job import userobject
from zbc.runtime.core.grouped import Groups
from zbc.runtime.core.slot import current_slot
from zbc.runtime.features.tensor_parallel import Group


class Sent(NamedTuple):
    """The rows of a rank's experts, in `groups`; with a group `order` has sorted them by expert, and `out` rows went
    to, `into` came from each rank."""

    rows: Tensor
    groups: Groups
    order: Tensor | None = None
    out: Sequence[int] = ()
    into: Sequence[int] = ()


class Swaps(NamedTuple):
    """The experts of a block, sharded over the ranks of `group`; None: this rank has all of them."""

    group: Group | None = None

    def own(self, experts: nn.ModuleDict) -> nn.ModuleDict:
        """This rank's experts, of all experts of a block, under their names there."""
        if self.group is None:
            return experts
        per_rank = len(experts) // self.group.size
        first = per_rank * self.group.place
        return nn.ModuleDict(dict(islice(experts.items(), first, first + per_rank)))

    def run(self, rows: Tensor, counts: Tensor, experts: Iterable[nn.Module]) -> Tensor:
        """The experts' outputs for `rows` (N, H), which are sorted by expert, `counts` (E) for each; `experts` are
        this rank's. All ranks of the group call this together."""
        sent = self.sent(rows, counts)
        del rows
        return self.results(sent, experts)

    def sent(self, rows: Tensor, counts: Tensor) -> Sent:
        """The first half of `run`: the rows of this rank's experts. A call of its own, so that the caller's `rows` are
        freed when it returns: an argument lives as long as its call where Python does not inline calls, as in a process
        that runs compiled code."""
        if self.group is None:
            return Sent(rows, Groups.of(counts))
        size, per_rank = self.group.size, len(counts) // self.group.size
        got = torch.empty_like(counts)
        each = (per_rank,) * size
        # Nothing is computed between the counts and the rows: the other op of a group gets the turn at the rows.
        self.group.transport.start_swap(counts, each, got, each, self.group.ranks).wait()
        come = got.view(size, per_rank)  # by source rank
        sums = counts.view(size, per_rank).sum(1), come.sum(1), come.sum(0)
        found = torch.cat(sums).tolist()  # at once, since a GPU's host waits
        out, into, own = found[:size], found[size : 2 * size], found[2 * size :]
        places = torch.arange(per_rank, device=rows.device).repeat(size)
        kind = places.repeat_interleave(got, output_size=sum(into))
        order = kind.argsort(stable=True)  # by expert, then by source rank
        groups = Groups.of(sums[2], own)
        return Sent(_swapped(rows, out, into, self.group).index_select(0, order), groups, order, out, into)

    def results(self, sent: Sent, experts: Iterable[nn.Module]) -> Tensor:
        """The second half of `run`."""
        parts = torch.split_with_sizes(sent.rows, sent.groups.counts)
        return self.back(sent, torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)]))

    def back(self, sent: Sent, made: Tensor) -> Tensor:
        """The experts' outputs `made`, in the order of the rows given to `sent`."""
        if self.group is None or sent.order is None:
            return made
        return _swapped(made.index_select(0, sent.order.argsort()), sent.into, sent.out, self.group)


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, out: Sequence[int], into: Sequence[int], group: Group) -> Tensor:
        ctx.sizes, ctx.group, ctx.slot = (out, into), group, current_slot()
        received = rows.new_empty(sum(into), rows.shape[1])
        group.swap(rows, out, received, into, ctx.slot)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        out, into = ctx.sizes
        received = grads[0].new_empty(sum(out), grads[0].shape[1])
        ctx.group.swap(grads[0], into, received, out, ctx.slot)
        return received, None, None, None


def _swapped(rows: Tensor, out: Sequence[int], into: Sequence[int], group: Group) -> Tensor:
    received: Tensor = _Swap.apply(rows, out, into, group)  # type: ignore[no-untyped-call]
    return received


def experts(group: Group | None = None) -> Swaps:
    """For a layer of yours with experts: `own(modules)` returns the experts that this rank keeps, `run(rows, counts,
    modules)` the outputs of all experts for rows of tokens, on whichever ranks they are. `group`: the replicas that
    shard the experts, as passed to the layer's `share_experts(group)` (docs/experts.md); None: all are on this rank."""
    return Swaps(group)


def share(name: str, layer: nn.Module, group: Group) -> Iterator[str]:
    """Makes the modules of a layer keep this rank's experts only; yields the prefixes of their parameters' names.
    Raises E119 if a user's module names none, or cannot shard them."""
    for path, module in [*layer.named_modules()]:
        told = getattr(module, "share_experts", None)
        if callable(told):
            where = f"{name}.{path}" if path else name
            local = userobject.call(lambda told=told: told(group), {}, where, "model layer")
            if not any(key.startswith(f"{local}.") for key, _ in module.named_parameters()):
                text = f"model: share_experts of {where} returns {local!r}, under which it has no parameters"
                raise ZbcError(
                    "E119", text, hint='return the name of what holds this rank\'s experts, such as "experts"'
                )
            yield f"{where}.{local}"


def split(parameters: Mapping[str, nn.Parameter], experts: Iterable[str]) -> tuple[dict[str, nn.Parameter], ...]:
    """The parameters of a stage that are not under these names, and those that are."""
    starts = tuple(f"{name}." for name in experts)
    own = {name: p for name, p in parameters.items() if name.startswith(starts)}
    return {name: p for name, p in parameters.items() if name not in own}, own
