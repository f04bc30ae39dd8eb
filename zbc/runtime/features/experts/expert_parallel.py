"""Expert parallelism: replicas of a rank shard the experts, and exchange rows of tokens by all-to-all.

    F   an all-to-all of counts, one that dispatches rows to the ranks of their experts, one that combines the outputs
    B   the same for gradients, in reverse
    W   none

Between nodes an exchange may take two steps (`Topology.steps`): a token's row is sent once to each node with one of its
experts, to the rank at the same place, with the token's choices and their weights; that rank exchanges rows inside its
node, adds up the token's weighted outputs there, and sends back their sum.

All ranks of a group run the same ops in the same order. Their waits may be hidden like the all-reduces of tensor
parallelism (tensor_parallel.py): by weight gradients of the same op, or by the other op of an overlap group.

Loads of experts, and router biases that balance them (arXiv 2408.15664): every F reports the number of rows of each
expert of a block; VALIDATE sums them over all ranks. If routers have a bias, STEP changes an expert's by `rate`: up if
its load was below the mean of its block, down if it was above. The bias affects the choice of experts for a token, not
their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.job import userobject
from zbc.runtime.core.feature import Context, Feature
from zbc.runtime.core.grouped import Groups, Loads
from zbc.runtime.core.slot import Slot
from zbc.runtime.core.state import Handler, PhaseRun, Worker
from zbc.runtime.features.tensor_parallel import Group, meets


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

    def dispatch(
        self, rows: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor, lowered: Callable[[Tensor], Tensor]
    ) -> Met:
        """Sends the `rows` (N, H) of tokens to the experts `chosen` (N, k), with `weights` (N, k) for their outputs;
        `counts` (E): the choices of each expert; `lowered`: makes rows of the type in which they are sent. All ranks of
        the group call this together, and `combine` after it."""
        if self.group is None or len(self.group.steps) < 2:
            order = chosen.flatten().argsort(stable=True)
            return Met(self.sent(lowered(rows.index_select(0, order // chosen.shape[1])), counts), order, weights)
        across, inside = self.group.steps
        rows, chosen, weights, counts, pairs, home = _crossed(across, lowered(rows), chosen, weights, len(counts))
        order = chosen.flatten().argsort(stable=True)[:pairs]
        copies = Copies.rows(order // chosen.shape[1], len(rows))
        picked = copies.spread(rows)
        del rows
        return Met(Swaps(inside).sent(picked, counts), order, weights, copies, home)

    def combine(self, met: Met, experts: Callable[[Tensor, Groups], Tensor]) -> Tensor:
        """(N, H): for each token the sum of its experts' outputs times their weights; `experts` gives the outputs of
        this rank's. They are made here, since an argument lives as long as its call (see `sent`)."""
        last = self if met.copies is None or self.group is None else Swaps(self.group.steps[-1])
        found = last.back(met.sent, experts(met.sent.rows, met.sent.groups))
        if met.copies is None:
            found = found.index_select(0, met.order.argsort()).view(*met.weights.shape, -1)
            return (found * met.weights.to(found.dtype)[..., None]).sum(1)
        weights = met.weights.flatten().index_select(0, met.order).to(found.dtype)
        return met.home(met.copies.summed(found * weights[:, None]))

    def run(self, rows: Tensor, counts: Tensor, experts: Iterable[nn.Module]) -> Tensor:
        """The experts' outputs for `rows` (N, H), which are sorted by expert, `counts` (E) for each; `experts` are
        this rank's. All ranks of the group call this together."""
        sent = self.sent(rows, counts)
        del rows
        parts = torch.split_with_sizes(sent.rows, sent.groups.counts)
        return self.back(sent, torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)]))

    def sent(self, rows: Tensor, counts: Tensor) -> Sent:
        """The first half of `run`: the rows of this rank's experts. A call of its own, so that the caller's `rows` are
        freed when it returns: an argument lives as long as its call where Python does not inline calls, as in a process
        that runs compiled code."""
        if self.group is None:
            return Sent(rows, Groups.of(counts, *Loads.of(len(rows), [counts])))
        size, per_rank = self.group.size, len(counts) // self.group.size
        got = torch.empty_like(counts)
        each = (per_rank,) * size
        # Nothing is computed between the counts and the rows: the other op of a group gets the turn at the rows.
        self.group.transport.start_swap(counts, each, got, each, self.group.ranks).wait()
        come = got.view(size, per_rank)  # by source rank
        each_own = come.sum(0)
        out, into, own = Loads.of(len(rows), [counts.view(size, per_rank).sum(1), come.sum(1), each_own])
        places = torch.arange(per_rank, device=rows.device).repeat(size)
        kind = places.repeat_interleave(got, output_size=sum(into))
        order = kind.argsort(stable=True)  # by expert, then by source rank
        groups = Groups.of(each_own, own)
        return Sent(self.group.swapped(rows, out, into).index_select(0, order), groups, order, out, into)

    def back(self, sent: Sent, made: Tensor) -> Tensor:
        """The experts' outputs `made`, in the order of the rows given to `sent`."""
        if self.group is None or sent.order is None:
            return made
        return self.group.swapped(made.index_select(0, sent.order.argsort()), sent.into, sent.out)


class Copies(NamedTuple):
    """Copies of rows: `of` (P) is the row of each, `order` (P) lists them row by row, from `starts` (N) on."""

    of: Tensor
    order: Tensor
    starts: Tensor

    @classmethod
    def rows(cls, of: Tensor, count: int) -> Copies:
        """Copies of the rows `of`, of `count` rows."""
        sums = of.new_zeros(count + 1).scatter_add_(0, of + 1, torch.ones_like(of)).cumsum(0)
        return cls(of.int(), of.argsort(stable=True).int(), sums[:-1].int())  # kept until B

    def spread(self, rows: Tensor) -> Tensor:
        """The copies (P, H) of `rows` (N, H)."""
        return meets(rows, self, Copies._taken, Copies._added)

    def summed(self, copies: Tensor) -> Tensor:
        """The sums (N, H) of each row's `copies` (P, H), in their order."""
        return meets(copies, self, Copies._added, Copies._taken)

    def _taken(self, rows: Tensor, slot: Slot | None) -> Tensor:
        return rows.index_select(0, self.of)

    def _added(self, copies: Tensor, slot: Slot | None) -> Tensor:
        if not len(self.of):
            return copies.new_zeros(len(self.starts), copies.shape[1])
        return embedding_bag(self.order, copies.contiguous(), self.starts, mode="sum")


class Met(NamedTuple):
    """Rows `sent` to experts, and their way back: the `order` of their choices among all, and the `weights` (N, k) of
    these. After a step across nodes the tokens are those that have come here, with `copies` for their choices; `home`
    brings back what each token's copies on all nodes add up to."""

    sent: Sent
    order: Tensor
    weights: Tensor
    copies: Copies | None = None
    home: Callable[[Tensor], Tensor] = lambda rows: rows


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number of a row


def _crossed(
    group: Group, rows: Tensor, chosen: Tensor, weights: Tensor, experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, Callable[[Tensor], Tensor]]:
    """Sends the rows of tokens once to each node with one of their experts: the rows that have come here, their choices
    (the number of the node's experts where one is on another node), weights, the choices of each expert of the node and
    of all, and the way back."""
    (nodes, (tokens, k)), own = (group.size, chosen.shape), experts // group.size
    node = chosen // own
    met = torch.zeros(tokens, nodes, dtype=torch.bool, device=rows.device).scatter_(1, node, value=True)
    pairs = node.new_zeros(nodes).scatter_add_(0, node.flatten(), torch.ones_like(node.flatten()))
    told, one = torch.stack((met.sum(0), pairs), 1), (1,) * nodes
    got = torch.empty_like(told)
    group.transport.start_swap(told, one, got, one, group.ranks).wait()
    out, into, paired = torch.stack((told[:, 0], got[:, 0], got[:, 1])).tolist()  # at once, since a GPU's host waits
    copies = Copies.rows(met.t().flatten().argsort(descending=True, stable=True)[: sum(out)] % tokens, tokens)
    bits = chosen.to(_BITS[rows.itemsize]).view(rows.dtype)
    packed = torch.cat((rows, weights.to(rows.dtype), bits), 1)
    come = group.swapped(copies.spread(packed), out, into)
    rows, weights, bits = torch.split_with_sizes(come, (rows.shape[1], k, k), 1)
    local = bits.detach().contiguous().view(_BITS[rows.itemsize]).long() - own * group.place
    local = local.where((local >= 0) & (local < own), own)
    each = local.flatten()
    counts = each.new_zeros(own + 1).scatter_add_(0, each, torch.ones_like(each))[:-1]

    def home(rows: Tensor) -> Tensor:
        return copies.summed(group.swapped(rows, into, out))

    return rows, local, weights.contiguous(), counts, sum(paired), home


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
                hint = 'return the name of what holds this rank\'s experts, such as "experts"'
                raise ZbcError("E119", text, hint=hint)
            yield f"{where}.{local}"


@runtime_checkable
class Routed(Protocol):
    """A layer with a router; its `count` experts have the indices from `place` on among those of all blocks."""

    place: int | None
    count: int
    rate: float
    bias: Tensor | None


class Routing(Feature):
    def __init__(self, layers: Mapping[int, Sequence[Routed]]) -> None:
        self._layers = layers

    def completes(self, worker: Worker, run: PhaseRun) -> None:
        run.wrap([kind for kind in Kind if kind.steps], self._balance)

    def _balance(self, handler: Handler, worker: Worker, op: Op) -> None:
        handler(worker, op)
        verdict = worker.verdict
        if verdict is None or verdict.skipped:
            return
        for router in self._layers.get(op.stage, ()):
            if router.bias is not None and router.place is not None:
                loads = torch.tensor(verdict.routed[router.place : router.place + router.count], dtype=torch.float64)
                router.bias.add_(router.rate * (loads.mean() - loads).sign().to(router.bias))


def number_blocks(name: str, layer: nn.Module, count: int) -> list[Routed]:
    """The routers of a layer `layers.3`; sets the index of their first expert among those of all blocks."""
    inside: list[object] = [*layer.modules()]
    routers = [router for router in inside if isinstance(router, Routed)]
    for router in routers:
        router.place = int(name.rpartition(".")[2]) * count
    return routers


def build(context: Context) -> Routing | None:
    count = context.manifest.planning.get("model", {}).get("experts") or 0
    stages = context.stages.items() if count else ()
    blocks = {s: [layer for layer in stage.layers if layer.name.startswith("layers.")] for s, stage in stages}
    routers = {s: [r for one in own for r in number_blocks(one.name, one.module, count)] for s, own in blocks.items()}
    return Routing(routers) if routers else None
